"""A short training under ``horovodrun`` with gradients on a device, compared with the same on the host, to the bit.

    python -m benchmarks.gpu.training DEVICE FOLDER      # a rank, started by ``check``

A model whose gradient is the distance to a target of each rank makes the two comparable: nothing is computed but
differences, and products with powers of two, which a GPU rounds as a CPU does.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import horovod.torch as hvd
import numpy as np
import torch

from hvd_twobit import jobs
from hvd_twobit.config import TRANSPORTS
from hvd_twobit.torch import TwoBit, residuals_of
from hvd_twobit.torch.placement import KERNELS_VARIABLE

from .checking import LeftOut, Setup, differences

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
LIMIT_S = 240
THRESHOLDS: tuple[float | str, ...] = ("auto", 0.5)
LEARNING_RATE = 0.25
MOMENTUM = 0.5


def check(setup: Setup, ranks: int) -> Iterator[str]:
    """Train with so many ranks on this machine; GPUs are shared where there are fewer.

    Raises:
        LeftOut: NCCL would be given a GPU twice, which it refuses.
    """
    if setup.full and hvd.nccl_built() and torch.cuda.device_count() < ranks:
        raise LeftOut(f"NCCL takes no two ranks on one GPU, of which there are {torch.cuda.device_count()} for {ranks}")
    environment = jobs.environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), environment["PYTHONPATH"]])
    with tempfile.TemporaryDirectory(prefix="hvd_twobit_gpu_check_") as name:
        folder = pathlib.Path(name)
        command = [*jobs.horovodrun(ranks), sys.executable, "-m", __name__, setup.device.type, name]
        with jobs.running(command, environment, folder / "log") as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LIMIT_S)
            if process.poll() != 0:
                raise RuntimeError("\n".join(["the job did not end well; it printed:",
                                              *jobs.last_lines(folder / "log")]))
        for rank in range(ranks):
            yield from json.loads((folder / f"rank.{rank}").read_text())


def compared(device: torch.device, shapes: list[tuple[int, ...]], steps: int) -> list[str]:
    """Of each transport and threshold what differs on this rank, or nothing."""
    texts = []
    for transport, threshold in itertools.product(TRANSPORTS, THRESHOLDS):
        label = f"{transport}, {threshold}"
        wanted = _trained(torch.device("cpu"), "numba", shapes, steps, transport, threshold, f"host {label}")
        found = _trained(device, "triton", shapes, steps, transport, threshold, f"device {label}")
        text = differences([(name, found[name], wanted[name]) for name in wanted])
        texts.append(text and f"rank {hvd.rank()}, {label}: {text}")
    return texts


def _trained(device: torch.device, kernels: str, shapes: list[tuple[int, ...]], steps: int, transport: str,
             threshold: float | str, label: str) -> dict[str, np.ndarray]:
    """Weights and residuals after some steps."""
    parameters = [torch.nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
    targets = [_target(shape, number).to(device) for number, shape in enumerate(shapes)]
    names = [f"{label}.{number}" for number in range(len(shapes))]
    with _chosen(kernels):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM), list(zip(names, parameters)),
            TwoBit(threshold, min_elements=0, transport=transport))
        for _ in range(steps):
            optimizer.zero_grad()
            torch.stack([(0.5 * (parameter - target) * (parameter - target)).sum()
                         for parameter, target in zip(parameters, targets)]).sum().backward()
            optimizer.step()
    residuals = residuals_of(optimizer)
    for name in names:
        where = residuals[name].device if isinstance(residuals[name], torch.Tensor) else "the host"
        if kernels == "triton" and where != device:
            raise RuntimeError(f"the gradient of {name} was compressed on {where}, not on {device}")
    found = {f"weight {number}": parameter.detach().cpu().numpy() for number, parameter in enumerate(parameters)}
    return found | {f"residual {number}": torch.as_tensor(residuals[name]).cpu().numpy()
                    for number, name in enumerate(names)}


def _target(shape: tuple[int, ...], number: int) -> torch.Tensor:
    """Where this rank's parameter wants to be: multiples of 1/64, whose first sums over ranks are exact."""
    random = np.random.default_rng([hvd.rank(), number])
    return torch.from_numpy((random.integers(-256, 257, shape) / 64).astype(np.float32))


@contextlib.contextmanager
def _chosen(kernels: str) -> Iterator[None]:
    before = os.environ.get(KERNELS_VARIABLE)
    os.environ[KERNELS_VARIABLE] = kernels
    try:
        yield
    finally:
        del os.environ[KERNELS_VARIABLE]
        if before is not None:
            os.environ[KERNELS_VARIABLE] = before


def _main(kind: str, folder: pathlib.Path) -> None:
    hvd.init()
    if kind == "cuda":
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
        texts = compared(device, [(1000, 512), (70, 50), (33,), (512,)], steps=20)
    else:
        texts = compared(torch.device("cpu"), [(7, 5), (16,)], steps=3)
    (folder / f"rank.{hvd.rank()}").write_text(json.dumps(texts))
    hvd.barrier()


if __name__ == "__main__":
    _main(sys.argv[1], pathlib.Path(sys.argv[2]))

"""A job of two ranks on this machine that trains with TwoBit, compared to the bit with a simulation in NumPy.

    python -m hvd_twobit.checks.self_test FRONT_END FOLDER LIMIT_S        # a rank, started by ``self_test``

Each rank takes a few steps of Horovod's optimizer with ``compression=TwoBit``, once for each transport, and compares
its weights after each step; the digests of weights are compared across ranks here. A loss that is the sum of weights
times constants has these constants for gradients, whatever the weights are.
"""

from __future__ import annotations

import faulthandler
import functools
import hashlib
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from .. import jobs
from ..config import DEFAULT_MIN_ELEMENTS, TRANSPORTS
from . import steps

RANKS = 2
TRAINING_STEPS = 5
SHAPES = ((70, 130), (3000,), (10,))
"""Several blocks, blocks that are not full, and a tensor that travels uncompressed."""

STEPS = ("hvd.init()", *TRANSPORTS, "end")

Train = Callable[[str, Sequence[Sequence[Any]]], Sequence[Sequence[Any]]]
"""Weights after each step, for a transport and the gradients of each step."""


def self_test(front_end: str, controller: str, limit_s: float,
              launcher: str = jobs.HOROVODRUN) -> list[steps.Outcome]:
    """Run the job; how far each rank got.

    Args:
        front_end: ``"torch"`` or ``"tensorflow"``.
        controller: ``"gloo"`` or ``"mpi"``.
        limit_s: after so many seconds the job is ended, with all its processes.
        launcher: the module that is run as horovodrun.
    """
    with tempfile.TemporaryDirectory(prefix="hvd_twobit_check_") as name:
        folder = pathlib.Path(name)
        command = [*jobs.horovodrun(RANKS, controller, launcher),
                   sys.executable, "-m", __name__, front_end, str(folder), str(limit_s)]
        # Two ranks have no room on one GPU, which TensorFlow takes as a whole; compression is computed on the CPU.
        variables = jobs.environment(CUDA_VISIBLE_DEVICES="-1")
        variables.pop("HVD_TWOBIT_TRANSPORT", None)
        with jobs.running(command, variables, folder / "log") as process:
            try:
                ended = f"horovodrun ended with status {process.wait(limit_s)}"
            except subprocess.TimeoutExpired:
                ended = f"no end within {limit_s:g} s"
        lines = jobs.last_lines(folder / "log", 1)
        ended = ": ".join([ended, *lines])
        return [steps.read(folder / str(rank), STEPS, ended) for rank in range(RANKS)]


# On the ranks.

def _main(front_end: str, folder: pathlib.Path, limit_s: float) -> None:
    faulthandler.dump_traceback_later(2 * limit_s, exit=True)  # Where nobody is left to end the job.
    if front_end == "torch":
        from .self_test_torch import hvd, train
    else:
        from .self_test_tensorflow import hvd, train
    hvd.init()
    steps.carry_out(folder / str(hvd.rank()), {
        "hvd.init()": lambda: _check_ranks(hvd.size()),
        **{transport: functools.partial(_compare, train, transport, hvd.rank()) for transport in TRANSPORTS},
        "end": lambda: hvd.allgather_object(0, name="end") and None})


def _check_ranks(size: int) -> None:
    if size != RANKS:
        raise RuntimeError(f"horovodrun started {RANKS} processes, but Horovod sees {size}")


def _compare(train: Train, transport: str, rank: int) -> str:
    """The digest of this rank's weights after training by this transport.

    Raises:
        RuntimeError: they were not those of the simulation.
    """
    import numpy as np

    gradients = [_gradients(step) for step in range(TRAINING_STEPS)]
    trained = train(transport, [of_step[rank] for of_step in gradients])
    digest = hashlib.blake2b(digest_size=16)
    for step, (found, wanted) in enumerate(zip(trained, _simulated(gradients))):
        for number, (weights, simulated) in enumerate(zip(found, wanted)):
            different = np.count_nonzero(weights.view(np.uint32) != simulated.view(np.uint32))
            if different:
                raise RuntimeError(f"step {step}, tensor {number}: {different} of {weights.size} weights "
                                   "are not those of the simulation")
            digest.update(weights.tobytes())
    return digest.hexdigest()


def _gradients(step: int) -> list[list[Any]]:
    """Float32 arrays of all ranks, by rank and tensor."""
    import numpy as np
    return [[np.random.default_rng((step, rank, number)).standard_normal(shape).astype(np.float32)
             for number, shape in enumerate(SHAPES)] for rank in range(RANKS)]


def _simulated(gradients: Sequence[Sequence[Sequence[Any]]]) -> list[list[Any]]:
    """Weights after each step, from zero, at a learning rate of 1 and averaged gradients."""
    import numpy as np

    from .simulation import SimulatedAdaptiveTensor, uncompressed

    trained: list[list[Any]] = [[] for _ in gradients]
    for number, shape in enumerate(SHAPES):
        weights = np.zeros(shape, np.float32)
        tensor = SimulatedAdaptiveTensor(RANKS, weights.size)
        for of_step, after in zip(gradients, trained):
            of_ranks = [of_rank[number] for of_rank in of_step]
            reduced = (tensor.step(of_ranks, 1 / RANKS).reshape(shape) if weights.size >= DEFAULT_MIN_ELEMENTS
                       else uncompressed(of_ranks, 1 / RANKS))
            weights = weights - reduced
            after.append(weights)
    return trained


if __name__ == "__main__":
    _main(sys.argv[1], pathlib.Path(sys.argv[2]), float(sys.argv[3]))

"""``hvd-twobit bench frontends``: one exchange of a model's gradients under TensorFlow, compared with PyTorch.

Two jobs of Horovod ranks on this machine, one per framework, are alive at the same time and take turns, so that both
meet the same load: a round is one exchange of each. What is reported are medians over rounds of milliseconds and of
the ratio within a round. The limit is 1.25 times PyTorch's time. What an exchange includes is everything between a
rank's gradients and the reduced ones: compression, Horovod, decompression; not the computation of gradients.

Run as a module with a framework's name, this file is the program of one rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import click
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from . import machine_facts, progress_bar

SHAPES = [(2048, 4096), (4096,), (4096, 2048), (2048,), (2048, 2048), (2048,), (2048, 1024), (1024,), (1024, 2000),
          (2000,)]
"""A dense model of 25 million parameters."""

LIMIT = 1.25
WARM_UP_ROUNDS = 2
_POLL_S = 0.005
_START_LIMIT_S = 120
_ROUND_LIMIT_S = 30


def run(ranks: int, rounds: int, as_json: bool) -> None:
    """Measure and print.

    Args:
        ranks: ranks of each job.
        rounds: rounds to take medians over, after two that are not counted.
        as_json: print JSON instead of a table.

    Raises:
        click.ClickException: a job failed.
    """
    samples: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="hvd_twobit_bench_") as name, contextlib.ExitStack() as stack:
        jobs = {framework: stack.enter_context(_job(framework, pathlib.Path(name), ranks))
                for framework in ("torch", "tensorflow")}
        for exchange in jobs.values():
            exchange(_START_LIMIT_S)  # Waits until the job has started; traces and compiles.
        with progress_bar(as_json) as bar:
            for number in bar.track(range(WARM_UP_ROUNDS + rounds), description="rounds"):
                order = list(jobs) if number % 2 else list(reversed(jobs))
                sample = {framework: jobs[framework](_ROUND_LIMIT_S) for framework in order}
                if number >= WARM_UP_ROUNDS:
                    samples.append(sample)
    _report(ranks, samples, as_json)


def _report(ranks: int, samples: list[dict[str, float]], as_json: bool) -> None:
    parameters = sum(int(np.prod(shape)) for shape in SHAPES)
    milliseconds = {name: 1e3 * statistics.median(sample[name] for sample in samples) for name in samples[0]}
    ratio = statistics.median(sample["tensorflow"] / sample["torch"] for sample in samples)
    if as_json:
        print(json.dumps({"machine": machine_facts(), "ranks": ranks, "parameters": parameters, "rounds": len(samples),
                          "milliseconds": milliseconds, "tensorflow_to_torch": ratio, "limit": LIMIT,
                          "met": ratio <= LIMIT}))
        return
    table = Table(title=f"One exchange of {parameters:,} parameters' gradients, {ranks} ranks", title_justify="left",
                  box=SIMPLE_HEAD, show_edge=False)
    for heading in ("PyTorch ms", "TensorFlow ms", "ratio", "required", "met"):
        table.add_column(heading, justify="right")
    table.add_row(f"{milliseconds['torch']:.1f}", f"{milliseconds['tensorflow']:.1f}", f"{ratio:.2f}", f"{LIMIT:.2f}",
                  "[green]yes[/]" if ratio <= LIMIT else "[red]no[/]")
    console = Console()
    console.print(table)
    console.print(f"\nMedians over {len(samples)} rounds; {json.dumps(machine_facts())}", soft_wrap=True)


@contextlib.contextmanager
def _job(framework: str, folder: pathlib.Path, ranks: int) -> Iterator[Callable[[float], float]]:
    """Start a job; yields what lets it exchange once, within a time limit in seconds, and returns the seconds taken."""
    folder = folder / framework
    folder.mkdir()
    launcher = pathlib.Path(sys.executable).with_name("horovodrun")
    command = [str(launcher), "--gloo", "-np", str(ranks), sys.executable, "-m", __name__, framework, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3",
                   "PYTHONPATH": os.pathsep.join(filter(None, [str(pathlib.Path(__file__).parents[2]),
                                                               os.environ.get("PYTHONPATH")]))}
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    done = 0

    def exchange(limit_s: float) -> float:
        nonlocal done
        (folder / f"go.{done}").touch()
        answer = folder / f"seconds.{done}"
        end = time.monotonic() + limit_s
        while not answer.exists():
            if process.poll() is not None or time.monotonic() > end:
                raise click.ClickException(f"the job of {framework} failed:\n{(folder / 'log').read_text()[-3000:]}")
            time.sleep(_POLL_S)
        done += 1
        return float(answer.read_text())

    try:
        yield exchange
        (folder / "stop").touch()
        process.wait(_ROUND_LIMIT_S)
    finally:
        if process.poll() is None:
            process.terminate()  # horovodrun ends its ranks.
            process.wait(_ROUND_LIMIT_S)


# On the ranks.

def _serve(exchange: Callable[[], float], rank: int, folder: pathlib.Path) -> None:
    number = 0
    while not (folder / "stop").exists():
        if not (folder / f"go.{number}").exists():
            time.sleep(_POLL_S)
            continue
        seconds = exchange()
        if rank == 0:
            (folder / "part").write_text(repr(seconds))
            (folder / "part").rename(folder / f"seconds.{number}")
        number += 1


def _gradients(rank: int) -> list[np.ndarray]:
    random = np.random.default_rng(rank)
    return [random.standard_normal(shape, np.float32) for shape in SHAPES]


def _torch(folder: pathlib.Path) -> None:
    import horovod.torch as hvd
    import torch

    from hvd_twobit.torch import TwoBit

    hvd.init()
    torch.set_num_threads(1)
    gradients = [torch.from_numpy(gradient) for gradient in _gradients(hvd.rank())]
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    received = [torch.zeros(shape) for shape in SHAPES]
    for parameter, memory in zip(parameters, received):
        parameter.grad = memory
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=1.0), compression=TwoBit,
        named_parameters=[(f"parameter.{number}", parameter) for number, parameter in enumerate(parameters)])

    def exchange() -> float:
        for memory, gradient in zip(received, gradients):
            memory.copy_(gradient)
        hvd.barrier()
        start = time.perf_counter()
        optimizer.synchronize()
        return time.perf_counter() - start

    _serve(exchange, hvd.rank(), folder)


def _tensorflow(folder: pathlib.Path) -> None:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvd_twobit.tensorflow import TwoBit

    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    gradients = [tf.constant(gradient) for gradient in _gradients(hvd.rank())]
    variables = [tf.Variable(tf.zeros(shape), name=f"variable_{number}") for number, shape in enumerate(SHAPES)]

    @tf.function
    def reduced(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        @tf.custom_gradient
        def model(*values: tf.Tensor) -> tuple[tf.Tensor, Callable[..., list[tf.Tensor]]]:
            return tf.zeros([]), lambda upstream, variables=None: gradients

        with tf.GradientTape() as tape:
            loss = model(*[tf.convert_to_tensor(variable) for variable in variables])
        tape = hvd.DistributedGradientTape(tape, compression=TwoBit)
        return tape.gradient(loss, variables)

    barrier = tf.function(lambda: hvd.allreduce(tf.random.uniform([1]), name="barrier"))

    def exchange() -> float:
        barrier()
        start = time.perf_counter()
        reduced(gradients)
        return time.perf_counter() - start

    _serve(exchange, hvd.rank(), folder)


if __name__ == "__main__":
    {"torch": _torch, "tensorflow": _tensorflow}[sys.argv[1]](pathlib.Path(sys.argv[2]))

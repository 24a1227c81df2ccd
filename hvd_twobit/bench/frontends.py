"""``hvd-twobit bench frontends``: one exchange of a model's gradients under TensorFlow, compared with PyTorch.

Two jobs of Horovod ranks on this machine, one per framework, are alive at the same time and take turns, so that both
meet the same load: a round is one exchange of each. What is reported are medians over rounds of milliseconds and of
the ratio within a round. The limit is 1.25 times PyTorch's time. What an exchange includes is everything between a
rank's gradients and the reduced ones: compression, Horovod, decompression; not the computation of gradients.

Run as a module with a framework's name, this file is the program of one rank.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .. import jobs
from . import machine_facts, progress_bar, require

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
        click.ClickException: something is not installed, or a job failed.
    """
    require("horovod", "torch", "tensorflow")
    samples: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="hvd_twobit_bench_") as name, contextlib.ExitStack() as stack:
        exchanges = {framework: stack.enter_context(_job(framework, pathlib.Path(name), ranks))
                     for framework in ("torch", "tensorflow")}
        for exchange in exchanges.values():
            exchange(_START_LIMIT_S)  # Waits until the job has started; traces and compiles.
        with progress_bar(as_json) as bar:
            for number in bar.track(range(WARM_UP_ROUNDS + rounds), description="rounds"):
                order = list(exchanges) if number % 2 else list(reversed(exchanges))
                sample = {framework: exchanges[framework](_ROUND_LIMIT_S) for framework in order}
                if number >= WARM_UP_ROUNDS:
                    samples.append(sample)
    _report(ranks, samples, as_json)


def _report(ranks: int, samples: list[dict[str, float]], as_json: bool) -> None:
    parameters = sum(math.prod(shape) for shape in SHAPES)
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
    command = [*jobs.horovodrun(ranks), sys.executable, "-m", __name__, framework, str(folder)]
    with jobs.running(command, jobs.environment(), folder / "log") as process:
        done = 0

        def exchange(limit_s: float) -> float:
            nonlocal done
            (folder / f"go.{done}").touch()
            answer = folder / f"seconds.{done}"
            limit = time.monotonic() + limit_s
            while not answer.exists():
                if process.poll() is not None or time.monotonic() > limit:
                    lines = jobs.last_lines(folder / "log")
                    raise click.ClickException("\n".join([f"the job of {framework} failed; it printed:", *lines]))
                time.sleep(_POLL_S)
            done += 1
            return float(answer.read_text())

        yield exchange
        (folder / "stop").touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_ROUND_LIMIT_S)


# On the ranks.

def _main(framework: str, folder: pathlib.Path) -> None:
    hvd = importlib.import_module(f"horovod.{framework}")
    exchanges = importlib.import_module(f"{__package__}.{framework}_exchange")
    hvd.init()
    _use_one_thread(framework)
    exchange = exchanges.Exchange("auto", exchanges.Gradients(SHAPES, seed=hvd.rank()))
    number = 0
    while not (folder / "stop").exists():
        if not (folder / f"go.{number}").exists():
            time.sleep(_POLL_S)
            continue
        seconds = exchange.seconds()
        if hvd.rank() == 0:
            (folder / "part").write_text(repr(seconds))
            (folder / "part").rename(folder / f"seconds.{number}")
        number += 1


def _use_one_thread(framework: str) -> None:
    if framework == "torch":
        import torch
        torch.set_num_threads(1)
    else:
        import tensorflow
        tensorflow.config.threading.set_intra_op_parallelism_threads(1)


if __name__ == "__main__":
    _main(sys.argv[1], pathlib.Path(sys.argv[2]))

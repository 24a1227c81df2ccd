"""Time and bytes of an exchange of gradients over links of a known bandwidth: JSON, a report, charts.

    python -m benchmarks.network                                         # everything; as root, about 40 minutes
    python -m benchmarks.network --rates 1gbit --ranks 2 --models resnet50
    python -m benchmarks.network --ranks 4,8 --ranks-per-machine 2       # two levels, too
    python -m benchmarks.network --report-only results/network.json

Ranks run under horovodrun in network namespaces of this machine (``cluster``, ``job``) and exchange what they are told
to (``rank``); what is measured is compared with what the bytes of a method must take (``cost``, ``report``). Results
are written one by one, and take the place of older ones of the same rate, number of ranks and model, so that parts can
be measured at other times.
"""

from __future__ import annotations

import datetime
import itertools
import math
import pathlib
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import click

from hvd_twobit import __version__
from hvd_twobit.bench import machine_facts, progress_bar
from hvd_twobit.bench.methods import BASELINES, METHODS
from hvd_twobit.bench.shapes import MODELS, shapes_of
from hvd_twobit.cost_model import HIERARCHICAL

from . import report
from .cluster import UNSHAPED, ClusterError, bits_per_second, check_possible, cluster
from .cost import predict
from .interrupts import Interrupted, Interrupts
from .job import HOROVODRUN, Job, JobFailed, running
from .results import Entry, load, merge

WARM_UP_ROUNDS = 2
"""Not shaped, and not counted: adaptive levels travel uncompressed in the first, and kernels are compiled or loaded."""

SETTLE_BYTES = 10_000_000
"""An allreduce of these comes before the first round at another rate."""

_ASSUMED_BITS = 10**9  # Of a link without a limit, to find out how long to wait for an answer.


class CommaSeparated(click.ParamType):
    """Values between commas, each checked and converted by a function that raises ValueError."""

    name = "list"

    def __init__(self, convert_one: Callable[[str], Any]) -> None:
        self._convert_one = convert_one

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        if not isinstance(value, str):
            return value
        try:
            return list(dict.fromkeys(self._convert_one(part.strip()) for part in value.split(",")))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _rate(text: str) -> str:
    bits_per_second(text)
    return text


def _ranks(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= 64:
        raise ValueError(f"{text!r} ranks: take a number from 2 to 64")
    return int(text)


def _model(text: str) -> str:
    shapes_of(text)
    return text


def _method(text: str) -> str:
    if text not in METHODS:
        raise ValueError(f"no method {text!r}: take {', '.join(METHODS)}")
    reason = METHODS[text].unavailable(ranks_per_machine=2)
    if reason:
        raise ValueError(f"hvd_twobit {__version__} does not have the method {text!r}: {reason}")
    return text


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rates", type=CommaSeparated(_rate), default="100mbit,1gbit,10gbit,unshaped", show_default=True,
              help="Bandwidths of a rank's link, in each direction.")
@click.option("--ranks", "numbers", type=CommaSeparated(_ranks), default="2,4,8", show_default=True,
              help="Numbers of ranks.")
@click.option("--ranks-per-machine", type=click.IntRange(min=1), default=1, show_default=True,
              help="Ranks that share a machine and its link; more than one adds the exchange of two levels.")
@click.option("--models", type=CommaSeparated(_model), default=",".join(MODELS), show_default=True,
              help="What is exchanged: tensor (25.6 million elements), tensor:ELEMENTS, resnet50.")
@click.option("--methods", type=CommaSeparated(_method), default=None,
              help=f"Any of {', '.join(METHODS)}; {' and '.join(BASELINES)} are always measured. Default: all that "
                   "hvd_twobit has.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True,
              help="Exchanges with each method, in turn.")
@click.option("--json", "results", type=click.Path(dir_okay=False, path_type=pathlib.Path),
              default="results/network.json", show_default=True, help="Results; those that are there are kept.")
@click.option("--report", "page", type=click.Path(dir_okay=False, path_type=pathlib.Path), default="docs/benchmarks.md",
              show_default=True, help="The report; its charts lie beside it.")
@click.option("--report-only", type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path),
              help="Measure nothing: write the report of these results.")
@click.option("--launcher", default=HOROVODRUN, hidden=True, help="Module to run as horovodrun.")
def main(rates: list[str], numbers: list[int], ranks_per_machine: int, models: list[str], methods: list[str] | None,
         rounds: int, results: pathlib.Path, page: pathlib.Path, report_only: pathlib.Path | None,
         launcher: str) -> None:
    """Measure exchanges of gradients over links of a known bandwidth, and write a report."""
    if any(number % ranks_per_machine or number == ranks_per_machine for number in numbers):
        raise click.UsageError(f"--ranks {','.join(map(str, numbers))} cannot be {ranks_per_machine} on each of "
                               "several machines")
    try:
        if report_only is None:
            check_possible()
            load(results)  # Better to find out now that it is another file.
            measure(rates, numbers, models, _with_baselines(methods, ranks_per_machine), rounds, results, launcher,
                    ranks_per_machine)
        for path in report.write(load(report_only or results), page):
            click.echo(f"written: {path}")
    except (ClusterError, JobFailed, ValueError) as error:
        raise click.ClickException(str(error)) from error
    except Interrupted as interrupted:
        click.echo(f"{interrupted}; what was measured is in {results}", err=True)
        raise SystemExit(interrupted.status) from interrupted


def _with_baselines(chosen: Sequence[str] | None, ranks_per_machine: int) -> list[str]:
    missing = {name: reason for name, method in METHODS.items() if (reason := method.unavailable(ranks_per_machine))}
    if chosen is None:
        for name, reason in missing.items():
            if name == HIERARCHICAL:
                continue
            click.echo(f"not measured, as hvd_twobit {__version__} does not have it: {name} ({reason})", err=True)
        chosen = [name for name in METHODS if name not in missing]
    for name in chosen:
        if name in missing:
            raise click.UsageError(f"method {name}: {missing[name]}")
    return [name for name in METHODS if name in BASELINES or name in chosen]


def measure(rates: Sequence[str], numbers: Sequence[int], models: Sequence[str], methods: Sequence[str], rounds: int,
            results: pathlib.Path, launcher: str = HOROVODRUN, ranks_per_machine: int = 1) -> None:
    """Measure all combinations, one job for each number of ranks and model.

    Raises:
        ClusterError: a network cannot be made.
        JobFailed: a job ended early, or its ranks disagreed.
        Interrupted: a signal asked to end.
    """
    total = len(numbers) * len(models) * (WARM_UP_ROUNDS + len(rates) * rounds)
    with Interrupts() as interrupts, progress_bar(quiet=False) as bar:
        task = bar.add_task("", total=total)
        for ranks, model in itertools.product(numbers, models):
            elements = [math.prod(shape) for shape in shapes_of(model)]
            bar.update(task, description=f"{ranks} ranks, {model}, start")

            def limit_s(rate: str, ranks: int = ranks, elements: Sequence[int] = elements) -> float:
                return _limit_s(methods, elements, ranks, ranks_per_machine, rate)

            with cluster(ranks // ranks_per_machine, ranks_per_machine) as network, \
                    running(network, model, methods, interrupts, launcher) as job:
                _warm_up(job, methods, limit_s(UNSHAPED))
                bar.advance(task, WARM_UP_ROUNDS)
                for rate in rates:
                    bar.update(task, description=f"{ranks} ranks, {model}, {rate}")
                    network.shape(rate)
                    machine = _machine()
                    rounds_at_rate = _rounds(job, methods, rounds, limit_s(rate), lambda: bar.advance(task))
                    merge(results, Entry(rate, ranks, model, elements, machine, rounds_at_rate, ranks_per_machine))


def _warm_up(job: Job, methods: Sequence[str], limit_s: float) -> None:
    """Rounds that do not count; after the last one, ranks compare what they received."""
    for number in range(1, WARM_UP_ROUNDS + 1):
        job.order(limit_s, methods=methods, check=number == WARM_UP_ROUNDS)


def _rounds(job: Job, methods: Sequence[str], rounds: int, limit_s: float,
            advance: Callable[[], None]) -> list[dict[str, Any]]:
    """Exchange in turn with each method, in every round another one first; what the ranks answered."""
    job.order(limit_s, settle=SETTLE_BYTES)
    measured = []
    for number in range(rounds):
        first = number % len(methods)
        measured.append(job.order(limit_s, methods=[*methods[first:], *methods[:first]], check=False))
        advance()
    return measured


def _limit_s(methods: Sequence[str], elements: Sequence[int], ranks: int, ranks_per_machine: int,
             rate: str) -> float:
    """How long to wait for a round: many times what it should take, so that only a job that hangs is given up."""
    rate_bits = bits_per_second(rate) or _ASSUMED_BITS
    return 300 + 20 * sum(predict(method, elements, ranks, rate_bits, ranks_per_machine).seconds or 0
                          for method in methods)


def _machine() -> dict[str, Any]:
    return {**machine_facts(), "kernel": ".".join(platform.release().split(".")[:2]),
            "date": f"{datetime.date.today()}", "hvd_twobit": __version__,
            **{name: version(name) for name in ("horovod", "torch")}}


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.network")

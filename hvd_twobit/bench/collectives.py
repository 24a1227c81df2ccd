"""``hvd-twobit bench collectives``: on the users' own cluster, an exchange uncompressed, in fp16 and with TwoBit.

Every rank that horovodrun started runs this. In each round every method exchanges once, in every round another one
first, so that all meet the same load of the link; what is reported are medians over rounds of the slowest rank's time
and of the ratios within a round. Bytes are counted where they are handed to Horovod (``sent_bytes``) and, as they
travel, computed (``cost_model``). ``torch_exchange`` and ``tensorflow_exchange`` tell what an exchange is.

``benchmarks/network`` measures the same over links that it makes, and ``benchmarks/collectives.py`` the constants of
the cost model.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..cost_model import HIERARCHICAL
from ..errors import TwoBitError, UnsupportedOperationError
from ..machines import Machines, Place
from . import machine_facts, progress_bar, require
from .methods import BASELINES, METHODS
from .rounds import DifferentGradients, Round, Summary, compare, summarize
from .shapes import shapes_of

WARM_UP_ROUNDS = 2
"""Not counted: adaptive levels travel uncompressed in the first, and kernels are compiled or loaded."""

AS_GOOD = 1.05
"""Up to so many times the time of the fastest transport, the default, auto, is what is recommended."""


class OneProcess(click.ClickException):
    """There is nobody to exchange with."""

    exit_code = 2

    def __init__(self) -> None:
        super().__init__("this is one process, which exchanges nothing: start the command on the ranks of your "
                         "cluster, such as `horovodrun -np 4 -H host1:2,host2:2 hvd-twobit bench collectives`")


def run(model: str, front_end: str, repeats: int, as_json: bool) -> None:
    """Measure on every rank, print on rank 0.

    Args:
        model: see ``shapes_of``.
        front_end: ``"torch"`` or ``"tensorflow"``.
        repeats: rounds to take medians over, after two that are not counted.
        as_json: print JSON, in one line, instead of a table.

    Raises:
        OneProcess: there is one process only.
        click.ClickException: something is not installed or Horovod is another one, a rank is gone, or ranks received
            different gradients.
    """
    require("horovod", front_end)
    try:
        hvd = importlib.import_module(f"horovod.{front_end}")
        exchange = importlib.import_module(f"{__package__}.{front_end}_exchange")
        importlib.import_module(f"hvd_twobit.{front_end}")
        from horovod.common.exceptions import HorovodInternalError
    except (ImportError, TwoBitError) as error:
        raise click.ClickException(f"{' '.join(str(error).split())}; `hvd-twobit check` tells more") from error
    hvd.init(process_sets="dynamic")
    if hvd.size() == 1:
        raise OneProcess
    ranks_per_machine = _ranks_per_machine(hvd)
    shapes = shapes_of(model)
    gradients = exchange.Gradients(shapes, seed=hvd.rank())
    exchanges = {name: exchange.Exchange(name, gradients)
                 for name, method in METHODS.items() if method.unavailable(ranks_per_machine) is None}
    with progress_bar(quiet=as_json or hvd.rank() != 0) as bar:
        task = bar.add_task("rounds", total=WARM_UP_ROUNDS + 1 + repeats)
        try:
            rounds = _measure(hvd, exchanges, repeats, lambda: bar.advance(task))
        except (DifferentGradients, HorovodInternalError) as error:
            raise click.ClickException(f"rank {hvd.rank()}: {error}") from error
    if hvd.rank() == 0:
        elements = [math.prod(shape) for shape in shapes]
        _report(Measured(model, elements, front_end, hvd.size(), hvd.cross_size(), ranks_per_machine, rounds), as_json)
    hvd.allgather_object(0, name="end")  # A rank that ends early takes the others down.


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured.

    Attributes:
        model: what was exchanged.
        elements: of each of its tensors.
        front_end: by which.
        ranks: number of ranks.
        machines: that they were on.
        ranks_per_machine: where these are several with equally many ranks; otherwise 1.
        rounds: see ``rounds``.
    """

    model: str
    elements: Sequence[int]
    front_end: str
    ranks: int
    machines: int
    ranks_per_machine: int
    rounds: Sequence[Round]


def _ranks_per_machine(hvd: Any) -> int:
    """Ranks that share a link, where they are equally many on several machines; otherwise 1."""
    try:
        machines = Machines.of(hvd.allgather_object(Place.of(hvd), name="places"))
    except UnsupportedOperationError:
        return 1
    return machines.local_size if len(machines.ranks) > 1 else 1


def _measure(hvd: Any, exchanges: Mapping[str, Any], repeats: int, advance: Callable[[], object]) -> list[Round]:
    for number in range(WARM_UP_ROUNDS):
        _round(hvd, exchanges, number)
        advance()
    for name, exchange in exchanges.items():
        compare(name, hvd.allgather_object(exchange.digest(), name="digest"))
    sent = {name: [exchange.sent_nbytes()] for name, exchange in exchanges.items()}
    advance()
    rounds: list[Round] = []
    for number in range(repeats):
        seconds = _round(hvd, exchanges, number)
        rounds.append({name: {"seconds": seconds[name], "sent": sent[name]} for name in exchanges})
        advance()
    return rounds


def _round(hvd: Any, exchanges: Mapping[str, Any], number: int) -> dict[str, list[float]]:
    """Exchange once with each method: seconds of all ranks, by method."""
    names = list(exchanges)
    first = number % len(names)
    return {name: hvd.allgather_object(exchanges[name].seconds(), name="seconds")
            for name in [*names[first:], *names[:first]]}


def _report(measured: Measured, as_json: bool) -> None:
    summaries = summarize(measured.rounds)
    received = {name: METHODS[name].nbytes(measured.elements, measured.ranks, measured.ranks_per_machine)
                for name in summaries}
    verdict = verdict_of(summaries)
    if as_json:
        print(json.dumps({"machine": machine_facts(), **dataclasses.asdict(measured), "methods": [
            {"method": name, **dataclasses.asdict(summary), "received_by_formula": received[name]}
            for name, summary in summaries.items()], "verdict": verdict}))
        return
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("method", no_wrap=True)
    for heading in ("ms", "from-to", "/ fp32", "/ fp16", "MB sent", "MB in"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, summary in summaries.items():
        table.add_row(METHODS[name].label, f"{1e3 * summary.seconds:,.1f}",
                      f"{1e3 * summary.fastest:,.0f}-{1e3 * summary.slowest:,.0f}", f"{summary.to_fp32:.2f}",
                      f"{summary.to_fp16:.2f}", f"{summary.sent / 1e6:,.2f}", f"{received[name] / 1e6:,.2f}")
    console = Console()
    facts = machine_facts()
    for text in (f"{sum(measured.elements):,} elements, tensors: {len(measured.elements)}; {measured.ranks} ranks, "
                 f"machines: {measured.machines}; {measured.front_end}, rounds: {len(measured.rounds)}",
                 ", ".join(f"{name} {value}" for name, value in facts.items()), "",
                 table, "", "Per exchange, medians over rounds. MB sent: what a rank hands to Horovod, counted; MB in: "
                            f"what arrives at a {'machine' if measured.ranks_per_machine > 1 else 'rank'}, by formula.",
                 verdict):
        console.print(text, soft_wrap=isinstance(text, str), highlight=False)


def verdict_of(summaries: Mapping[str, Summary]) -> str:
    """One line: what is fastest, whether TwoBit helps, and what to write to get it."""
    def seconds(name: str) -> float:
        return summaries[name].seconds

    baseline = min(BASELINES, key=seconds)
    best = min((name for name in summaries if name not in BASELINES), key=seconds)
    if seconds("auto") <= AS_GOOD * seconds(best):
        best = "auto"
    use = {"auto": "TwoBit", HIERARCHICAL: "TwoBit(hierarchical=True)"}.get(best, f'TwoBit(transport="{best}")')
    times = (f"{seconds('none') / seconds(best):.2f} times as fast as fp32, "
             f"{seconds('fp16') / seconds(best):.2f} times as fast as fp16")
    if seconds(best) < seconds(baseline):
        return f"TwoBit helps here: compression={use} exchanges {times}."
    return (f"TwoBit does not help here: fastest is {METHODS[baseline].label}; compression={use} exchanges {times}.")

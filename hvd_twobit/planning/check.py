"""``hvd-twobit plan --check``: measurements of ``benchmarks/network`` beside what the cost model says of them.

The file has an entry for each rate, number of ranks and model::

    {"format_version": 1, "entries": [
        {"rate": "1gbit", "ranks": 2, "model": "resnet50", "elements": [9408, 64, ...], "machine": {"cores": 2, ...},
         "rounds": [{"none": {"seconds": [...], "sent": [...], "received": [...]}, ...}, ...]}]}

with values of all ranks in each round, and ``ranks_per_machine`` where several shared a link. Seconds are those of the
slowest rank, bytes those of the rank that received most, both as medians over rounds. Ranks were processes of one
machine: where they are more than its cores, what a rank computes is taken to last longer in that proportion.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..cost_model import DEFAULT_PROCESSOR, HIERARCHICAL, METHODS, Link, cost
from ..errors import TwoBitError
from .units import BANDWIDTH

FORMAT_VERSION = 1
UNSHAPED = "unshaped"
_METHOD_NAMES = {"none": "fp32"}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One method of one entry: measured and predicted, in bytes and seconds."""

    rate: str
    ranks: int
    ranks_per_machine: int
    model: str
    method: str
    measured_nbytes: float
    predicted_nbytes: int
    measured_s: float
    predicted_s: float

    @property
    def nbytes_error(self) -> float:
        """Percent by which the prediction is above the measurement."""
        return 100 * (self.predicted_nbytes / self.measured_nbytes - 1)

    @property
    def seconds_error(self) -> float:
        """Percent by which the prediction is above the measurement."""
        return 100 * (self.predicted_s / self.measured_s - 1)


def run(path: pathlib.Path, unshaped_bits: float | None, latency_s: float, bucket_cap_mb: float,
        as_json: bool) -> None:
    """Compare and print.

    Args:
        path: file of results.
        unshaped_bits: what links without a limit carry, in bit/s; None leaves their entries out.
        latency_s: of the network that was measured.
        bucket_cap_mb: as it was measured.
        as_json: print JSON instead of a table.

    Raises:
        click.ClickException: the file cannot be read, is of another form, or has nothing to compare.
    """
    entries = _entries(path)
    left_out = sum(entry["rate"] == UNSHAPED for entry in entries) if unshaped_bits is None else 0
    try:
        comparisons = [comparison for entry in entries if unshaped_bits is not None or entry["rate"] != UNSHAPED
                       for comparison in compare(entry, unshaped_bits, latency_s, bucket_cap_mb)]
    except (KeyError, TypeError, IndexError, ValueError, ZeroDivisionError, click.BadParameter, TwoBitError) as error:
        raise click.ClickException(f"{path} holds an entry that is not of benchmarks/network's form: "
                                   f"{type(error).__name__}: {error}") from error
    if not comparisons:
        raise click.ClickException(f"{path} has nothing to compare: {len(entries)} entries, {left_out} of them without "
                                   "a limit of bandwidth, for which --bandwidth has to tell what the links carry")
    if as_json:
        print(json.dumps({
            "comparisons": [{**dataclasses.asdict(one), "nbytes_error_percent": one.nbytes_error,
                             "seconds_error_percent": one.seconds_error} for one in comparisons],
            "median_absolute_error_percent": _medians(comparisons),
            "by_method": {method: _medians([one for one in comparisons if one.method == method])
                          for method in _methods(comparisons)}, "entries_left_out": left_out}))
        return
    _print_table(comparisons, left_out)


def compare(entry: dict[str, Any], unshaped_bits: float | None, latency_s: float,
            bucket_cap_mb: float) -> Iterator[Comparison]:
    """The methods of one entry, in the order of its first round."""
    rate, ranks, per_machine = entry["rate"], entry["ranks"], entry.get("ranks_per_machine", 1)
    bits = unshaped_bits if rate == UNSHAPED else BANDWIDTH.convert(rate, None, None)
    link = Link(bits, latency_s)  # type: ignore[arg-type]  # run leaves out what has no limit and no bandwidth given
    processor = DEFAULT_PROCESSOR.slowed(max(1.0, ranks / entry["machine"]["cores"]))
    for name in entry["rounds"][0]:
        rounds = [of_round[name] for of_round in entry["rounds"]]
        method = _METHOD_NAMES.get(name, name)
        predicted = cost(method, sum(entry["elements"]), ranks, ranks_per_machine=per_machine, link=link,
                         bucket_cap_mb=bucket_cap_mb, processor=processor)
        nbytes, seconds = (statistics.median(max(of_round[what]) for of_round in rounds)
                           for what in ("received", "seconds"))
        if not (nbytes > 0 and seconds > 0):
            raise ValueError(f"{name} received {nbytes} bytes in {seconds} seconds")
        yield Comparison(rate, ranks, per_machine, entry["model"], method, nbytes, predicted.nbytes, seconds,
                         predicted.seconds)


def _entries(path: pathlib.Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_text())
        version, entries = content["format_version"], content["entries"]
        [entry["rate"] for entry in entries]
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"cannot read {path}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise click.ClickException(f"{path} is not a file of results of benchmarks/network: "
                                   f"{type(error).__name__}: {error}") from error
    if version != FORMAT_VERSION:
        raise click.ClickException(f"{path} has format_version {version!r}; this command reads {FORMAT_VERSION}")
    return entries


def _medians(comparisons: Sequence[Comparison]) -> dict[str, float]:
    return {"nbytes": statistics.median(abs(one.nbytes_error) for one in comparisons),
            "seconds": statistics.median(abs(one.seconds_error) for one in comparisons)}


def _methods(comparisons: Sequence[Comparison]) -> list[str]:
    found = {one.method for one in comparisons}
    return [method for method in (*METHODS, HIERARCHICAL) if method in found]


def _print_table(comparisons: Sequence[Comparison], left_out: int) -> None:
    console = Console()
    for (rate, ranks, per_machine, model), of_entry in itertools.groupby(
            comparisons, lambda one: (one.rate, one.ranks, one.ranks_per_machine, one.model)):
        machines = f" on machines of {per_machine}" if per_machine > 1 else ""
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        table.add_column("method", min_width=12)
        for heading in ("MB", "predicted", "error %", "ms", "predicted", "error %"):
            table.add_column(heading, justify="right", min_width=9)
        for one in of_entry:
            table.add_row(one.method, f"{one.measured_nbytes / 1e6:,.1f}", f"{one.predicted_nbytes / 1e6:,.1f}",
                          f"{one.nbytes_error:+.1f}", f"{1e3 * one.measured_s:,.1f}", f"{1e3 * one.predicted_s:,.1f}",
                          f"{one.seconds_error:+.1f}")
        console.print(f"{rate}, {ranks} ranks{machines}, {model}", soft_wrap=True, highlight=False)
        console.print(table)
        console.print()
    for name, chosen in [("all", comparisons), *((method, [one for one in comparisons if one.method == method])
                                                 for method in _methods(comparisons))]:
        medians = _medians(chosen)
        console.print(f"median absolute error, {name}: {medians['nbytes']:.1f} % of bytes, "
                      f"{medians['seconds']:.1f} % of seconds, {len(chosen)} compared", soft_wrap=True, highlight=False)
    if left_out:
        console.print(f"left out: {left_out} entries without a limit of bandwidth; --bandwidth tells what they carry",
                      soft_wrap=True, highlight=False)

"""What measurements of kernels have in common, wherever these run: inputs, rounds, tables and JSON.

``cpu_kernels`` measures those that run on the host, ``gpu_kernels`` those that run on a GPU. Either measures every case
right after what it is compared with, round by round, so that ratios hold on a busy machine where milliseconds do not.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..kernels import whole_tensor

THRESHOLDS = {"0.5 %": 2.807, "19 %": 1.311, "49 %": 0.690}
"""Share of standard normal numbers that lie beyond plus or minus the threshold."""

RANKS = (1, 2, 4, 8)
BLOCK_ELEMENTS = 1024

Columns = Mapping[str, Callable[[Any], str]]
"""Headings of a table, and what each column shows of a measurement."""

Sample = TypeVar("Sample")


def blocks_of(elements: int) -> tuple[tuple[str, int], ...]:
    """What a tensor is cut into, as tables call it, and the elements of a block."""
    return ("one", whole_tensor(elements)), (str(BLOCK_ELEMENTS), BLOCK_ELEMENTS)


def without_code_01(codes: Any) -> Any:
    """Random bytes, uint8, as packed codes of which none is 01 and half are 00; of an array, or of a tensor."""
    return codes & (0b10101010 | codes >> 1)


def in_rounds(samples: Sequence[Callable[[], Sample]], repeats: int,
              advance: Callable[[], object]) -> list[list[Sample]]:
    """Take one sample of everything in each round, and return all samples of each; ``advance`` is called after one."""
    taken: list[list[Sample]] = [[] for _ in samples]
    for _ in range(repeats):
        for sample, of_one in zip(samples, taken):
            of_one.append(sample())
            advance()
    return taken


def report(facts: Mapping[str, Any], measurements: Sequence[Any], tables: Mapping[str, Columns], legend: str,
           as_json: bool) -> None:
    """Print measurements to standard output.

    Args:
        facts: of machine and arguments.
        measurements: dataclasses; of each, ``case.kernel`` names the table in which it is.
        tables: columns, by kernel; there is no table without measurements.
        legend: what is printed below the tables.
        as_json: print JSON and nothing else.
    """
    if as_json:
        result = {"machine": facts, "measurements": [dataclasses.asdict(one) for one in measurements]}
        print(json.dumps(result, indent=2))
        return
    console = Console()
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), highlight=False, soft_wrap=True)
    for kernel, columns in tables.items():
        of_kernel = [one for one in measurements if one.case.kernel == kernel]
        if of_kernel:
            console.print(_table(kernel, columns, of_kernel))
    console.print(legend, highlight=False)


def met(value: bool | None) -> str:
    """Whether a limit is met, as tables show it; None where there is none."""
    return {True: "[green]yes[/]", False: "[red]no[/]", None: "-"}[value]


def _table(kernel: str, columns: Columns, measurements: Sequence[Any]) -> Table:
    table = Table(title=f"\n{kernel}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for measurement in measurements:
        table.add_row(*[text(measurement) for text in columns.values()])
    return table

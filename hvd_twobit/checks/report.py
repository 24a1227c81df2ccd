"""Prints what checks found, as a table with what to do below it, or as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..bench import progress_bar
from .checking import SelfTests, all_checks, stages
from .judging import FRONT_ENDS
from .results import Check, Status

_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "bold red"}


def run(front_ends: Sequence[str], self_tests: SelfTests, as_json: bool) -> bool:
    """Check, print, and tell whether nothing failed.

    Args:
        front_ends: keys of ``FRONT_ENDS``; all where there is none.
        self_tests: how front ends are tested.
        as_json: print JSON instead of a table.
    """
    chosen = [FRONT_ENDS[name] for name in FRONT_ENDS if not front_ends or name in front_ends]
    with progress_bar(quiet=as_json) as progress:
        task = progress.add_task("", total=stages(chosen, self_tests))

        def tell(what: str) -> None:
            progress.update(task, description=what, advance=1)

        checks = list(all_checks(chosen, self_tests, tell))
    good = not any(check.status is Status.FAILED for check in checks)
    if as_json:
        print(json.dumps({"ok": good, "checks": [dataclasses.asdict(check) for check in checks]}))
    else:
        _print(checks)
    return good


def _print(checks: Sequence[Check]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("status", "name"):
        table.add_column(name, no_wrap=True)
    table.add_column("found", overflow="fold")
    for check in checks:
        table.add_row(Text(check.status.value, _STYLES.get(check.status, "dim")), check.name, Text(check.found))
    console = Console()
    console.print(table)
    to_do = [check for check in checks if check.remedy]
    if to_do:
        console.print("\nWhat to do")
    for check in to_do:
        # Not wrapped, so that a command can be copied.
        console.print(Text.assemble((f"  {check.name}: ", "bold"), check.remedy), soft_wrap=True)
    failed = sum(check.status is Status.FAILED for check in checks)
    console.print(f"\n{failed} of {len(checks)} checks failed." if failed else "\nNothing failed: ready to train.",
                  highlight=False)

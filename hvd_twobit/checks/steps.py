"""A process that goes step by step, and writes what it has found as soon as it knows, a line of JSON per step.

What is imported here may crash the interpreter, hang, or print: so it runs in a process of its own, and the first step
of which there is no line is the one that it ended in. Nothing is imported of NumPy.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a process did not get through all steps.

    Attributes:
        step: the step that failed.
        error: one line: type and message of the exception, or how the process ended.
        missing: the module that is not installed, where that is why.
        raised: whether it was an exception, and not the end of the process.
    """

    step: str
    error: str
    missing: str | None = None
    raised: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How far a process got: what its steps found, by step, and why it got no further."""

    found: Mapping[str, Any]
    failure: Failure | None = None


def carry_out(path: pathlib.Path, steps: Mapping[str, Callable[[], Any]]) -> None:
    """Do the steps one after the other; the first that raises ends the process with status 1.

    Args:
        path: file for what they find.
        steps: by name, functions that return what JSON can hold.
    """
    with open(path, "w") as file:
        for name, step in steps.items():
            try:
                line = {"step": name, "found": step()}
            except Exception as error:
                line = {"step": name, "error": f"{type(error).__name__}: {' '.join(str(error).split())}",
                        "missing": error.name if isinstance(error, ModuleNotFoundError) else None}
                traceback.print_exc()
            print(json.dumps(line), file=file, flush=True)
            if "error" in line:
                sys.exit(1)


def read(path: pathlib.Path, steps: Sequence[str], ended: str) -> Outcome:
    """What a process has written.

    Args:
        path: the file; there may be none.
        steps: names of the steps, in order.
        ended: how the process ended.
    """
    found: dict[str, Any] = {}
    for text in path.read_text().splitlines() if path.exists() else []:
        line = json.loads(text)
        if "error" in line:
            return Outcome(found, Failure(line["step"], line["error"], line["missing"], raised=True))
        found[line["step"]] = line["found"]
    left = [step for step in steps if step not in found]
    return Outcome(found, Failure(left[0], ended) if left else None)

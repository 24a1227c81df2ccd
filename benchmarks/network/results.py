"""What was measured: entries in a JSON file, one for each rate, number of ranks and model, each from a single run.

    {"format_version": 1, "entries": [
        {"rate": "1gbit", "ranks": 2, "ranks_per_machine": 1, "model": "resnet50", "elements": [9408, 64, ...],
         "machine": {...}, "rounds": [{"none": {"seconds": [...], "sent": [...], "received": [...]}, "fp16": {...}, ..},
                                      ...]}]}

Values of a round are those of all ranks; bytes are what passed ``eth0``, which the ranks of a machine share. "machine"
tells of the one on which all of this ran.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from hvd_twobit.bench.rounds import Summary, summarize

FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Entry:
    """Rounds of one rate, number of ranks and model; fields as in the file."""

    rate: str
    ranks: int
    model: str
    elements: list[int]
    machine: dict[str, Any]
    rounds: list[dict[str, dict[str, list[float]]]]
    ranks_per_machine: int = 1

    @property
    def layout(self) -> str:
        """Ranks and machines, for reports."""
        machines = self.ranks // self.ranks_per_machine
        return f"{self.ranks} ranks" + ("" if self.ranks_per_machine == 1 else f" on {machines} machines")

    @property
    def key(self) -> tuple[str, int, int, str]:
        """What a later run replaces this entry by."""
        return self.rate, self.ranks, self.ranks_per_machine, self.model

    def summaries(self) -> dict[str, Summary]:
        """By method, in the order of the first round."""
        return summarize(self.rounds)


def load(path: pathlib.Path) -> list[Entry]:
    """The entries of a file; none where there is no file.

    Raises:
        ValueError: the file is not of this format.
    """
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text())
        if content["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format_version {content['format_version']}")
        return [Entry(**entry) for entry in content["entries"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no results of this benchmark ({error}): name another file") from error


def merge(path: pathlib.Path, entry: Entry) -> None:
    """Write an entry to a file, in place of one with the same key, and keep the others; all of it or nothing."""
    entries = [known for known in load(path) if known.key != entry.key] + [entry]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".partial")
    part.write_text(json.dumps({"format_version": FORMAT_VERSION, "entries": list(map(dataclasses.asdict, entries))}))
    part.replace(path)

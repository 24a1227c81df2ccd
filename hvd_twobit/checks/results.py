"""What a check finds."""

from __future__ import annotations

import dataclasses
import enum


class Status(str, enum.Enum):
    """How a check ended; only FAILED makes the command fail."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    NOT_INSTALLED = "not installed"
    SKIPPED = "skipped"


@dataclasses.dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: what was checked.
        status: how it ended.
        found: versions, errors, numbers.
        remedy: what to do about it; empty where there is nothing to do.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""

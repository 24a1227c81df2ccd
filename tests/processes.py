"""Processes that a test has started, directly or not: found by a variable of their environment, and ended."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import psutil
import pytest

VARIABLE = "HVD_TWOBIT_TEST_PROCESS"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """What this test starts; the test leaves nothing behind."""
    found = Started(uuid.uuid4().hex)
    monkeypatch.setenv(VARIABLE, found.mark)
    yield found
    for process in found():
        process.kill()


class Started:
    """Called, it returns the processes whose environment has the mark."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __call__(self, text: str = "") -> list[psutil.Process]:
        """Those that are alive, with ``text`` in their command line."""
        found = []
        for process in psutil.process_iter():
            try:
                if (process.environ().get(VARIABLE) == self.mark and process.pid != psutil.Process().pid
                        and process.status() != psutil.STATUS_ZOMBIE and text in " ".join(process.cmdline())):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

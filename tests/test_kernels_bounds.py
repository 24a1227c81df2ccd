"""The compiled kernels, which check no bounds, touch nothing outside their arrays."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from .launcher import REPOSITORY


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tests.guarded_kernels", *arguments], cwd=REPOSITORY, text=True,
                          capture_output=True, timeout=200)


def test_kernels_stay_within_their_arrays() -> None:
    result = run()
    assert result.returncode == 0, result
    assert result.stdout.endswith("calls stayed within their arrays\n")


@pytest.mark.parametrize("side", ["beginning", "end"])
def test_one_byte_further_would_have_been_noticed(side: str) -> None:
    assert run(side).returncode in (-signal.SIGSEGV, -signal.SIGBUS)

"""Coverage-guided fuzzing (atheris) of what parses bytes from elsewhere; bounded in time, so a sample, not a proof.

To go on for longer: ``python -m tests.fuzz.checkpoint FOLDER`` from the checkout, FOLDER being where libFuzzer keeps
the inputs that led it to new code.
"""

from __future__ import annotations

import pathlib
import platform
import re
import subprocess
import sys

import pytest

from .launcher import REPOSITORY

SECONDS = 4

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="atheris has no wheels for this machine")

SEEDS = {
    # What each leads to is said in the harness: choices begin with a high byte in the first of them.
    "checkpoint": [b"\x00", b"\xff\x00", b"\xff\x00\x02\x02\x00\x02\x00\x00\x01\x03\x00\x03\x02\x00"],
    "payload": [bytes(4), b"\x01\x01\x05\x01\x20\x00\x04abcd\x01", b"\x02\x02\x08\x02\x08\x00\x01a\x01\x40\x00\x02bc"],
}


@pytest.mark.parametrize("target", SEEDS)
def test_any_bytes_are_taken_or_refused(target: str, tmp_path: pathlib.Path) -> None:
    corpus, crashes = tmp_path / "corpus", tmp_path / "crashes"
    corpus.mkdir()
    crashes.mkdir()
    for number, seed in enumerate(SEEDS[target]):
        (corpus / str(number)).write_bytes(seed)
    command = [sys.executable, "-m", f"tests.fuzz.{target}", str(corpus), f"-max_total_time={SECONDS}",
               "-max_len=400", "-timeout=20", "-rss_limit_mb=0", "-seed=1", f"-artifact_prefix={crashes}/"]
    result = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            timeout=200)
    found = {path.name: path.read_bytes() for path in crashes.iterdir()}
    assert result.returncode == 0 and not found, f"{found}\n{result.stdout[-6000:]}"
    done = re.search(r"Done (\d+) runs", result.stdout)
    assert done and int(done[1]) > 100, result.stdout[-6000:]

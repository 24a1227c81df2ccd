"""The examples, run as README tells: what they measure, what they print, and the accuracy that README states."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from hvd_twobit import agreement
from hvd_twobit.payload import payload_nbytes

from .launcher import REPOSITORY, horovodrun

# README's table, TwoBit. A run on another CPU adds up in another order, so one more misclassified digit in a hundred
# is allowed.
STATED_ACCURACY = 0.9722
ALLOWANCE = 0.01


def run_digits(folder: pathlib.Path, name: str, *options: str) -> tuple[dict[str, Any], str]:
    """What the example measured on two ranks, and what it printed."""
    output = folder / f"{name}.json"
    printed = horovodrun(2, [sys.executable, "examples/pytorch/pytorch_digits.py", "--output", str(output), *options])
    return json.loads(output.read_text()), printed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def runs(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """One epoch with each compression."""
    options = {"uncompressed": [], "fp16": ["--fp16-allreduce"], "twobit": ["--twobit-allreduce"]}
    return {name: run_digits(folder, name, "--epochs", "1", *option)[0] for name, option in options.items()}


def test_digits_counts_the_bytes_that_a_rank_sends(runs: dict[str, dict[str, Any]]) -> None:
    sent = {name: run["epochs"][0]["bytes_sent_per_step"] for name, run in runs.items()}
    parameters = runs["uncompressed"]["parameters"]
    assert sent["uncompressed"] == 4 * parameters
    assert sent["fp16"] == 2 * parameters
    # Three weights are compressed; the first convolution and all biases, 522 elements, travel as float32.
    assert sent["twobit"] == sum(map(payload_nbytes, (18432, 131072, 1280))) + 4 * 522 + agreement.NBYTES


def test_report_compares_the_runs(runs: dict[str, dict[str, Any]], folder: pathlib.Path) -> None:
    picture = folder / "loss.png"
    files = [str(folder / f"{name}.json") for name in runs]
    printed = subprocess.run([sys.executable, "examples/report.py", *files, "--png", str(picture)], cwd=REPOSITORY,
                             capture_output=True, text=True, check=True, timeout=120).stdout
    for text in ("2 ranks, 151,306 parameters, 1 epochs of", "uncompressed", "fp16", "TwoBit 0.02", "605,224",
                 "302,612"):
        assert text in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_digits_with_twobit_reaches_the_accuracy_that_readme_states(folder: pathlib.Path) -> None:
    measured, printed = run_digits(folder, "accuracy", "--twobit-allreduce")
    assert measured["epochs"][-1]["test_accuracy"] >= STATED_ACCURACY - ALLOWANCE
    assert "epoch 12/12  train loss" in printed
    assert "epoch 12/12" not in printed.partition("[1]<stdout>:epoch")[2], "only rank 0 prints"

"""The TensorFlow examples, as a user runs them on two ranks: they learn, and send a sixteenth of the bytes."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest

from .launcher import REPOSITORY, horovodrun

PARAMETERS = 151_306


@pytest.mark.parametrize("example", ["tensorflow2_keras_digits.py", "tensorflow2_digits.py"])
def test_example_learns_digits_with_two_bits_per_element(example: str, tmp_path: pathlib.Path) -> None:
    horovodrun(2, [sys.executable, str(REPOSITORY / "examples" / "tensorflow2" / example), "--twobit-allreduce",
                   "--epochs", "10", "--output", str(tmp_path / "run.json")])
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["ranks"] == 2 and run["parameters"] == PARAMETERS
    last = run["epochs"][-1]
    assert last["test_accuracy"] >= 0.9, run["epochs"]
    # Headers, agreement and tensors under 1,024 elements make up the rest.
    assert 4 * PARAMETERS / 16 < last["bytes_sent_per_step"] < 4 * PARAMETERS / 15

"""``benchmarks/convergence.py``: every method trains, what it writes, and that it continues what was interrupted."""

from __future__ import annotations

import json
import math
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("horovod.torch")  # The benchmark trains the model of an example.
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from hvd_twobit.config import DEFAULT_BLOCK_ELEMENTS  # noqa: E402

from .launcher import REPOSITORY  # noqa: E402

METHODS = {("digits", "SGD"): {"uncompressed", "fp16", "fixed 0.5", "fixed 0.01", "fixed 0.02", "auto"},
           ("LSTM", "Adam"): {"uncompressed", "fp16", "fixed 0.5", "fixed 0.001", "fixed 0.002", "auto"}}


def benchmark(output: pathlib.Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/convergence.py", "--output", str(output), *options]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("convergence")


@pytest.fixture(scope="module")
def finished(output: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return benchmark(output, "--quick")


@pytest.fixture(scope="module")
def written(output: pathlib.Path, finished: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert finished.returncode == 0, finished.stderr
    return json.loads((output / "convergence.json").read_text())


def test_every_method_is_run_with_every_setup(written: dict[str, Any]) -> None:
    run = {(run["problem"], run["optimizer"], run["workers"], run["method"], run["seed"]) for run in written["runs"]}
    assert len(run) == len(written["runs"])
    assert run == {(*setup, 2, method, 0) for setup, methods in METHODS.items() for method in methods}
    assert written["settings"]["quick"] and {"cpu", "cores", "torch"} < set(written["machine"])


def test_measures_are_complete(written: dict[str, Any]) -> None:
    for run in written["runs"]:
        assert run["losses"] and all(map(math.isfinite, run["losses"]))
        assert run["train_loss"] == pytest.approx(sum(run["losses"][-20:]) / len(run["losses"][-20:]))
        assert run["test_loss"] > 0 and 0 <= run["test_accuracy"] <= 1 and run["mean_gradient"] > 0


def test_first_losses_are_those_of_the_same_weights_and_batches(written: dict[str, Any]) -> None:
    """Whatever the method: nothing has been reduced yet."""
    for problem, _ in METHODS:
        firsts = [run["losses"][0] for run in written["runs"] if run["problem"] == problem]
        assert firsts == pytest.approx([firsts[0]] * len(firsts), rel=1e-4)


def test_first_step_of_adaptive_levels_is_uncompressed(written: dict[str, Any]) -> None:
    for run in written["runs"]:
        if run["method"] == "auto":
            twin, = (other for other in written["runs"] if other["method"] == "uncompressed" and all(
                other[key] == run[key] for key in ("problem", "optimizer")))
            assert run["losses"][:2] == twin["losses"][:2]
            assert run["losses"][2:] != twin["losses"][2:]


def test_bytes_are_those_of_the_payloads(written: dict[str, Any]) -> None:
    compressed, small = (18432, 131072, 1280), 522
    by_method = {run["method"]: run for run in written["runs"] if run["problem"] == "digits"}
    assert by_method["uncompressed"]["bytes_per_step"] == 4 * (sum(compressed) + small)
    assert by_method["fp16"]["bytes_per_step"] == 2 * (sum(compressed) + small)
    codes = sum(math.ceil(elements / 16) * 4 for elements in compressed)
    fixed = by_method["fixed 0.01"]["bytes_per_step"]
    assert codes + 4 * small < fixed < codes + 4 * small + 3 * 64
    steps, warmup = len(by_method["auto"]["losses"]), 4 * (sum(compressed) + small)
    table = sum(8 * math.ceil(elements / DEFAULT_BLOCK_ELEMENTS) for elements in compressed)
    auto = (by_method["auto"]["bytes_per_step"] * steps - warmup) / (steps - 1)
    assert fixed + table - 64 <= auto <= fixed + table + 3 * 64


def test_prints_a_table_of_each_setup_and_draws_the_losses(
        written: dict[str, Any], finished: subprocess.CompletedProcess[str], output: pathlib.Path) -> None:
    for text in ("digits, SGD, 2 workers", "LSTM, Adam, 2 workers", "uncompressed", "auto", "(best)"):
        assert text in finished.stdout
    assert "…" not in finished.stdout and "MISSED" not in finished.stdout
    assert finished.stderr == "", "a bar that is not on a terminal"
    assert (output / "convergence.png").read_bytes().startswith(b"\x89PNG")


def test_continues_what_was_interrupted(written: dict[str, Any], tmp_path: pathlib.Path) -> None:
    kept = [run for run in written["runs"] if run["method"] != "auto"]
    path = tmp_path / "convergence.json"
    path.write_text(json.dumps({**written, "runs": kept}))
    assert "digits" not in benchmark(tmp_path, "--quick", "--report").stdout, "a comparison without auto is none"
    assert benchmark(tmp_path, "--quick", "--problem", "digits").returncode == 0
    runs = json.loads(path.read_text())["runs"]
    assert runs[:len(kept)] == kept
    assert {(run["problem"], run["method"]) for run in runs[len(kept):]} == {("digits", "auto")}


def test_results_of_other_settings_are_not_continued(written: dict[str, Any], output: pathlib.Path) -> None:
    refused = benchmark(output)
    assert refused.returncode == 1 and "results of other settings" in refused.stderr

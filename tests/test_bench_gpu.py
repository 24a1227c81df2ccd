"""``hvd-twobit bench kernels --device cuda`` and ``benchmarks/gpu_check.py``, as far as they go without a GPU.

The script runs once, on tensors of a few elements of the CPU with Triton's interpreter, and measures the kernels as the
command does.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from benchmarks import gpu_check as gpu_check_script
from benchmarks.gpu.arranging import ARRANGEMENTS, REFERENCE, compared
from benchmarks.gpu.checking import LeftOut, Setup, carry_out
from hvd_twobit.bench import gpu_kernels
from hvd_twobit.bench.gpu_kernels import SIZES, Case, Sample, Targets, measurement_of, report_on, resnet50
from hvd_twobit.bench.kernels import THRESHOLDS, without_code_01
from hvd_twobit.bench.timers import HostTimer
from hvd_twobit.cli import commands

from .launcher import REPOSITORY

CPU = torch.device("cpu")
CASE = Case("quantize_pack", 1, 25_600_000, 1, "one", "19 %", 1.0, 1001, Targets(0.85, 15.0, None))
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(commands, ["bench", "kernels", "--device", *arguments])


# ---- the script ------------------------------------------------------------------------------------------------------

def gpu_check(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "benchmarks/gpu_check.py", *arguments], cwd=REPOSITORY, text=True,
                          env={**kept, "OMP_NUM_THREADS": "1", **environment}, capture_output=True)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script wrote."""
    pytest.importorskip("triton")
    output = tmp_path_factory.mktemp("gpu_check") / "folder" / "found.json"
    done = gpu_check("--device", "cpu", "--repeats", "1", "--output", str(output), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "targets were left out" in done.stdout and "left out  several streams" in done.stdout
    return json.loads(output.read_text())


def test_all_that_a_cpu_can_do_is_right(checked: dict[str, Any]) -> None:
    assert checked["mismatches"] == 0 and checked["timings_failed"] == ""
    made = {check["name"] for check in checked["checks"] if not check["left_out"]}
    assert made == {"quantize_pack", "unpack_sum", "counts", "tallies", "digits", "the gradients of a model",
                    "exchanges of all ranks", "exchanges of single tensors"}
    assert all(check["cases"] > 0 for check in checked["checks"] if check["name"] in made)


def rows(checked: dict[str, Any], kernel: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Measurements of a kernel by block, data and ranks."""
    found = [one for one in checked["timings"] if one["case"]["kernel"] == kernel]
    by_case = {(one["case"]["block"], one["case"]["data"], one["case"]["ranks"]): one for one in found}
    assert len(by_case) == len(found)
    return by_case


def test_every_kernel_is_measured_with_the_bytes_that_it_moves(checked: dict[str, Any]) -> None:
    """Of 40 elements, 3 words of codes; and of a model of 17 and 3 elements, 3 words."""
    blocks = ("one", "1024")
    assert {case: one["case"]["nbytes"] for case, one in rows(checked, "quantize_pack").items()} == {
        (block, share, 1): 3 * 160 + 12 + 16 + 8 for block in blocks for share in THRESHOLDS}
    assert {case: one["case"]["nbytes"] for case, one in rows(checked, "unpack_sum").items()} == {
        (block, levels, ranks): 160 + 12 * ranks + 8 * ranks for block in blocks for ranks in (1, 2, 4, 8)
        for levels in ("symmetrical", "by rank") if ranks > 1 or levels == "symmetrical"}
    assert {case: one["case"]["nbytes"] for case, one in rows(checked, "pack_counts").items()} == {
        ("-", "1 x 4 bits", 4): 48 + 24, ("-", "2 x 4 bits", 4): 48 + 48,
        ("-", "1 x 8 bits", 8): 96 + 48, ("-", "2 x 8 bits", 8): 96 + 96}
    assert {case[1:]: one["case"]["nbytes"] for case, one in rows(checked, "unpack_counts").items()} == {
        ("1 x 4 bits", 4): 24 + 8 + 160, ("2 x 4 bits", 4): 48 + 8 + 160,
        ("1 x 8 bits", 8): 48 + 8 + 160, ("2 x 8 bits", 8): 96 + 8 + 160}
    assert {case: one["case"]["nbytes"] for case, one in rows(checked, "quantize_pack_runs").items()} == {
        (block, share, 1): 3 * 80 + 12 + 2 * (16 if block == "one" else 24) for block in blocks for share in THRESHOLDS}
    assert {case: one["case"]["nbytes"] for case, one in rows(checked, "unpack_sum_runs").items()} == {
        (block, "symmetrical", ranks): 80 + 12 * ranks + 2 * 8 * ranks for block in blocks for ranks in (1, 2, 4, 8)}


def test_a_measurement_has_every_time_and_its_bandwidth(checked: dict[str, Any]) -> None:
    for one in checked["timings"]:
        assert one.keys() == {field.name for field in dataclasses.fields(gpu_kernels.Measurement)}
        assert one["milliseconds"] > 0 and one["host_microseconds"] > 0 and one["whole_milliseconds"] > 0
        assert one["gigabytes_per_second"] == pytest.approx(one["case"]["nbytes"] / one["milliseconds"] / 1e6)
        assert not one["is_cached"]
    assert {"gpu", "torch", "triton", "cpu", "device"} <= checked["machine"].keys()


@pytest.mark.parametrize("arguments, message", [
    (("--device", "cpu"), "--device cpu needs TRITON_INTERPRET=1"), (("--ranks", "3"), "'3' is not one of"),
    (("--device", "cuda"), "CUDA")])
def test_what_is_missing_is_told_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    pytest.importorskip("triton")
    done = gpu_check(*arguments, CUDA_VISIBLE_DEVICES="")
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr
    assert message in done.stderr.splitlines()[-1]


# ---- what it compares with -------------------------------------------------------------------------------------------

class Damaged:
    """The reference, for tensors of the CPU, but for what is done to the result."""

    def __init__(self, damage: Callable[..., object]) -> None:
        self._damage = damage

    def unpack_sum(self, packed: torch.Tensor, levels: torch.Tensor, block_elements: int, out: torch.Tensor,
                   scale: float) -> None:
        REFERENCE.unpack_sum(packed.numpy(), levels.numpy(), block_elements, out.numpy(), scale)
        self._damage(packed, levels, out)


def flipped(tensor: torch.Tensor, byte: int) -> None:
    """Change one bit behind the beginning of a tensor, be it within it or not."""
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    memory[tensor.storage_offset() * tensor.element_size() + byte] ^= 1


@pytest.mark.parametrize("damage, told", [
    (lambda packed, levels, out: flipped(out, 4 * 19), "argument 3: 1 of "),
    (lambda packed, levels, out: flipped(out, -4), "argument 3: 1 of "),
    (lambda packed, levels, out: flipped(out, 4 * 20), "argument 3: 1 of "),
    (lambda packed, levels, out: flipped(packed, 8), "argument 0: 1 of "),
    (lambda packed, levels, out: flipped(levels, 0), "argument 1: 1 of "),
    (lambda packed, levels, out: None, ""),
], ids=["the last element", "before the first", "behind the last", "beside a row or in it", "an input", "nothing"])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=str)
def test_a_wrong_bit_is_found_wherever_it_is(damage: Callable[..., object], told: str, arrangement: Any) -> None:
    random = np.random.default_rng(0)
    packed = without_code_01(random.integers(0, 256, (2, 8), np.uint8))
    levels = np.full((2, 2, 2), (0.5, -0.5), np.float32)
    text = compared(Damaged(damage), CPU, arrangement, "unpack_sum", packed, levels, 16, np.zeros(20, np.float32), 1.0)
    assert told in text and bool(told) == bool(text)


def test_a_check_counts_what_is_wrong_and_goes_on_behind_an_exception() -> None:
    def check(setup: Setup) -> Any:
        yield ""
        yield "not the same"
        raise ArithmeticError("of the device")

    def impossible(setup: Setup) -> Any:
        raise LeftOut("nothing to check")

    outcome = carry_out("a check", check, Setup(CPU))
    assert (outcome.cases, outcome.mismatches) == (3, 2)
    assert outcome.told == ("not the same", "ArithmeticError: of the device")
    assert carry_out("another", impossible, Setup(CPU)).left_out == "nothing to check"


@needs_triton
@pytest.mark.parametrize("texts, status", [(["", ""], 0), (["", "a bit differs"], 1)])
def test_the_exit_status_tells_whether_anything_differs(texts: list[str], status: int, tmp_path: pathlib.Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = measurement_of(CASE, [Sample(1e-4, 2e-4, [1e-6], 1e-3)])
    monkeypatch.setattr(gpu_check_script, "_device", lambda name: CPU)
    monkeypatch.setattr(gpu_check_script, "_checks", lambda ranks: [("a check", lambda setup: texts)])
    monkeypatch.setattr(gpu_check_script, "_measured", lambda device, repeats: [measurement])
    result = CliRunner().invoke(gpu_check_script.main, ["--output", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert result.exit_code == status and found["mismatches"] == status
    assert found["checks"][0]["told"] == [text for text in texts if text]
    assert all(text in result.output for text in texts)


def test_targets_that_are_missed_are_named() -> None:
    measurement = measurement_of(CASE, [Sample(1e-4, 2e-4, [1e-6], 1e-3)])
    targets = gpu_check_script._targets(torch.device("cuda"), [measurement])
    assert targets["met"] == 1 and targets["missed"] == [
        "quantize_pack of 25,600,000 elements, one, 19 %, 1 ranks: share_of_copy is 0.497, required 0.85"]


# ---- the command -----------------------------------------------------------------------------------------------------

@needs_triton
@pytest.mark.parametrize("built, count, device, message", [
    (None, 0, "cuda", "was built without CUDA: install a build with it"),
    ("12.8", 0, "cuda", "sees no CUDA device: see what nvidia-smi lists, and CUDA_VISIBLE_DEVICES"),
    ("12.8", 2, "cuda:2", "there is no cuda:2: PyTorch sees 2, cuda:0 to cuda:1"),
])
def test_a_gpu_that_is_not_there_is_one_line(built: str | None, count: int, device: str, message: str,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", built)
    monkeypatch.setattr("torch.version.hip", None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    result = invoke(device)
    assert result.exit_code == 1 and result.output.count("\n") == 1 and message in result.output


@pytest.mark.parametrize("module", ["torch", "triton"])
def test_what_is_not_installed_is_one_line(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == module else object())
    result = invoke("cuda")
    assert (result.exit_code, result.output) == (
        1, f'Error: not installed: {module}; pip install "hvd_twobit[gpu]"\n')


@needs_triton
def test_an_interpreter_is_not_measured_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    result = invoke("cuda")
    assert result.exit_code == 1 and "unset it" in result.output


def test_a_device_that_nobody_knows_is_a_mistake() -> None:
    result = invoke("gpu")
    assert result.exit_code == 2 and "'gpu' is not a device: give cpu, cuda, or cuda:NUMBER" in result.output


# ---- times and targets -----------------------------------------------------------------------------------------------

def test_shares_are_of_the_bandwidth_of_the_copy_in_the_same_round() -> None:
    """A copy of 1001 bytes moves 1008. Medians are over rounds, and over all calls on the host."""
    samples = [Sample(copy=1e-6, call=2e-6, host=[1e-6, 9e-6], whole=3e-3), Sample(2e-6, 2e-6, [2e-6], 4e-3),
               Sample(4e-6, 8e-6, [3e-6, 3e-6], 5e-3)]
    found = measurement_of(CASE, samples)
    assert found.share_of_copy == pytest.approx(0.5 * 1001 / 1008)
    assert found.milliseconds == pytest.approx(2e-3)
    assert found.gigabytes_per_second == pytest.approx(1001 / 2e-6 / 1e9)
    assert found.copy_gigabytes_per_second == pytest.approx(1008 / 2e-6 / 1e9)
    assert found.host_microseconds == pytest.approx(3.0) and found.whole_milliseconds == pytest.approx(4.0)
    assert found.met == {"share_of_copy": False, "host_microseconds": True}


@pytest.mark.parametrize("cache, is_cached", [(0, False), (500, False), (501, True)])
def test_what_fits_into_a_cache_by_half_is_marked(cache: int, is_cached: bool) -> None:
    assert measurement_of(CASE, [Sample(1e-6, 1e-6, [1e-6], 1e-3)], cache).is_cached == is_cached


def test_targets_are_met_up_to_their_limits() -> None:
    targets = Targets(0.85, 15.0, 1.0)
    assert set(targets.are_met(0.85, 15.0, 1.0).values()) == {True}
    assert set(targets.are_met(0.849, 15.1, 1.01).values()) == {False}
    assert Targets().are_met(0.0, 1e9, 1e9) == {}


def test_targets_are_those_that_were_set() -> None:
    assert SIZES == (25_600_000, 256_000_000) and len(resnet50()) == 161
    assert (gpu_kernels.SHARE_OF_COPY, gpu_kernels.HOST_MICROSECONDS, gpu_kernels.MODEL_MILLISECONDS) == (0.85, 15, 1)


@needs_triton
def test_cases_have_the_targets_of_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def targets(workload: gpu_kernels.Workload) -> dict[tuple[str, int], Targets]:
        return {(case.kernel, case.ranks): case.targets for case, _ in workload.cases()}

    monkeypatch.setattr(gpu_kernels, "SIZES", (40,))
    all_targets, of_another_size = (targets(gpu_kernels.TensorWorkload(CPU, size)) for size in (40, 41))
    bandwidth, host = Targets(share_of_copy=0.85, host_microseconds=15.0), Targets(host_microseconds=15.0)
    assert {case: found for case, found in all_targets.items() if found != host} == {
        ("quantize_pack", 1): bandwidth, ("unpack_sum", 1): bandwidth}
    assert set(of_another_size.values()) == {host}
    of_model = targets(gpu_kernels.ModelWorkload(CPU, [17, 3], 1.0))
    assert {case for case, found in of_model.items() if found == Targets(whole_milliseconds=1.0)} == {
        ("quantize_pack_runs", 1)}


@needs_triton
def test_tables_and_json_tell_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    found = [measurement_of(dataclasses.replace(CASE, kernel=kernel), [Sample(9e-5, 1e-4, [1.2e-5], 2e-3)], cache)
             for kernel, cache in (("quantize_pack", 0), ("unpack_sum_runs", 1000))]
    report_on(CPU, found, repeats=3, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["measurements"] == [json.loads(json.dumps(dataclasses.asdict(one))) for one in found]
    assert printed["machine"]["repeats"] == 3
    report_on(CPU, found, repeats=3, as_json=False)
    text = capsys.readouterr().out
    assert "25.6 M*" in text and "…" not in text and "pack_counts\n" not in text
    for column in ("/ copy", "host us", "whole ms", "0.100", "12.0", "2.000", "89 %"):
        assert column in text


def test_the_host_times_what_is_asked_and_prepares_before_each_repetition() -> None:
    done: list[str] = []
    timer = HostTimer()
    seconds = timer.laps([lambda: done.append("copy"), lambda: done.append("kernel")], 2, lambda: done.append("reset"))
    assert done == ["reset", "copy", "kernel"] * 2 and len(seconds) == 2 and all(second > 0 for second in seconds)
    assert len(timer.host(lambda: None, 5)) == 5 and timer.whole(lambda: None) > 0

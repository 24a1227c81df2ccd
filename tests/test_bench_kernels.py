"""``hvd-twobit bench kernels``: what it prints, its exit status, and that help is cheap."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from hvd_twobit.bench.cpu_kernels import Measurement, Workload, measure
from hvd_twobit.bench.kernels import THRESHOLDS
from hvd_twobit.cli import commands
from hvd_twobit.kernels import Quantizer

COMMAND = [sys.executable, "-m", "hvd_twobit"]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(commands, ["bench", "kernels", *arguments])


def test_json_is_all_that_is_printed_with_json() -> None:
    result = invoke("--elements", "5000", "--repeats", "2", "--json")
    printed = json.loads(result.output)
    assert result.exit_code == 0 and set(printed) == {"machine", "measurements"}
    assert printed["machine"]["elements"] == 5000 and printed["machine"]["repeats"] == 2
    assert {"cpu", "cores", "numpy", "numba", "python", "load_average"} < set(printed["machine"])
    cases = [measurement["case"] for measurement in printed["measurements"]]
    quantize = {(case["block"], case["data"]) for case in cases if case["kernel"] == "quantize_pack"}
    assert quantize == {(block, data) for block in ("one", "1024") for data in THRESHOLDS}
    symmetrical = {(case["block"], case["ranks"], case["scale"]) for case in cases if case["data"] == "symmetrical"}
    assert symmetrical == {(block, ranks, scale) for block in ("one", "1024") for ranks in (1, 2, 4, 8)
                           for scale in (1.0, 1 / ranks)}


def test_tables_tell_the_machine_every_ratio_and_whether_it_is_met() -> None:
    result = invoke("--elements", "5000", "--repeats", "1")
    assert result.exit_code == 0
    for text in ("numpy 1.", "elements 5000", "quantize_pack", "unpack_sum", "/ add", "/ limit", "required", "1.15"):
        assert text in result.output
    assert "…" not in result.output, "a column does not fit into 80 characters"


@pytest.fixture(scope="module")
def measurements() -> list[Measurement]:
    return measure(Workload(3000), repeats=3, advance=lambda: None)


def test_a_limit_is_met_where_the_ratio_to_it_is_at_most_one(measurements: list[Measurement]) -> None:
    for measurement in measurements:
        case = measurement.case
        limited = case.kernel == "quantize_pack" or case.data == "symmetrical"
        assert (measurement.ratio_to_limit is not None) == (measurement.met is not None) == limited
        assert not limited or measurement.met == (measurement.ratio_to_limit <= 1)


def test_limits_are_those_that_were_set(measurements: list[Measurement]) -> None:
    limits = {(case.kernel, case.ranks): (case.limit_adds, case.limit_fills)
              for case in (measurement.case for measurement in measurements) if case.limit_adds or case.limit_fills}
    assert limits == {("quantize_pack", 1): (1.15, 0.0)} | {
        ("unpack_sum", ranks): (pytest.approx(1.8 * (ranks - 1)), 1.2) for ranks in (1, 2, 4, 8)}


@pytest.mark.parametrize("share", THRESHOLDS)
def test_thresholds_select_the_share_of_elements_that_they_are_named_after(share: str) -> None:
    workload = Workload(200_000)
    threshold = THRESHOLDS[share]
    _, count = workload.backend.quantize_pack(workload.gradient, workload.residual, workload.packed[0],
                                              Quantizer.fixed(threshold, -threshold, workload.elements))
    assert 100 * count[0] / workload.elements == pytest.approx(float(share.split()[0]), rel=0.05)


def test_a_missed_limit_does_not_change_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_twobit.bench.cpu_kernels.QUANTIZE_LIMIT_ADDS", 1e-9)
    result = invoke("--elements", "1000", "--repeats", "1")
    assert result.exit_code == 0 and " no" in result.output


def test_help_has_an_example_and_loads_neither_numpy_nor_a_framework() -> None:
    program = ("import sys; from hvd_twobit.cli import main; sys.argv[1:] = ['bench', 'kernels', '--help']\n"
               "try: main()\n"
               "finally: print({'numpy', 'numba', 'rich', 'torch', 'tensorflow', 'horovod'} & set(sys.modules))")
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "  hvd-twobit bench kernels --elements" in printed and printed.endswith("set()\n")


@pytest.mark.parametrize("arguments, message", [
    (["bench", "kernels", "--elements", "0"], "0 is not in the range"),
    (["bench", "kernels", "--repeats", "few"], "'few' is not a valid integer"),
    (["bench", "everything"], "No such command 'everything'"),
])
def test_a_wrong_argument_is_explained_with_exit_status_2(arguments: list[str], message: str) -> None:
    result = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True)
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr


def test_interrupting_a_measurement_ends_it_with_status_130_and_no_trace() -> None:
    terminal, standard_error = pty.openpty()
    process = subprocess.Popen([*COMMAND, "bench", "kernels", "--elements", "300000", "--repeats", "1000000"],
                               stdout=subprocess.PIPE, stderr=standard_error,
                               # A suite in the background of a shell ignores SIGINT, and its children would too.
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    os.close(standard_error)
    shown = b""
    while b"measuring" not in shown:  # the progress bar, as on any terminal
        shown += os.read(terminal, 4096)
    process.send_signal(signal.SIGINT)
    try:
        printed, _ = process.communicate(timeout=30)
    finally:
        process.kill()  # where the interrupt had no effect
    try:
        while chunk := os.read(terminal, 4096):
            shown += chunk
    except OSError:  # Linux's end of a terminal whose other side is closed
        pass
    os.close(terminal)
    assert process.returncode == 130 and printed == b"" and b"Traceback" not in shown

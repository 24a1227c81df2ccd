"""``hvd-twobit check``: what it finds here, and what it says of environments in which something is wrong.

Such an environment is made of packages that lie before the real ones on the path.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from click.testing import CliRunner

from hvd_twobit import jobs, kernels
from hvd_twobit.checks import judging, remedies
from hvd_twobit.checks.checking import SelfTests, all_checks
from hvd_twobit.checks.judging import FRONT_ENDS
from hvd_twobit.checks.kernels import compare
from hvd_twobit.checks.results import Check, Status
from hvd_twobit.checks.self_test import STEPS, self_test
from hvd_twobit.checks.steps import Failure, Outcome
from hvd_twobit.cli import commands

from .launcher import REPOSITORY
from .processes import Started, started  # noqa: F401

COMMAND = [sys.executable, "-m", "hvd_twobit"]
PYTORCH, TENSORFLOW = FRONT_ENDS["pytorch"], FRONT_ENDS["tensorflow"]
MISSING = "raise ModuleNotFoundError(\"No module named '{0}'\", name='{0}')"
TORCH = """
__version__ = "2.8.0"
class cuda:
    device_count = staticmethod(lambda: 1)
    get_device_name = staticmethod(lambda number: "a GPU")
"""
KERAS_3 = """
class Optimizer: __module__ = "keras.src.optimizers.optimizer"
class SGD(Optimizer): pass
"""

Packages = Mapping[str, str]


# Here, where everything is installed.

@pytest.mark.timeout(600)
def test_everything_is_good_here_and_two_ranks_train_with_each_front_end() -> None:
    for module in ("torch", "tensorflow", "horovod"):
        pytest.importorskip(module)
    result = subprocess.run([*COMMAND, "check", "--json", "--time-limit", "240", "--launcher", "tests.horovodrun"],
                            cwd=REPOSITORY, env={**os.environ, "HVD_TWOBIT_TRANSPORT": "allgather"},
                            capture_output=True, text=True)
    printed = json.loads(result.stdout)
    found = {check["name"]: check for check in printed["checks"]}
    assert [check for check in printed["checks"] if check["status"] != "ok"] == []
    assert result.returncode == 0 and printed["ok"] and result.stderr == ""
    assert list(found) == ["Python", "hvd_twobit", "NumPy", "Numba", "kernels", "host name", "Horovod",
                           "Horovod's build", "front ends", "GPU", "PyTorch", "PyTorch hooks", "PyTorch self-test",
                           "TensorFlow", "Keras", "TensorFlow hooks", "TensorFlow self-test"]
    assert "0.28.1" in found["Horovod"]["found"] and "Gloo" in found["Horovod's build"]["found"]
    assert found["kernels"]["found"].startswith("training uses numba; 8 kernels")
    for front_end in ("PyTorch", "TensorFlow"):
        assert "2 ranks (gloo) by allgather, sra, allreduce" in found[f"{front_end} self-test"]["found"]


@pytest.mark.timeout(120)
def test_a_self_test_that_takes_too_long_is_ended_with_all_its_processes(started: Started) -> None:  # noqa: F811
    pytest.importorskip("horovod")
    outcomes = self_test("torch", "gloo", limit_s=1.5, launcher="tests.horovodrun")
    check = judging.check_self_test(PYTORCH, outcomes, "gloo")
    assert check.status is Status.FAILED and "rank 0 at hvd.init(): no end within 1.5 s" in check.found
    assert check.remedy == remedies.HANG and started() == []


# Environments in which something is wrong.

@pytest.fixture
def checked(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Check]]:
    """What is found where packages, given by the source of their modules, take the place of installed ones."""
    def checks(packages: Packages) -> dict[str, Check]:
        install(packages, tmp_path, monkeypatch)
        return {check.name: check
                for check in all_checks([PYTORCH, TENSORFLOW], SelfTests(limit_s=60), tell=lambda what: None)}
    return checks


def install(packages: Packages, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, source in packages.items():
        path = folder.joinpath("first", *module.split("."), "__init__.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(folder / "first"))


def statuses(checks: Mapping[str, Check], *names: str) -> list[str]:
    return [checks[name].status.value for name in names]


def test_another_horovod_a_framework_that_crashes_and_keras_3_are_told_apart(
        checked: Callable[..., dict[str, Check]]) -> None:
    checks = checked({"horovod": "__version__ = '0.27.0'", "torch": "import os; os.abort()",
                      "tensorflow": "import types; from . import optimizers\n__version__ = '2.16.2'\n"
                                    "keras = types.SimpleNamespace(optimizers=optimizers)\n"
                                    "config = types.SimpleNamespace(list_physical_devices=lambda kind: [])",
                      "tensorflow.optimizers": KERAS_3, "keras": "__version__ = '3.5.0'"})
    assert statuses(checks, "Horovod", "PyTorch", "TensorFlow", "Keras", "kernels") == [
        "failed", "failed", "warning", "failed", "ok"]
    assert checks["Horovod"].found == "0.27.0; supported is 0.28.1" and "horovod==0.28.1" in checks["Horovod"].remedy
    assert "ended by SIGABRT" in checks["PyTorch"].found
    assert "TF_USE_LEGACY_KERAS=1" in checks["Keras"].remedy and "tf_keras" in checks["Keras"].remedy
    assert checks["TensorFlow self-test"] == Check("TensorFlow self-test", Status.SKIPPED,
                                                   "needs Horovod, Keras, TensorFlow hooks")


def test_a_missing_horovod_and_a_broken_numba_do_not_hide_what_is_there(
        checked: Callable[..., dict[str, Check]]) -> None:
    checks = checked({"horovod": MISSING.format("horovod"), "torch": TORCH,
                      "tensorflow": MISSING.format("tensorflow"), "numba": "raise ImportError('no such symbol')"})
    assert statuses(checks, "NumPy", "Numba", "kernels", "Horovod", "PyTorch", "PyTorch hooks") == [
        "ok", "failed", "skipped", "failed", "ok", "skipped"]
    assert checks["Numba"].found == "ImportError: no such symbol"
    assert checks["Horovod"].found == "not installed"
    assert "HOROVOD_WITH_GLOO=1 HOROVOD_WITH_PYTORCH=1" in checks["Horovod"].remedy
    assert "HOROVOD_WITH_TENSORFLOW" not in checks["Horovod"].remedy
    assert checks["TensorFlow"].status is Status.NOT_INSTALLED and "Keras" not in checks
    assert checks["front ends"].found == "PyTorch"
    assert "PyTorch: a GPU" in checks["GPU"].found and "pass through the CPU" in checks["GPU"].found


@pytest.mark.parametrize("devices, status, words", [
    ({"unusable": {"cuda:0": ""}, "sends": True}, Status.OK, "compressed there and sent from there, by NCCL"),
    ({"unusable": {"cuda:0": ""}, "sends": False}, Status.OK, "sent from pinned host memory, as Horovod was built"),
    ({"unusable": {"cuda:0": "", "cuda:1": "Triton is missing"}, "sends": True}, Status.WARNING,
     "pass through the CPU, which compresses them: cuda:1: Triton is missing"),
    (Failure("devices", "ended by SIGSEGV"), Status.WARNING, "compresses them: ended by SIGSEGV"),
])
def test_of_gpus_it_tells_where_gradients_are_compressed(devices: Any, status: Status, words: str) -> None:
    found = {"framework": {"version": "2.13.0", "gpus": ["A GPU", "A GPU"]}, "extension": {"Gloo": True}, "hooks": None}
    outcome = Outcome(found, devices) if isinstance(devices, Failure) else Outcome({**found, "devices": devices})
    check = judging.check_gpu({PYTORCH: outcome})
    assert check.status is status
    assert check.found.startswith("PyTorch: A GPU, A GPU. PyTorch's gradients ") and words in check.found
    assert ("pip install \"hvd_twobit[gpu]\"" in check.remedy) == (status is Status.WARNING)
    assert judging.check_hooks(PYTORCH, outcome, ["torch"]).status is Status.OK


def test_a_horovod_without_the_framework_is_to_be_built_with_it(checked: Callable[..., dict[str, Check]]) -> None:
    checks = checked({
        "horovod": "__version__ = '0.28.1'", "torch": TORCH, "tensorflow": MISSING.format("tensorflow"),
        "horovod.torch": "raise ImportError('Extension horovod.torch has not been built: mpi_lib_v2.so not found')"})
    assert statuses(checks, "Horovod", "Horovod's build", "PyTorch", "PyTorch hooks", "PyTorch self-test") == [
        "ok", "skipped", "ok", "failed", "skipped"]
    assert "has not been built" in checks["PyTorch hooks"].found
    assert "HOROVOD_WITH_PYTORCH=1" in checks["PyTorch hooks"].remedy


@pytest.mark.parametrize("as_json", [False, True], ids=["table", "JSON"])
def test_nothing_installed_is_exit_status_1_with_a_remedy_on_one_line(
        as_json: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install({name: MISSING.format(name) for name in ("horovod", "torch", "tensorflow")}, tmp_path, monkeypatch)
    result = CliRunner().invoke(commands, ["check", *(["--json"] if as_json else [])])
    assert result.exit_code == 1
    if as_json:
        printed = json.loads(result.stdout)
        assert not printed["ok"]
        names = {status: [check["name"] for check in printed["checks"] if check["status"] == status]
                 for status in ("failed", "not installed")}
        assert names == {"failed": ["Horovod", "front ends"], "not installed": ["PyTorch", "TensorFlow"]}
    else:
        lines = result.stdout.splitlines()
        assert f"  front ends: {remedies.FRAMEWORKS}" in lines and lines[-1] == "2 of 12 checks failed."


# How what was found is judged.

@pytest.mark.parametrize(("version", "status"), [
    ((3, 8, 18), Status.FAILED), ((3, 9, 0), Status.OK), ((3, 11, 7), Status.OK), ((3, 12, 0), Status.FAILED)])
def test_pythons_that_are_supported(version: tuple[int, ...], status: Status) -> None:
    assert judging.check_python(version).status is status


def test_a_host_name_without_an_address_fails() -> None:
    check = judging.check_host_name("nowhere.invalid")
    assert check.status is Status.FAILED and "nowhere.invalid" in check.found and "/etc/hosts" in check.remedy
    assert judging.check_host_name("localhost").status is Status.OK


def test_a_build_without_gloo_and_mpi_fails() -> None:
    built = Outcome({"framework": {}, "extension": {"Gloo": False, "MPI": False, "NCCL": True}})
    check = judging.check_build({PYTORCH: built})
    assert check.status is Status.FAILED and check.found == "NCCL; PyTorch" and "HOROVOD_WITH_GLOO=1" in check.remedy


def test_functions_of_another_form_fail_with_the_reason() -> None:
    failure = Failure("hooks", "UnsupportedHorovodError: Horovod 0.28.1 is installed, but", raised=True)
    check = judging.check_hooks(PYTORCH, Outcome({"framework": {}, "extension": {}}, failure), ["torch"])
    assert check.status is Status.FAILED and check.found == failure.error and "horovod==0.28.1" in check.remedy


def rank(error: str | None = None, at: str = "sra", digest: str = "d", raised: bool = True) -> Outcome:
    found = {step: digest if step in ("allgather", "sra", "allreduce") else None for step in STEPS}
    return Outcome(found, Failure(at, error, raised=raised) if error else None)


@pytest.mark.parametrize(("ranks", "found", "remedy"), [
    ([rank(), rank(digest="e")], "weights differ between ranks", remedies.DIFFERENT),
    ([rank("horovodrun ended with status 1", raised=False), rank("RuntimeError: 3 of 10 weights are not those of the "
                                                                 "simulation")], "rank 1 at sra", remedies.DIFFERENT),
    ([rank("RuntimeError: horovodrun started 2 processes, but Horovod sees 1", "hvd.init()")] * 2,
     "rank 0 at hvd.init()", remedies.ONE_PROCESS),
    ([rank(), rank("no end within 9 s", "end", raised=False)], "rank 1 at end", remedies.HANG),
    ([rank("horovodrun ended with status 1: Exit code: 139", "hvd.init()", raised=False)] * 2, "139", remedies.JOB),
])
def test_what_ranks_tell_is_a_result(ranks: list[Outcome], found: str, remedy: str) -> None:
    check = judging.check_self_test(TENSORFLOW, ranks, "gloo")
    assert check.status is Status.FAILED and found in check.found and check.remedy == remedy


def test_a_kernel_that_computes_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = kernels.load("numpy")
    wrong = types.SimpleNamespace(**vars(reference))
    wrong.pack_digits = lambda packed, digits, words: words.fill(0)
    monkeypatch.setattr(kernels, "load", {"numpy": reference, "wrong": wrong}.__getitem__)
    assert compare("numpy")["kernels"] == 8
    with pytest.raises(RuntimeError, match="results of pack_digits, unpack_digits in wrong are not those"):
        compare("wrong")


# Ends.

def test_what_a_launcher_leaves_is_ended(started: Started, tmp_path: pathlib.Path,  # noqa: F811
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "END_LIMIT_S", 0.5)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('started', flush=True); signal.pause()"
    # The rank's parent ends at once, so that nothing tells by whom it was started.
    parent = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
    launcher = "import signal, subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]]); signal.pause()"
    with jobs.running([sys.executable, "-c", launcher, parent, deaf], os.environ, tmp_path / "log") as process:
        while not (tmp_path / "log").read_text():
            assert process.poll() is None
        assert len(started()) == 2
    assert started() == []


def test_a_job_that_is_interrupted_while_it_starts_is_ended(started: Started, tmp_path: pathlib.Path,  # noqa: F811
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen
    # Whoever runs the tests in the background of a shell may have let them ignore interrupts.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        process = start(*arguments, **options)
        os.kill(os.getpid(), signal.SIGINT)
        return process

    monkeypatch.setattr(jobs.subprocess, "Popen", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            with jobs.running([sys.executable, "-c", "import signal; signal.pause()"], os.environ, tmp_path / "log"):
                pytest.fail("the interrupt was lost")
    finally:
        signal.signal(signal.SIGINT, handler)
    assert started() == []


@pytest.mark.parametrize(("command", "number", "part", "processes"), [
    (["bench", "frontends"], signal.SIGINT, "horovod.runner.launch", 2),
    (["bench", "frontends"], signal.SIGTERM, "horovod.runner.launch", 2),
    (["check"], signal.SIGINT, "hvd_twobit.checks.probes", 1),
])
@pytest.mark.timeout(120)
def test_an_interrupted_command_ends_with_all_its_processes(command: list[str], number: int, part: str, processes: int,
                                                            started: Started) -> None:  # noqa: F811
    pytest.importorskip("horovod")
    process = subprocess.Popen(
        [*COMMAND, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    while len(started(part)) < processes:
        assert process.poll() is None
    process.send_signal(number)
    output, errors = process.communicate(timeout=100)
    assert (process.returncode, output, errors.strip()) == (128 + number, "", "")
    assert started() == []

"""What ends a job must end it, with a message and without a hang; a full disk must not cost the last checkpoint."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable

import pytest

from .launcher import REPOSITORY, RanksFailed, horovodrun, run_ranks

DEADLINE_S = 120

TOLD = {
    "killed": r"Process 1 exit with status code 137\.",
    "terminated": r"Process 1 exit with status code 143\.",
    "raises": r"\[1\]<stderr>:RuntimeError: the hook of rank 1 has failed",
}


@pytest.mark.parametrize("fault", TOLD)
def test_a_rank_that_ends_between_encode_and_decode_ends_the_job(fault: str) -> None:
    with pytest.raises(RanksFailed) as told:
        run_ranks(2, "tests.scenarios.torch_faults:train", timeout_s=DEADLINE_S, fault=fault)
    assert str(told.value).startswith("exit status"), "horovodrun should have ended by itself"
    assert re.search(TOLD[fault], str(told.value)), told.value


def test_steps_that_are_broken_off_leave_nothing_behind(tmp_path: pathlib.Path) -> None:
    assert "[0]<stdout>:broken off" in run_torch(tmp_path, "break_off")


@pytest.mark.parametrize("grouped", [False, True])
def test_a_gradient_whose_collective_failed_is_told_and_left_behind(grouped: bool, tmp_path: pathlib.Path) -> None:
    told = run_torch(tmp_path, "fail", grouped=grouped)
    assert told.count("[0]<stdout>:told:") == 2 and "[0]<stdout>:taken up" in told


def run_torch(folder: pathlib.Path, scenario: str, **arguments: object) -> str:
    """What a job of two ranks prints, of which one leaves in the middle."""
    return horovodrun(2, [sys.executable, "-m", "tests.launcher", str(folder), "torch",
                          f"tests.scenarios.torch_faults:{scenario}", json.dumps({"folder": str(folder), **arguments})],
                      timeout_s=DEADLINE_S)


def test_a_job_that_is_terminated_within_a_step_ends_with_its_ranks(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "tests.horovodrun", "--gloo", "-np", "2", sys.executable, "-m", "tests.launcher",
               str(tmp_path), "torch", "tests.scenarios.torch_faults:train",
               json.dumps({"fault": "waits", "folder": str(tmp_path)})]
    job = subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"},
                           stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=DEADLINE_S)
    finally:
        if job.poll() is None:
            job.kill()
    # The exit status is Horovod's own, and now and then 0: of a rank that psutil has waited for, subprocess knows none.
    assert job.returncode is not None
    for rank in tmp_path.iterdir():
        wait_until(lambda pid=int(rank.name): not is_alive(pid))


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "the deadline passed"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


SAVE_UNTIL_FULL = """
    import os, resource, sys
    from hvd_twobit.residuals import ResidualRegistry

    def registry(elements):
        made = ResidualRegistry()
        made.residual("w", (elements,))[:] = elements
        return made

    path = sys.argv[1]
    registry(1000).save(path)
    if sys.argv[2] == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        registry(100_000).save(path)
    except OSError as error:
        print(type(error).__name__, error.errno)
    loaded = ResidualRegistry()
    loaded.load(path)
    print(loaded["w"].shape, float(loaded["w"].min()), os.listdir(os.path.dirname(path)))
"""


@pytest.mark.parametrize("kind", ["a file size limit", "a full file system"])
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before_whole(kind: str, tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(SAVE_UNTIL_FULL), str(tmp_path / "residuals.npz")]
    if kind == "a file size limit":
        command, error = [*command, "limit"], "OSError 27"  # EFBIG
    else:
        inside = ["unshare", "--mount", "--map-root-user", "sh", "-c",
                  f"mount -t tmpfs -o size=200k tmpfs {tmp_path} && exec \"$@\"", "sh"]
        if subprocess.run([*inside, "true"], capture_output=True).returncode != 0:
            pytest.skip("this system lets users mount nothing, not even for themselves")
        command, error = [*inside, *command, "none"], "OSError 28"  # ENOSPC
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ran.stdout.splitlines() == [error, "(1000,) 1000.0 ['residuals.npz']"], ran.stderr

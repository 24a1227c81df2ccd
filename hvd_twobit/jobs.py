"""Jobs of ranks on this machine under ``horovodrun``: how they are started, and that nothing of them is left.

For what the command line starts itself. Nothing is imported of Horovod, so that a broken one is an error of the job.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HOROVODRUN = "horovod.runner.launch"
"""By module: a script horovodrun on the PATH may be that of another environment."""

END_LIMIT_S = 15
"""Horovod gives its ranks 5 seconds to end and then kills them."""

_MARK = "HVDTWOBIT_JOB"
"""An environment variable by which the processes of a job are known, whatever has become of their parents."""

_OF_A_JOB = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_", "HOROVOD_CROSS_", "HOROVOD_GLOO_RENDEZVOUS_",
             "HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HOROVOD_HOSTNAME", "OMPI_", "PMIX_", "PMI_")


def horovodrun(ranks: int, controller: str = "gloo", launcher: str = HOROVODRUN) -> list[str]:
    """The command that starts so many ranks on this machine; the program of a rank follows it.

    Args:
        ranks: number of ranks.
        controller: ``"gloo"`` or ``"mpi"``.
        launcher: the module that is run as horovodrun.
    """
    return [sys.executable, "-m", launcher, f"--{controller}", "-np", str(ranks)]


def environment(**variables: str) -> dict[str, str]:
    """Of a job: this process's, but for what tells of a job that it is part of, and with this package on the path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_JOB)}
    package = str(pathlib.Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    return {**kept, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": path, **variables}


@contextlib.contextmanager
def running(command: Sequence[str], variables: Mapping[str, str], log: pathlib.Path) -> Iterator[subprocess.Popen]:
    """Start a command; when the ``with`` ends it and all processes that it started have ended.

    Ctrl-C reaches this process alone, which then ends the job; so does SIGTERM, by SystemExit with status 143.

    Args:
        command: a launcher and what it launches.
        variables: its environment.
        log: file for what it prints.
    """
    mark = uuid.uuid4().hex
    with _terminable(), open(log, "w") as output:
        process: subprocess.Popen | None = None
        try:
            with _held_back():  # What interrupts Popen leaves a process of which nobody knows.
                process = subprocess.Popen(command, env={**variables, _MARK: mark}, stdin=subprocess.DEVNULL,
                                           stdout=output, stderr=output, start_new_session=True)
            yield process
        finally:
            if process is not None:
                _end(process, mark)


@contextlib.contextmanager
def child(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen]:
    """Start a process that starts no others; when the ``with`` ends it has ended, also where Ctrl-C ends the ``with``.

    ``subprocess.run`` does not wait for what it kills then, and knows nothing of a process that it has just started.

    Args:
        command: what is started.
        options: of ``subprocess.Popen``.
    """
    process: subprocess.Popen | None = None
    try:
        with _held_back():
            process = subprocess.Popen(command, **options)
        yield process
    finally:
        if process is not None:
            with _uninterrupted():
                process.kill()
                process.communicate()


def _end(process: subprocess.Popen, mark: str) -> None:
    """End a launcher that may still run, in good order if it does so in time, and all processes that it started."""
    import psutil  # Horovod needs it, hvd_twobit otherwise does not.

    with _uninterrupted():
        if process.poll() is None:
            process.terminate()  # horovodrun ends its ranks.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_LIMIT_S)
            process.kill()
            process.wait()
        # Where it was interrupted while it started ranks, what was on its way is nobody's child by now.
        # A process has no environment for a moment, while it becomes another program: so they are looked for twice.
        unseen = 0
        while unseen < 2:
            left = _marked(mark)
            unseen = 0 if left else unseen + 1
            for other in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    other.kill()
            psutil.wait_procs(left, timeout=END_LIMIT_S)


def _marked(mark: str) -> list[Any]:
    """The living processes of a job, by the mark in their environment."""
    import psutil

    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def last_lines(log: pathlib.Path, count: int = 20) -> list[str]:
    """Of what a job printed: the lines of its ranks, or of its launcher where these printed none."""
    lines = log.read_text(errors="replace").splitlines()
    return ([line for line in lines if line.startswith(("[", "Process ", "Exit code"))] or lines)[-count:]


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Within this, SIGTERM raises SystemExit, so that what was started is ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, frame: object) -> None:
    sys.exit(128 + number)


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """Within this, Ctrl-C and SIGTERM wait, but not in processes that are started, which inherit a blocked signal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    held = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in held:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number in held:
            signal.signal(number, before[number])
        for arrived in came:
            os.kill(os.getpid(), arrived)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Within this, Ctrl-C and SIGTERM wait."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

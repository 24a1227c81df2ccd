"""A job of ranks under horovodrun, one in each namespace of a cluster, that exchanges gradients when it is told to.

Orders and answers are lines of JSON on a Unix socket, which leads from one namespace to another by the file system, so
that they are no traffic on the links: see ``rank``.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from .cluster import Cluster
from .interrupts import Interrupts

HOROVODRUN = "horovod.runner.launch"
REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
_SHIM = pathlib.Path(__file__).with_name("bin")
_START_LIMIT_S = 180
_END_LIMIT_S = 30
_GLOO_LIMIT_S = 300  # Horovod's 30 may pass before all ranks have started, where they share few cores.


class JobFailed(Exception):
    """The job ended early, or did not answer in time; the message holds the end of what it printed."""


@contextlib.contextmanager
def running(cluster: Cluster, model: str, methods: Sequence[str], interrupts: Interrupts,
            launcher: str = HOROVODRUN) -> Iterator[Job]:
    """Start a job; it has been ended, in good order where nothing was raised, when the ``with`` ends.

    Args:
        cluster: where it runs.
        model: what it exchanges, see ``models``.
        methods: names of the methods that it will be told to use.
        interrupts: what may interrupt the waiting for an answer.
        launcher: the module that is run as horovodrun.

    Raises:
        JobFailed: it did not start, or did not end well.
    """
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hvd_twobit_bench_")))
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(str(folder / "control"))
        server.listen(1)
        with open(folder / "log", "w") as log:
            process = subprocess.Popen(_command(cluster, launcher, [str(folder / "control"), model, *methods]),
                                       cwd=REPOSITORY, env=_environment(cluster), stdin=subprocess.DEVNULL, stdout=log,
                                       stderr=log, start_new_session=True)  # Ctrl-C is for this process to handle.
        stack.callback(_end, process)
        job = Job(process, folder / "log", interrupts)
        job.accept(server, stack)
        yield job
        job.finish()


class Job:
    """A running job; see ``running``."""

    def __init__(self, process: subprocess.Popen[bytes], log: pathlib.Path, interrupts: Interrupts) -> None:
        self._process, self._log, self._interrupts = process, log, interrupts

    def accept(self, server: socket.socket, stack: contextlib.ExitStack) -> None:
        """Wait until rank 0 has connected."""
        process_end = os.pidfd_open(self._process.pid)
        stack.callback(os.close, process_end)
        self._process_end = process_end
        self._wait_for(server, _START_LIMIT_S, "start")
        self._connection, _ = server.accept()
        stack.callback(self._connection.close)
        self._answers = stack.enter_context(self._connection.makefile("rb"))

    def order(self, limit_s: float, **order: Any) -> Any:
        """Have the job do something, and return its answer; see ``rank``.

        Raises:
            JobFailed: there is none within the limit, in seconds.
        """
        try:
            self._connection.sendall(json.dumps(order).encode() + b"\n")
        except OSError:
            self._fail("ended early")
        self._wait_for(self._connection, limit_s, "answer")
        line = self._answers.readline()
        if not line.endswith(b"\n"):
            self._fail("ended early")
        return json.loads(line)

    def finish(self) -> None:
        """Let the job end, and see that it ends well."""
        self._connection.shutdown(socket.SHUT_WR)
        with self._interrupts.allowed():
            try:
                status = self._process.wait(_END_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._fail(f"did not end within {_END_LIMIT_S} s")
        if status:
            self._fail(f"ended with status {status}")

    def _wait_for(self, source: socket.socket, limit_s: float, what: str) -> None:
        with selectors.DefaultSelector() as selector, self._interrupts.allowed():
            selector.register(source, selectors.EVENT_READ)
            selector.register(self._process_end, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select(limit_s)]
        if source not in ready:
            self._fail("ended early" if ready else f"did not {what} within {limit_s:.0f} s")

    def _fail(self, what: str) -> Any:
        # A rank's error is in the log when horovodrun has ended, which ends by itself once a rank has failed.
        with contextlib.suppress(subprocess.TimeoutExpired), self._interrupts.allowed():
            self._process.wait(5)
        lines = self._log.read_text(errors="replace").splitlines()
        of_ranks = [line for line in lines if line.startswith(("[", "Process "))]  # Without horovodrun's traceback.
        raise JobFailed("\n".join([f"the job {what}; it printed:", *(of_ranks or lines)[-60:]]))


def _command(cluster: Cluster, launcher: str, arguments: Sequence[str]) -> list[str]:
    hosts = ",".join(f"{address}:{cluster.ranks_per_machine}" for address in cluster.addresses)
    return ["ip", "netns", "exec", cluster.launcher, sys.executable, "-m", launcher, "--gloo", "--disable-cache",
            "--network-interfaces", "eth0", "-np", str(len(cluster.addresses) * cluster.ranks_per_machine), "-H", hosts,
            sys.executable, "-m", "benchmarks.network.rank", *arguments]


def _environment(cluster: Cluster) -> dict[str, str]:
    return {**os.environ, "PATH": f"{_SHIM}{os.pathsep}{os.environ['PATH']}", "NETBENCH_PREFIX": cluster.prefix,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "HOROVOD_GLOO_TIMEOUT_SECONDS": str(_GLOO_LIMIT_S),
            "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End horovodrun, which ends its ranks; what it leaves ends with the namespaces."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_LIMIT_S)
        process.kill()
        process.wait()

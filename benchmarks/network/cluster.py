"""A network of this machine's own: namespaces that are joined by a switch over links of a chosen bandwidth.

One namespace for each machine and one for horovodrun, each with an interface ``eth0``; the other ends are ports of a
bridge in a namespace of its own, so that the host's interfaces and firewall have no part in it. Names begin with
``hvdtb<pid>``. All is removed when the ``with`` ends, however it ends; only SIGKILL leaves it.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import select
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator

NETNS_FILES = pathlib.Path("/etc/netns")
"""Here, ``ip netns exec NAME`` finds files that take the place of those in /etc."""

UNSHAPED = "unshaped"
QUEUE_MS = 100
"""The longest time that a packet waits in a link's queue; one that would wait longer is lost."""

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_LAUNCHER = 254
_KILL_LIMIT_S = 10
_LARGEST_PACKET = 70_000  # Linux hands up to 64 KiB of a TCP stream to a virtual link at once.


class ClusterError(Exception):
    """The network cannot be made; the message tells what to do, or the command that failed and why."""


def bits_per_second(rate: str) -> int | None:
    """The bandwidth of a rate such as ``"100mbit"``; None for ``"unshaped"``.

    Raises:
        ValueError: it is neither.
    """
    if rate == UNSHAPED:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if not found or not float(found[1]):
        raise ValueError(f"no rate {rate!r}: take a number with kbit, mbit or gbit, or {UNSHAPED}")
    return round(float(found[1]) * _UNITS[found[2]])


def burst_bytes(rate_bits: int) -> int:
    """What ``tbf`` lets pass at once: as little as it can without splitting packets, 0.2 ms at high rates."""
    return max(_LARGEST_PACKET, round(rate_bits / 8 * 2e-4))


def check_possible() -> None:
    """Raise ClusterError, with what to do, where namespaces cannot be made."""
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        raise ClusterError(f"not installed: {', '.join(missing)}; install iproute2 (apt-get install iproute2)")
    if os.geteuid() != 0:
        raise ClusterError("network namespaces need root: run this with sudo")


@contextlib.contextmanager
def cluster(machines: int, ranks_per_machine: int = 1) -> Iterator[Cluster]:
    """Make the network of a job.

    Raises:
        ClusterError: it cannot be made.
    """
    with contextlib.ExitStack() as stack:
        yield Cluster(machines, ranks_per_machine, stack)


class Cluster:
    """The network of one job.

    Args:
        machines: number of machines, a namespace each.
        ranks_per_machine: ranks on each of them.
        stack: what is made here is removed when it ends.
    """

    def __init__(self, machines: int, ranks_per_machine: int, stack: contextlib.ExitStack) -> None:
        self.ranks_per_machine = ranks_per_machine
        self.prefix = f"hvdtb{os.getpid()}"
        """What names of namespaces begin with."""
        self.addresses = [_address(number) for number in range(1, machines + 1)]
        """Of the machines."""
        self.launcher = self._namespace(_LAUNCHER)
        """Name of horovodrun's namespace."""
        self._switch = f"{self.prefix}sw"
        self._numbers = range(1, machines + 1)
        _add_namespace(self._switch, stack)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "up", "type", "bridge")
        if not NETNS_FILES.exists():
            stack.callback(_remove_empty, NETNS_FILES)
        for number in (*self._numbers, _LAUNCHER):
            self._connect(number, stack)

    def shape(self, rate: str) -> None:
        """Give every machine's link a bandwidth, in each direction; see ``bits_per_second``."""
        for number in self._numbers:
            for namespace, interface in ((self._namespace(number), "eth0"), (self._switch, f"port{number}")):
                _run("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", *_discipline(rate))

    def _namespace(self, number: int) -> str:
        return f"{self.prefix}n{number}"

    def _connect(self, number: int, stack: contextlib.ExitStack) -> None:
        namespace, port = self._namespace(number), f"port{number}"
        # Process sets ignore HOROVOD_GLOO_IFACE (Horovod 0.28.1) and listen where the host's name leads to.
        folder = NETNS_FILES / namespace
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{_address(number)} {socket.gethostname()}\n")
        _add_namespace(namespace, stack)
        _run("ip", "link", "add", "eth0", "netns", namespace, "type", "veth",
             "peer", "name", port, "netns", self._switch)
        _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", namespace, "address", "add", f"{_address(number)}/24", "dev", "eth0")
        _run("ip", "-n", namespace, "link", "set", "eth0", "up")
        _run("ip", "-n", namespace, "link", "set", "lo", "up")


def _address(number: int) -> str:
    return f"10.77.0.{number}"


def _discipline(rate: str) -> list[str]:
    rate_bits = bits_per_second(rate)
    if rate_bits is None:
        return ["noqueue"]
    return ["tbf", "rate", f"{rate_bits}bit", "burst", f"{burst_bytes(rate_bits)}b", "latency", f"{QUEUE_MS}ms"]


def _add_namespace(name: str, stack: contextlib.ExitStack) -> None:
    stack.callback(_remove_namespace, name)
    _run("ip", "netns", "add", name)


def _remove_namespace(name: str) -> None:
    """End what still runs in a namespace and remove it; nothing where it was not made."""
    if name not in _run("ip", "netns", "list").split():
        return
    while pids := _run("ip", "netns", "pids", name).split():
        for pid in pids:
            _kill(int(pid))
    _run("ip", "netns", "delete", name)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            ended, _, _ = select.select([handle], [], [], _KILL_LIMIT_S)
        finally:
            os.close(handle)
        if not ended:
            raise ClusterError(f"process {pid} does not end when it is killed")


def _remove_empty(folder: pathlib.Path) -> None:
    with contextlib.suppress(OSError):  # Someone else may use it by now, or have removed it.
        folder.rmdir()


def _run(*command: str) -> str:
    """Run a command, out of reach of the terminal's Ctrl-C, and return what it printed."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise ClusterError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout

"""An elastic Horovod job on this machine, whose hosts change while it runs, and what its workers tell.

``horovodrun`` asks a script for the hosts once a second; here that script shows a file. As Horovod never uses a host
again on which a worker failed, every worker has a host of its own: names of this machine that differ in case. Workers
run a program of ``tests.scenarios``, write what happens to them to a file each, and read what they are to do from one;
see ``tests.scenarios.elastic``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from .launcher import REPOSITORY

DEADLINE_S = 120
"""For what a job does by itself: starting workers, noticing that one has died, forming a new world."""

Result = TypeVar("Result")


def host_name(number: int) -> str:
    """One of 512 names of this machine."""
    return "".join(letter.upper() if number >> place & 1 else letter for place, letter in enumerate("localhost"))


@dataclasses.dataclass(frozen=True)
class Worker:
    """A process of the job that has told something."""

    pid: int
    host: str
    events: Sequence[dict[str, Any]]

    def last(self, kind: str) -> dict[str, Any] | None:
        """The last event of a kind."""
        return next((event for event in reversed(self.events) if event["kind"] == kind), None)


class ElasticJob:
    """A running job; see ``running``.

    Attributes:
        hosts: where workers are to run, one on each.
        output: the file with everything that horovodrun and the workers print.
    """

    def __init__(self, program: str, folder: pathlib.Path, workers: int, most: int) -> None:
        self._folder = folder
        self._started = 0
        self._orders: dict[str, Any] = {}
        self.hosts: list[str] = []
        self.output = folder / "output"
        self.order()
        for _ in range(workers):
            self.add_host()
        script = folder / "discover.sh"
        script.write_text(f"#!/bin/sh\ncat {folder / 'hosts'}\n")
        script.chmod(0o755)
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        command = [sys.executable, "-m", "tests.horovodrun", "--gloo", "-np", str(workers), "--min-np", "1",
                   "--max-np", str(most), "--host-discovery-script", str(script), "--network-interface", "lo",
                   sys.executable, "-m", program, str(folder)]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(command, env=environment, cwd=REPOSITORY, stdin=subprocess.DEVNULL,
                                            stdout=output, stderr=subprocess.STDOUT)

    def add_host(self) -> str:
        """Let a worker join; returns its host."""
        name = host_name(self._started)
        self._started += 1
        self._set_hosts([*self.hosts, name])
        return name

    def remove_host(self, name: str) -> None:
        """Let a worker leave, or tell the job of one that has died."""
        self._set_hosts([host for host in self.hosts if host != name])

    def _set_hosts(self, hosts: list[str]) -> None:
        self.hosts = hosts
        _replace(self._folder / "hosts", "".join(f"{host}:1\n" for host in hosts))

    def order(self, **orders: Any) -> None:
        """Tell all workers something; they read it before their next step."""
        self._orders.update(orders)
        _replace(self._folder / "orders.json", json.dumps(self._orders))

    def workers(self) -> list[Worker]:
        """All workers that have told something, also those that have ended."""
        found = []
        for path in self._folder.glob("worker-*.jsonl"):
            events = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            if events:
                found.append(Worker(int(path.stem.partition("-")[2]), events[0]["host"], events))
        return found

    def worker_on(self, host: str) -> Worker | None:
        """The worker of a host."""
        return next((worker for worker in self.workers() if worker.host == host), None)

    def wait_for(self, what: str, condition: Callable[[], Result | None], deadline_s: float = DEADLINE_S) -> Result:
        """What ``condition`` returns as soon as that is true.

        Raises:
            AssertionError: the job ended, or the deadline passed; with what was printed.
        """
        end = time.monotonic() + deadline_s
        while True:
            ended = self.process.poll() is not None
            result = condition()
            if result:
                return result
            if ended or time.monotonic() > end:
                reason = f"the job ended with status {self.process.returncode}" if ended else f"{deadline_s} s passed"
                raise AssertionError(f"{reason} without {what}\n{self.told()}")
            time.sleep(0.05)

    def wait_for_world(self, steps: int = 2) -> list[Worker]:
        """The workers on the present hosts in rank order, once they form one world and have committed steps in it."""
        def formed() -> list[Worker] | None:
            workers = [worker for worker in self.workers() if worker.host in self.hosts]
            worlds = [worker.last("world") for worker in workers]
            if len(workers) != len(self.hosts) or not all(worlds) or len({world["world"] for world in worlds}) != 1:
                return None
            if worlds[0]["size"] != len(workers) or any(_steps(worker, worlds[0]["world"]) < steps
                                                        for worker in workers):
                return None
            return sorted(workers, key=lambda worker: worker.last("world")["rank"])

        return self.wait_for(f"a world of {', '.join(self.hosts)}", formed)

    def kill_within_a_step(self, host: str) -> None:
        """SIGKILL a worker that has encoded a gradient and not yet decoded what all ranks sent."""
        self.order(stop_after_encode=host)
        worker = self.wait_for(f"a stop of {host} after encode", lambda: self._stopped(host))
        self.order(stop_after_encode=None)
        self.kill(worker)

    def _stopped(self, host: str) -> Worker | None:
        worker = self.worker_on(host)
        return worker if worker is not None and worker.last("encoded") else None

    def kill(self, worker: Worker) -> None:
        """SIGKILL a worker, and tell the job that its host is gone."""
        os.kill(worker.pid, signal.SIGKILL)
        self.remove_host(worker.host)

    def finish(self) -> int:
        """Order the workers to end; the exit status of the job."""
        self.order(end=True)
        self.wait_for("its end", lambda: self.process.poll() is not None)
        return self.process.returncode

    def told(self) -> str:
        """The end of what horovodrun and the workers printed, and of what each worker told."""
        lines = [f"{worker.pid} on {worker.host}: {json.dumps(worker.events[-3:])}" for worker in self.workers()]
        return "\n".join([self.output.read_text()[-6000:], *lines])

    def end(self) -> None:
        """End the job if it still runs."""
        if self.process.poll() is None:
            self.process.terminate()  # horovodrun ends its workers.
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()  # So do its helpers, when it is gone.
                self.process.wait()


@contextlib.contextmanager
def running(program: str, folder: pathlib.Path, workers: int = 2, most: int = 3) -> Iterator[ElasticJob]:
    """Start a job of ``workers`` workers that may become ``most``, and end it in any case."""
    job = ElasticJob(program, folder, workers, most)
    try:
        yield job
    finally:
        job.end()


def assert_worlds_agree(job: ElasticJob) -> dict[str, int]:
    """Check all that the workers have told: equal weights and levels on all ranks, residuals kept or new.

    Returns:
        How many ``worlds`` and ``commits`` were compared, and how many ``failed`` steps left no trace in a residual.
    """
    compared: dict[tuple[str, Any, Any], set[tuple[str, str]]] = {}
    counts = {"worlds": 0, "commits": 0, "failed": 0}
    for worker in job.workers():
        committed, failed = None, None
        for event in worker.events:
            if event["kind"] == "failed":
                failed = event
            elif event["kind"] == "commit":
                committed = event
                assert event.get("lost", 0) < 1e-5, f"what arrived is not what this world's ranks sent: {event}"
            elif event["kind"] != "world":
                continue
            if event["kind"] == "world":
                where = f"{worker.pid} on {worker.host}, {event}"
                assert event["in_flight"] is False, f"something of the old world is in flight: {where}"
                if committed is None:
                    assert event["residual"] in ("none", "zero"), f"a new worker's residual is not zero: {where}"
                else:
                    assert event["residual"] == committed["residual"], f"not what was committed, {committed}: {where}"
                    if failed is not None:
                        counts["failed"] += failed["residual"] != committed["residual"]
                failed = None
            # Between two worlds a batch may be trained twice, so the world belongs to what is compared.
            place = (event["kind"], event["world"], event["batch"])
            compared.setdefault(place, set()).add((event["weights"], event["levels"]))
            counts["worlds" if event["kind"] == "world" else "commits"] += 1
    for place, states in compared.items():
        assert len(states) == 1, f"ranks differ in weights or levels at {place}: {states}"
    return counts


def _steps(worker: Worker, world: str) -> int:
    """Steps that a worker has committed in a world."""
    return sum(event["kind"] == "commit" and event["world"] == world for event in worker.events)


def _replace(path: pathlib.Path, text: str) -> None:
    """Write a file at once, as others read it at any time."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    os.replace(unfinished, path)

"""An elastic Horovod job on this machine, whose hosts change while it runs, and what its workers tell.

``horovodrun`` asks a script for the hosts once a second; here that script shows a file. As Horovod never uses a host
again on which a worker failed, every worker has a host of its own, or shares one with those that go when it goes:
names of this machine that differ in case. Workers
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from .launcher import REPOSITORY

DEADLINE_S = 240
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
        hosts: where workers are to run, as many on each.
        output: the file with everything that horovodrun and the workers print.
    """

    def __init__(self, program: str, folder: pathlib.Path, hosts: int, most: int, least: int, workers_per_host: int,
                 arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._workers_per_host = workers_per_host
        self._started = 0
        self._orders: dict[str, Any] = {}
        self._read: dict[pathlib.Path, tuple[int, list[dict[str, Any]]]] = {}
        self.hosts: list[str] = []
        self.output = folder / "output"
        self.order()
        for _ in range(hosts):
            self.add_host()
        script = folder / "discover.sh"
        script.write_text(f"#!/bin/sh\ncat {folder / 'hosts'}\n")
        script.chmod(0o755)
        # For so long a worker waits for one that joins, but also, now and then, for one whose world has failed already.
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3",
                       "HOROVOD_GLOO_TIMEOUT_SECONDS": "60", **environment}
        command = [sys.executable, "-m", "tests.horovodrun", "--gloo", "-np", str(hosts * workers_per_host),
                   "--min-np", str(least * workers_per_host), "--max-np", str(most * workers_per_host),
                   "--host-discovery-script", str(script), "--network-interface", "lo",
                   sys.executable, "-m", program, str(folder), *arguments]
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
        _replace(self._folder / "hosts", "".join(f"{host}:{self._workers_per_host}\n" for host in hosts))

    def order(self, **orders: Any) -> None:
        """Tell all workers something; they read it before their next step."""
        self._orders.update(orders)
        _replace(self._folder / "orders.json", json.dumps(self._orders))

    def workers(self) -> list[Worker]:
        """All workers that have told something, also those that have ended."""
        return [Worker(int(path.stem.partition("-")[2]), events[0]["host"], events)
                for path in self._folder.glob("worker-*.jsonl") if (events := self._events_in(path))]

    def _events_in(self, path: pathlib.Path) -> list[dict[str, Any]]:
        """All events of a file; what was read before is not read again."""
        position, events = self._read.get(path, (0, []))
        with path.open("rb") as file:
            file.seek(position)
            for line in file:
                if line.endswith(b"\n"):
                    events.append(json.loads(line))
                    position += len(line)
        self._read[path] = position, events
        return events

    def worker_on(self, host: str) -> Worker | None:
        """The worker of a host, or one of them."""
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
            if (len(workers) != len(self.hosts) * self._workers_per_host or not all(worlds)
                    or len({world["world"] for world in worlds}) != 1):
                return None
            if worlds[0]["size"] != len(workers) or any(_steps(worker, worlds[0]["world"]) < steps
                                                        for worker in workers):
                return None
            return sorted(workers, key=lambda worker: worker.last("world")["rank"])

        return self.wait_for(f"a world of {', '.join(self.hosts)}", formed)

    def kill_within_a_step(self, host: str) -> None:
        """SIGKILL a worker that has encoded a gradient and not yet decoded what all ranks sent."""
        self.order(stop_after_encode=host)
        worker = self.wait_for(f"a stop of {host} after encode", lambda: self.stopped(host))
        self.order(stop_after_encode=None)
        self.kill(worker)

    def stopped(self, host: str) -> Worker | None:
        """The worker of a host once it stands still after ``encode``."""
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
def running(program: str, folder: pathlib.Path, hosts: int = 2, most: int = 3, least: int = 1,
            workers_per_host: int = 1, arguments: Sequence[str] = (),
            environment: Mapping[str, str] | None = None) -> Iterator[ElasticJob]:
    """Start a job on ``hosts`` hosts that may become ``most`` or ``least``, and end it in any case.

    Workers run ``python -m program folder arguments``, with these variables beside this process's.
    """
    job = ElasticJob(program, folder, hosts, most, least, workers_per_host, arguments, environment or {})
    try:
        yield job
    finally:
        job.end()


@dataclasses.dataclass
class Comparison:
    """What the events of a job's workers say when they are compared.

    Attributes:
        worlds: entries of workers into worlds.
        sizes: how many ranks worlds had.
        commits: committed steps of workers.
        restored: failed steps that had changed the residual of a worker, which then had what it had committed.
        problems: where ranks differ in weights or levels, or a residual is not what it should be.
    """

    worlds: int = 0
    sizes: set[int] = dataclasses.field(default_factory=set)
    commits: int = 0
    restored: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)


def compare(workers: Sequence[Worker]) -> Comparison:
    """Compare all that workers have told: weights and levels of all ranks, residuals before and after failures."""
    found = Comparison()
    states: dict[tuple[str, str, int, int], set[tuple[str, str]]] = {}
    for worker in workers:
        committed, failed = None, None
        for event in worker.events:
            if event["kind"] == "failed":
                failed = event
            elif event["kind"] == "commit":
                committed = event
                found.commits += 1
                if event.get("lost", 0) > 1e-5:
                    found.problems.append(f"what arrived is not what this world's ranks sent: {worker.pid}, {event}")
            elif event["kind"] == "world":
                found.worlds += 1
                found.sizes.add(event["size"])
                found.problems += _problems_of_entry(worker, event, committed)
                found.restored += failed is not None and failed["residual"] != event["residual"]
                failed = None
            if event["kind"] in ("commit", "world"):
                # A batch that failed is trained again in the next world.
                # On two levels, ranks of one number have the same levels.
                place = (event["kind"], event["world"], event["batch"], event.get("number", 0))
                states.setdefault(place, set()).add((event["weights"], event["levels"]))
    found.problems += [f"ranks differ in weights or levels at {place}: {different}"
                       for place, different in states.items() if len(different) > 1]
    return found


def _problems_of_entry(worker: Worker, event: dict[str, Any], committed: dict[str, Any] | None) -> list[str]:
    problems = []
    if event["in_flight"]:
        problems.append("something of the old world is in flight")
    if committed is None and event["residual"] not in ("none", "zero"):
        problems.append("the residual of a new worker is not zero")
    if committed is not None and event["residual"] != committed["residual"]:
        problems.append(f"the residual is not that of the last commit, {committed}")
    return [f"{problem}: {worker.pid}, {event}" for problem in problems]


def _steps(worker: Worker, world: str) -> int:
    """Steps that a worker has committed in a world."""
    return sum(event["kind"] == "commit" and event["world"] == world for event in worker.events)


def _replace(path: pathlib.Path, text: str) -> None:
    """Write a file at once, as others read it at any time."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    os.replace(unfinished, path)

"""Elastic jobs whose workers join, leave and are killed at random, for as long as is asked for: ``make soak``.

Prints its seed first, each event as it happens (rare ones are likelier), and a summary in the last line. The exit
status is 0 if all ranks agreed in weights and levels all the time, residuals were what they should be, and every job
recovered from every event within the deadline and ended well.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import random
import sys
import tempfile
import time

from .elastic_job import Comparison, ElasticJob, compare, running

MOST_WORKERS = 3
EVENTS_PER_JOB = 40


class Soak:
    """Jobs in a row, and what happened in them."""

    def __init__(self, program: str, seconds: float, seed: int) -> None:
        self._program = program
        self._random = random.Random(seed)
        self._start = time.monotonic()
        self._seconds = seconds
        self.events: collections.Counter[str] = collections.Counter()
        self.jobs = 0
        self.total = Comparison()
        self.broken = 0

    def run(self) -> None:
        """Run jobs until the time is up."""
        while not self._time_is_up():
            self.jobs += 1
            with tempfile.TemporaryDirectory(prefix="hvd_twobit_soak_") as folder, \
                    running(self._program, pathlib.Path(folder), hosts=2, most=MOST_WORKERS) as job:
                try:
                    self._disturb(job)
                except AssertionError as error:
                    self.broken += 1
                    self._say(f"job {self.jobs} broke: {error}")
                self._add(compare(job.workers()))

    def _disturb(self, job: ElasticJob) -> None:
        job.wait_for_world()
        for _ in range(EVENTS_PER_JOB):
            if self._time_is_up():
                break
            possible = self._possible(len(job.hosts))
            event, = self._random.choices(possible, [1 / (1 + self.events[event]) for event in possible])
            host = self._random.choice(job.hosts)
            self._say(f"job {self.jobs}, {len(job.hosts)} workers: {event}")
            self.events[event] += 1
            getattr(self, f"_{event}")(job, host)
            job.wait_for_world(steps=self._random.randint(1, 20))
        status = job.finish()
        assert status == 0, f"the job ended with status {status}\n{job.told()}"

    @staticmethod
    def _possible(workers: int) -> list[str]:
        joins = ["join"] if workers < MOST_WORKERS else []
        losses = ["leave", "kill_between_encode_and_decode", "kill_any_time", "replace"] if workers > 1 else []
        return joins + losses

    def _join(self, job: ElasticJob, host: str) -> None:
        job.add_host()

    def _leave(self, job: ElasticJob, host: str) -> None:
        job.remove_host(host)

    def _kill_between_encode_and_decode(self, job: ElasticJob, host: str) -> None:
        job.kill_within_a_step(host)

    def _kill_any_time(self, job: ElasticJob, host: str) -> None:
        time.sleep(self._random.uniform(0, 0.5))
        worker = job.worker_on(host)
        assert worker is not None
        job.kill(worker)

    def _replace(self, job: ElasticJob, host: str) -> None:
        self._kill_any_time(job, host)
        job.add_host()

    def _add(self, found: Comparison) -> None:
        self.total.worlds += found.worlds
        self.total.sizes |= found.sizes
        self.total.commits += found.commits
        self.total.restored += found.restored
        self.total.problems += found.problems
        for problem in found.problems:
            self._say(problem)

    def _time_is_up(self) -> bool:
        return time.monotonic() - self._start > self._seconds

    def _say(self, what: str) -> None:
        print(f"{time.monotonic() - self._start:7.1f} s  {what}", flush=True)

    @property
    def status(self) -> int:
        """The exit status."""
        return int(bool(self.broken or self.total.problems or not self.total.commits))

    def summary(self) -> str:
        """One line."""
        events = ", ".join(f"{count} {event.replace('_', ' ')}" for event, count in sorted(self.events.items()))
        return (f"soak: {(time.monotonic() - self._start) / 60:.1f} minutes, {self.jobs} jobs ({self.broken} broken), "
                f"{sum(self.events.values())} events ({events}), {self.total.commits} committed steps of workers, "
                f"{self.total.worlds} entries into worlds of {sorted(self.total.sizes)} ranks, {self.total.restored} "
                f"residuals restored after failed steps, disagreements = {len(self.total.problems)}, "
                f"exit status {self.status}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=None, help="of the events; a new one by default")
    parser.add_argument("--framework", choices=["torch", "keras"], default="torch")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2 ** 32) if options.seed is None else options.seed
    print(f"soak of {options.minutes:g} minutes, --framework {options.framework} --seed {seed}", flush=True)
    soak = Soak(f"tests.scenarios.elastic_{options.framework}", 60 * options.minutes, seed)
    soak.run()
    print(soak.summary(), flush=True)
    return soak.status


if __name__ == "__main__":
    sys.exit(main())

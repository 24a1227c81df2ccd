"""Elastic jobs of real workers that join, leave and are killed: ranks agree, and nothing committed is lost."""

from __future__ import annotations

import pathlib

import pytest

from .elastic_job import ElasticJob, assert_worlds_agree, running

pytestmark = pytest.mark.timeout(600)  # Waits of the job have deadlines of their own.


def hosts_of_world(job: ElasticJob) -> list[str]:
    """The hosts of the world that the job forms, in rank order."""
    return [worker.host for worker in job.wait_for_world()]


def test_pytorch_workers_join_leave_and_are_killed_within_a_step(tmp_path: pathlib.Path) -> None:
    with running("tests.scenarios.elastic_torch", tmp_path) as job:
        assert len(hosts_of_world(job)) == 2
        third = job.add_host()
        assert hosts_of_world(job)[2:] == [third]
        killed = hosts_of_world(job)[0]  # Rank 0, from which the other ranks take the levels.
        job.kill_within_a_step(killed)
        survivors = hosts_of_world(job)
        assert len(survivors) == 2 and killed not in survivors
        job.remove_host(survivors[0])
        assert hosts_of_world(job) == survivors[1:]
        fourth = job.add_host()
        assert hosts_of_world(job) == [survivors[1], fourth]
        assert job.finish() == 0
        told = assert_worlds_agree(job)
    assert told["worlds"] >= 2 + 3 + 2 + 1 + 2
    assert told["failed"] == 2, "the survivors' residuals should have changed in the step that failed"


def test_keras_worker_is_killed_within_a_step_and_another_one_joins(tmp_path: pathlib.Path) -> None:
    with running("tests.scenarios.elastic_keras", tmp_path) as job:
        survivor, killed = hosts_of_world(job)
        job.kill_within_a_step(killed)
        third = job.add_host()
        assert hosts_of_world(job) == [survivor, third]
        assert job.finish() == 0
        told = assert_worlds_agree(job)
    assert told["worlds"] >= 2 + 2
    assert told["failed"] == 1, "the survivor's residual should have changed in the step that failed"

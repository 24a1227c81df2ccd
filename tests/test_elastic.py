"""Elastic jobs of real workers that join, leave and are killed: ranks agree, and nothing committed is lost."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from hvd_twobit.elastic import Committed, follow_rank_0
from hvd_twobit.errors import ResidualError
from hvd_twobit.residuals import ResidualRegistry

from .elastic_job import ElasticJob, compare, running
from .launcher import REPOSITORY

pytestmark = pytest.mark.timeout(900)  # Waits of the job have deadlines of their own.


def registry(value: float, **others: object) -> ResidualRegistry:
    """A registry of one tensor, whose residual has one value everywhere and levels another."""
    made = ResidualRegistry()
    made.load_state_dict({"format_version": 1, "shapes": {"w": (40, 50)},
                          "residuals": {"w": np.full((40, 50), value, np.float32)},
                          "levels": {"w": np.full(2, 0.25, np.float32)}, "uncompressed_steps": {"w": 1}, **others})
    return made


def levels_of(residuals: ResidualRegistry) -> list[float]:
    return residuals.state_dict()["levels"]["w"].tolist()


def test_restore_brings_back_what_was_committed_as_often_as_it_is_asked_for() -> None:
    residuals = registry(3.0)
    committed = Committed(residuals)
    for _ in range(2):
        residuals["w"][:] = 7
        residuals.forget_levels()
        committed.restore()
        assert (residuals["w"] == 3).all() and levels_of(residuals) == [0.25, 0.25]
    residuals["w"][:] = 7
    committed.save()
    residuals.reset()
    committed.restore()
    assert (residuals["w"] == 7).all()


def sync(residuals: ResidualRegistry, rank_0: ResidualRegistry) -> None:
    told = []
    follow_rank_0(rank_0, lambda shared: told.append(shared) or shared, list)
    follow_rank_0(residuals, lambda _: told[0], list)


def test_sync_takes_levels_from_rank_0_and_leaves_residuals_where_they_are() -> None:
    rank_0 = registry(3.0)
    survivor, newcomer = registry(5.0, levels={}, uncompressed_steps={}), ResidualRegistry()
    for residuals in survivor, newcomer:
        sync(residuals, rank_0)
        assert levels_of(residuals) == [0.25, 0.25]
        assert residuals.state_dict()["uncompressed_steps"] == {"w": 1}
    assert (survivor["w"] == 5).all() and (rank_0["w"] == 3).all()
    assert newcomer.shared()["shapes"] == {"w": (40, 50)}
    assert len(newcomer) == 0, "memory is taken when it is first needed"


def test_sync_brings_a_residual_into_the_unit_of_rank_0() -> None:
    survivor, newcomer = registry(5.0, loss_scale=16.0), ResidualRegistry()
    for residuals in survivor, newcomer:
        sync(residuals, registry(3.0, loss_scale=8.0))
        assert residuals.loss_scale == 8 and levels_of(residuals) == [0.25, 0.25]
    assert (survivor["w"] == 2.5).all()
    sync(survivor, registry(3.0))
    assert survivor.loss_scale is None and (survivor["w"] == 2.5 / 8).all() and levels_of(survivor) == [0.25, 0.25]


def test_sync_with_another_model_names_the_tensor() -> None:
    other = ResidualRegistry()
    other.declare("w", (50, 40))
    with pytest.raises(ResidualError, match=r"tensor 'w' has shape \(40, 50\), but its residual was kept for shape"):
        sync(other, registry(3.0))


def run_python(code: str) -> str:
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=REPOSITORY, text=True, timeout=120,
                         capture_output=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()[-1]


def test_a_torch_state_handles_residuals_and_follows_an_assignment() -> None:
    assert run_python("""
        import horovod.torch as hvd, torch
        from hvd_twobit.residuals import ResidualRegistry
        from hvd_twobit.torch import elastic
        elastic.register()
        hvd.init()
        first, second = ResidualRegistry(), ResidualRegistry()
        second.residual("w", (2,))[:] = 4
        state = hvd.elastic.TorchState(model=torch.nn.Linear(1, 1), residuals=first, batch=0)
        state.residuals = second
        state.residuals.residual("w", (2,))[:] = 5
        state.sync()
        print(state.residuals is second, second["w"].tolist(), end=" ")
        state.restore()
        print(second["w"].tolist(), len(first))
    """) == "True [5.0, 5.0] [4.0, 4.0] 0"


def test_a_tensorflow_state_handles_residuals_and_follows_an_assignment() -> None:
    assert run_python("""
        import horovod.tensorflow as hvd, tensorflow as tf
        import hvd_twobit.tensorflow
        from hvd_twobit.residuals import ResidualRegistry
        hvd.init()
        first, second = ResidualRegistry(), ResidualRegistry()
        first.residual("w", (2,))[:] = 4
        variable = tf.Variable(1.0)
        state = hvd.elastic.TensorFlowState([variable], residuals=first, batch=0)
        state.residuals = second
        variable.assign(2.0)
        first.residual("w", (2,))[:] = 5
        state.restore()
        print(state.residuals is first, first["w"].tolist(), float(variable), end=" ")
        state.residuals, state.batch = second, 1
        second.residual("w", (2,))[:] = 6
        state.save()
        second.residual("w", (2,))[:] = 7
        state.sync()
        state.restore()
        print(state.residuals is second, second["w"].tolist(), state.batch)
    """) == "True [4.0, 4.0] 1.0 True [7.0, 7.0] 1"


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
        told = compare(job.workers())
    assert not told.problems, told.problems
    assert told.worlds >= 2 + 3 + 2 + 1 + 2
    assert told.restored >= 2, "the survivors' residuals should have changed in the step that failed"


def test_machines_of_two_ranks_leave_and_join(tmp_path: pathlib.Path) -> None:
    # None is killed: with process sets, Horovod 0.28.1 ends by itself when it loses a connection.
    with running("tests.scenarios.elastic_torch", tmp_path, workers_per_host=2, environment={
            "HVD_TWOBIT_HIERARCHICAL": "1", "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}) as job:
        staying, _, leaving, _ = hosts_of_world(job)
        job.remove_host(leaving)
        assert hosts_of_world(job) == [staying] * 2
        joining = job.add_host()
        assert hosts_of_world(job) == [staying, staying, joining, joining]
        assert job.finish() == 0
        told = compare(job.workers())
    assert not told.problems, told.problems
    assert told.sizes == {4, 2} and told.worlds >= 4 + 2 + 4


def test_keras_worker_is_killed_within_a_step_and_another_one_joins(tmp_path: pathlib.Path) -> None:
    with running("tests.scenarios.elastic_keras", tmp_path) as job:
        survivor, killed = hosts_of_world(job)
        job.kill_within_a_step(killed)
        third = job.add_host()
        assert hosts_of_world(job) == [survivor, third]
        assert job.finish() == 0
        told = compare(job.workers())
    assert not told.problems, told.problems
    assert told.worlds >= 2 + 2
    assert told.restored >= 1, "the survivor's residual should have changed in the step that failed"

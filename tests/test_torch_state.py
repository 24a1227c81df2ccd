"""PyTorch: training is deterministic, also when it is interrupted and resumed, and needs no more memory by and by."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from .launcher import run_ranks
from .scenarios import torch_state as scenario
from .simulation import assert_same_bits

RANKS, TIMEOUT_S = 2, 540

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S + 60)  # The first test waits for both jobs.


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Any]]:
    """What two jobs returned, per rank; the second one resumed from the files of the first."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    files = pathlib.Path(folder)
    first = run_ranks(RANKS, "tests.scenarios.torch_state:first", timeout_s=TIMEOUT_S, folder=folder)
    assert len(list(files.iterdir())) == 2 * RANKS * len(scenario.CONFIGURATIONS)
    return first, run_ranks(RANKS, "tests.scenarios.torch_state:second", timeout_s=TIMEOUT_S, folder=folder)


def assert_same_results(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for kind in ("weights", "residuals", "levels"):
        assert found[kind].keys() == wanted[kind].keys()
        for name in wanted[kind]:
            assert_same_bits(found[kind][name], wanted[kind][name], f"{kind} {name}")


@pytest.mark.parametrize("name", scenario.CONFIGURATIONS)
def test_two_jobs_of_the_same_seeds_end_with_the_same_bits(name: str, jobs: Any) -> None:
    for first, second in zip(*jobs):
        assert_same_results(second[name]["again"], first[name])


@pytest.mark.parametrize("name", scenario.CONFIGURATIONS)
def test_all_ranks_have_the_same_weights_and_levels_but_residuals_of_their_own(name: str, jobs: Any) -> None:
    one, other = (result[name] for result in jobs[0])
    for kind in ("weights", "levels"):
        for tensor, value in one[kind].items():
            assert_same_bits(other[kind][tensor], value, f"{kind} {tensor}")
    assert one["residuals"].keys() == {"0.weight", "2.weight"} == other["residuals"].keys()
    assert not any((one["residuals"][tensor] == other["residuals"][tensor]).all() for tensor in one["residuals"])


@pytest.mark.parametrize("name", scenario.CONFIGURATIONS)
def test_a_resumed_job_ends_with_the_bits_of_one_that_was_not_interrupted(name: str, jobs: Any) -> None:
    for first, second in zip(*jobs):
        assert_same_results(second[name]["resumed"], first[name])


def test_reset_begins_anew_on_every_rank(jobs: Any) -> None:
    for result in jobs[1]:
        assert_same_results(result["reset"]["reset"], result["reset"]["new"])


def test_residuals_of_ranks_that_are_gone_reach_the_weights(jobs: Any) -> None:
    for result in jobs[1]:
        found = result["ranks that are gone"]
        np.testing.assert_array_equal(found["sent"] + found["unsent"], found["before"])
        assert abs(found["unsent"]).max() < RANKS * 0.5 and abs(found["before"]).max() > 10


def test_a_compressed_element_takes_four_bytes_of_residual_and_a_quarter_of_payload(jobs: Any) -> None:
    for result in jobs[1]:
        for name, residual, blocks in (("adaptive levels", 4, 1 / 1024), ("a fixed threshold", 4, 0),
                                       ("a scaler", 8, 0)):
            found = result["memory"][name]
            assert found["registry"] == residual + 4 * blocks
            # The payload: codes and the block table, a few kilobytes for everything else.
            assert residual + 0.25 + 12 * blocks <= found["kept"] < residual + 0.25 + 12 * blocks + 0.02
            assert found["step"] < 0.1 + 64 * blocks


def test_two_thousand_steps_leave_nothing_in_memory(jobs: Any) -> None:
    for result in jobs[1]:
        found = result["many steps"]
        assert found["traced"] < 20_000, found["lines"]  # Ten bytes a step.
        assert found["resident"] < 4_000_000, found  # Less than half of a tensor's residual at every step.

"""PyTorch: what real Horovod ranks compute is, bit for bit, what the simulation of all ranks computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .jobs import results_of, waits_for_the_job
from .scenarios import torch_optimizer as scenario
from .scenarios.allreduce import seen_by
from .simulation import assert_same_bits

pytestmark = waits_for_the_job


@pytest.fixture(params=[2, 4], ids=["2 ranks", "4 ranks"], scope="module")
def results(request: pytest.FixtureRequest) -> list[Any]:
    """Every configuration in one job of 2 or 4 ranks, started once; per rank."""
    return results_of("torch", request.param, "optimizer")


@pytest.mark.parametrize("name", scenario.CONFIGURATIONS)
def test_optimizer_equals_the_simulation_of_all_ranks_for_20_steps(name: str, results: list[Any]) -> None:
    scenario.assert_expected(name, [result[name] for result in results])


@pytest.mark.parametrize("name", scenario.CONFIGURATIONS)
def test_all_ranks_hold_identical_weights_afterwards(name: str, results: list[Any]) -> None:
    first, *others = [result[name]["steps"][-1] for result in scenario.exchanging(name, results)]
    for other in others:
        for key in first:
            if key.startswith("weight"):
                assert_same_bits(other[key], first[key], key)


@pytest.mark.parametrize("name", scenario.JOINING)
def test_ranks_may_join_at_different_times_and_go_on_with_equal_levels(name: str) -> None:
    results = results_of("torch", 4, "optimizer_join")
    steps, tensor = scenario.expected_join(name, len(results))
    for rank, result in enumerate(results):
        seen = seen_by(rank, steps)
        assert len(result[name]["steps"]) == len(seen)
        for number, (found, wanted) in enumerate(zip(result[name]["steps"], seen)):
            for key in wanted:
                assert_same_bits(found[key], wanted[key], f"exchange {number}, rank {rank}, {key}")
        assert_same_bits(result[name]["residual"].reshape(-1), tensor.residuals[rank], f"residual, rank {rank}")
        assert_same_bits(result[name]["levels"], np.array(tensor.levels, np.float32), f"levels, rank {rank}")

"""TensorFlow and Keras: what real Horovod ranks compute is, bit for bit, what the simulation of all ranks computes."""

from __future__ import annotations

from typing import Any

import pytest

from .jobs import results_of, waits_for_the_job
from .scenarios import tensorflow_gradients as scenario
from .simulation import assert_same_bits, assert_same_state

CASES = [(ranks, name) for ranks in (2, 4) for name in scenario.configurations(ranks)]
by_case = pytest.mark.parametrize(("ranks", "name"), CASES, ids=[f"{ranks} ranks-{name}" for ranks, name in CASES])
pytestmark = waits_for_the_job


@by_case
def test_gradients_equal_the_simulation_of_all_ranks_for_20_steps(ranks: int, name: str) -> None:
    for rank, result in enumerate(exchanging(name, results_of("tensorflow", ranks, "gradients"))):
        result = result[name]
        steps, tensors = scenario.expected(name, ranks, rank)
        assert len(result["steps"]) == len(steps)
        for number, (found, wanted) in enumerate(zip(result["steps"], steps)):
            for key in found:
                assert_same_bits(found[key], wanted[key], f"step {number}, rank {rank}, {key}")
            recorded = {key.partition(" ")[0] for key in found}
            assert found.keys() == {key for key in wanted if key.partition(" ")[0] in recorded} and "weight" in recorded
    compression = scenario.CONFIGURATIONS[name].compression
    block_elements = compression.get("block_elements", 1024) if isinstance(compression, dict) else 1024
    states = [result[name] for result in exchanging(name, results_of("tensorflow", ranks, "gradients"))]
    assert_same_state(states, tensors, block_elements, states[0]["loss_scale"])


@by_case
def test_all_ranks_hold_identical_weights_afterwards(ranks: int, name: str) -> None:
    results = exchanging(name, results_of("tensorflow", ranks, "gradients"))
    first, *others = [result[name]["steps"][-1] for result in results]
    for other in others:
        for key in first:
            if key.startswith("weight") and key != f"weight {scenario.CONFIGURATIONS[name].local}":
                assert_same_bits(other[key], first[key], key)


def exchanging(name: str, results: list[Any]) -> list[Any]:
    """The results of the ranks that exchange gradients in a configuration."""
    return results[:max(1, len(results) // 2)] if scenario.CONFIGURATIONS[name].subset else results

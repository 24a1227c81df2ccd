"""TensorFlow and Keras: what real Horovod ranks compute is, bit for bit, what the simulation of all ranks computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .jobs import results_of, waits_for_the_job
from .scenarios import tensorflow_gradients as scenario
from .simulation import assert_same_bits

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
        scale = np.float32(result["loss_scale"])
        assert result["residuals"].keys() == tensors.keys()
        assert result["levels"].keys() == {tensor for tensor in tensors if len(tensors[tensor].levels)}
        for tensor, found in result["residuals"].items():
            assert_same_bits(found.reshape(-1) / scale, tensors[tensor].residuals[rank], f"residual {tensor}, {rank}")
        for tensor, found in result["levels"].items():
            assert_same_bits(found / scale, np.array(tensors[tensor].levels), f"levels {tensor}, {rank}")


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

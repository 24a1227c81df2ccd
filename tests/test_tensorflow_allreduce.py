"""TensorFlow: ``hvd.allreduce(compression=TwoBit)`` on real ranks is, bit for bit, the simulation of all ranks."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from .jobs import results_of, waits_for_the_job
from .scenarios import allreduce as scenario
from .simulation import assert_same_bits, assert_same_steps, simulated

tf = pytest.importorskip("tensorflow")
pytestmark = waits_for_the_job

UNSUPPORTED = r"UnsupportedOperationError: TwoBit cannot be used with op=hvd\.{}: two-bit codes can be summed"
SCATTER = r"UnsupportedOperationError: TwoBit cannot be used with hvd\.{}: .* cannot be split by the tensor's rows"
NO_DERIVATIVE = r"UnsupportedOperationError: a gradient is asked for through hvd\.allreduce.*tf\.stop_gradient"
MESSAGES = {
    "minimum_of_allreduce": UNSUPPORTED.format("Min"),
    "maximum_of_allreduce_in_a_function": UNSUPPORTED.format("Max"),
    "product_of_grouped_allreduce": UNSUPPORTED.format("Product"),
    "adasum_of_a_named_tensor": UNSUPPORTED.format("Adasum"),
    "maximum_of_keras": UNSUPPORTED.format("Max"),
    "maximum_by_a_function_imported_before": UNSUPPORTED.format("Max"),
    "minimum_by_a_grouped_function_imported_before": UNSUPPORTED.format("Min"),
    "reducescatter": SCATTER.format("reducescatter"),
    "grouped_reducescatter": SCATTER.format("grouped_reducescatter"),
    "reducescatter_imported_before": SCATTER.format("reducescatter"),
    "a_gradient_through_it": NO_DERIVATIVE,
    "a_gradient_through_a_function": NO_DERIVATIVE,
    "jit_compile": "UnsupportedOperationError: jit_compile=True",
    "one_name_for_two_tensors": r".*ResidualError: tensor 'two' is compressed again while an exchange of it is under",
    "one_name_for_two_shapes": r".*ResidualError: tensor 'shapes' has shape \(2001,\), but its residual was kept for",
    "a_name_in_an_optimizer": r"ConfigError: TwoBit\(.*\)\.named\('x'\) is for one tensor",
    "other_thresholds_on_one_rank": r".*PayloadError: tensor 'without a name, of shape \(2000,\)': the fingerprints of "
                                    r"2 ranks .* give TwoBit the same arguments on every rank",
}
SAME_AS = {"eagerly": "the bare class", "of unknown shape": "float64"}
CASES = ["the bare class", "fixed, average, a third before and seven behind", "asymmetrical, sum, a seventh before",
         "a group", "a group of bfloat16", "a process set", "float16", "bfloat16", "float64", "NaN on one rank",
         *SAME_AS]


@pytest.fixture(scope="module")
def results() -> list[Any]:
    """Every case in the job of 2 ranks; per rank."""
    return results_of("tensorflow", 2, "allreduce")


@pytest.mark.parametrize("name", CASES)
def test_allreduce_equals_the_simulation_of_all_ranks(name: str, results: list[Any]) -> None:
    case = scenario.CASES[SAME_AS.get(name, name)]
    # TensorFlow keeps Horovod's factors as attributes of the operation, in float32.
    wanted = scenario.expected(SAME_AS.get(name, name), len(results), np.float32)
    for rank, result in enumerate(results):
        assert result["cases"].keys() == set(CASES)
        found = result["cases"][name]
        assert (found is not None) == (rank in case.members(len(results)))
        for tensor, value in wanted.items() if found is not None else ():
            assert found[tensor]["dtype"] == case.dtype
            in_dtype = tf.cast(tf.cast(value, case.dtype), tf.float64).numpy()
            if value.size < case.min_elements:  # Added by Horovod, in an order of its own.
                assert np.allclose(found[tensor]["value"], in_dtype, rtol=1e-6)
            else:
                assert_same_bits(found[tensor]["value"], in_dtype, f"{tensor}, rank {rank}")


@pytest.mark.parametrize("name", ["adaptive", "asymmetrical, sum"])
def test_a_named_tensor_in_a_function_equals_the_simulation_for_20_steps(name: str, results: list[Any]) -> None:
    steps, tensor = scenario.expected_named(name, len(results))
    for rank, result in enumerate(results):
        found = result["named"][name]
        assert_same_steps(found["steps"], steps, f"rank {rank}")
        assert_same_bits(found["residual"].reshape(-1), tensor.residuals[rank], f"residual, rank {rank}")
        assert_same_bits(found["levels"], np.array(tensor.levels, np.float32), f"levels, rank {rank}")


@pytest.mark.parametrize("mistake", MESSAGES)
def test_every_rank_is_told_what_is_wrong(mistake: str, results: list[Any]) -> None:
    for result in results:
        assert result["mistakes"].keys() == MESSAGES.keys()
        assert re.match(MESSAGES[mistake], result["mistakes"][mistake], re.DOTALL), result["mistakes"][mistake]


def test_keras_allreduce_compresses_as_well(results: list[Any]) -> None:
    for result in results:
        assert (result["keras"] == 3).all()


def test_ranks_may_join_one_after_the_other() -> None:
    results = results_of("tensorflow", 2, "allreduce_join")
    for name in scenario.JOINING:
        wanted = scenario.expected_joining(name, 2, np.float32)
        for rank, result in enumerate(results):
            assert result["last"] == 0
            assert_same_steps(result["steps"][name], scenario.seen_by(rank, wanted), f"{name}, rank {rank}")


def test_tapes_go_on_while_others_have_joined_and_have_equal_levels_afterwards() -> None:
    wanted = scenario.joined_steps(simulated({}, range(2), 43 * 47), 2, 1 / 2)
    for rank, result in enumerate(results_of("tensorflow", 2, "allreduce_join")):
        assert_same_steps(result["tape"], scenario.seen_by(rank, wanted), f"rank {rank}")

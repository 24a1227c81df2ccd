"""TensorFlow and Keras: a variable has its own residual, and what Horovod offers around training goes on working."""

from __future__ import annotations

from typing import Any

import pytest

from .jobs import results_of, waits_for_the_job
from .scenarios.payloads import SHAPES, STEPS, TRANSPORTS
from .simulation import assert_same_bits

pytestmark = waits_for_the_job


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """What every scenario returned, per rank of two."""
    return results_of("tensorflow", 2, "variables")


@pytest.fixture(params=[0, 1], ids=["rank 0", "rank 1"])
def result(request: pytest.FixtureRequest, results: list[dict[str, Any]]) -> dict[str, Any]:
    return results[request.param]


def test_two_models_of_one_name_keep_their_own_residuals_on_tapes(result: dict[str, Any]) -> None:
    # 0.125, 0.25, 0.375 of the first; 0.25, 0.5 -> sent, 0.25 of the second. Each registry knows its own model only.
    assert result["two_models_of_one_name"] == [[0.0, {"kernel:0": 0.125}], [0.0, {"kernel:0": 0.25}],
                                                [0.0, {"kernel:0": 0.25}], [0.5, {"kernel:0": 0.0}],
                                                [0.0, {"kernel:0": 0.375}], [0.0, {"kernel:0": 0.25}]]


def test_two_tapes_in_one_function_may_exchange_variables_of_one_name(result: dict[str, Any]) -> None:
    assert result["two_tapes_in_one_step"] == [[0.0, 0.5], [0.5, 0.5], [0.0, 0.5], [0.5, 0.5]]


def test_two_optimizers_in_one_function_may_exchange_variables_of_one_name(result: dict[str, Any]) -> None:
    weights, residuals = result["two_optimizers_in_one_step"]
    assert weights == [[0.0, -0.5], [-0.5, -1.0], [-0.5, -1.5], [-1.0, -2.0]] and residuals == [0.0, 0.0]


def test_two_optimizers_that_accumulate_in_one_function_may_do_so_too(result: dict[str, Any]) -> None:
    weights, residuals = result["two_optimizers_accumulating_in_one_step"]
    assert weights == [[0.0, 0.0], [-0.5, -0.5], [-0.5, -0.5], [-1.0, -1.0]] and residuals == [0.0, 1.0]


def test_two_optimizers_never_share_residuals_though_they_share_an_instance(result: dict[str, Any]) -> None:
    assert result["an_instance_in_two_optimizers"] == [True, True]


def test_residuals_may_be_loaded_through_a_tape_before_the_first_step(result: dict[str, Any]) -> None:
    assert result["a_tape_before_its_first_step"] == 0.5


def test_a_source_that_is_no_variable_travels_uncompressed(result: dict[str, Any]) -> None:
    assert result["a_source_that_is_no_variable"] == 0.25


def test_generic_names_let_ranks_call_their_variables_differently(result: dict[str, Any]) -> None:
    assert result["generic_names"] == 0.5


def test_residuals_end_with_their_variables(result: dict[str, Any]) -> None:
    sent, names, nbytes = result["variables_that_end"]
    # The one that stays gathers 0.25 per step, new ones start at zero.
    assert sent == [[0.0, 0.0], [0.5, 0.0], [0.0, 0.0]]
    assert names == ["kept:0", "new:0"] and nbytes == 2 * 16 * 4


def test_a_loaded_model_goes_on_training_with_compression(results: list[dict[str, Any]]) -> None:
    first, second = (result["a_saved_model"] for result in results)
    assert first["iterations"] == second["iterations"] == 4
    assert first["residuals"] == second["residuals"] == ["dense/kernel:0"]
    for one, other in zip(first["weights"], second["weights"]):
        assert_same_bits(one, other, "weights")


def test_functions_may_be_run_eagerly_for_debugging(result: dict[str, Any]) -> None:
    assert result["functions_run_eagerly"] == [0.0, 0.5, 0.0]


def test_an_overflow_on_one_rank_skips_the_step_of_every_rank_and_poisons_no_residual(result: dict[str, Any]) -> None:
    found = result["the_optimizer_of_mixed_precision"]
    assert found["type"].startswith("LossScaleOptimizer") and found["scale"] == 2 ** 14
    assert found["same"] and found["finite"] and found["moved"] and found["residuals"] == [True]


def test_a_checkpoint_brings_back_everything(result: dict[str, Any]) -> None:
    found = result["a_checkpoint"]
    for one, other in zip(*found["weights"]):
        assert_same_bits(other, one, "weights")
    for kind in ("residuals", "levels"):
        one, other = found[kind]
        assert one.keys() == other.keys() == {"a/kernel:0", "b/kernel:0"}
        for name in one:
            assert_same_bits(other[name], one[name], f"{kind} {name}")


def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_changed(result: dict[str, Any]) -> None:
    found = result["a_checkpoint"]
    assert found["told"] == "the residual of tensor 'a/kernel:0' has shape (32, 64), but the tensor has shape (32, 65)"
    assert not found["changed"]


def test_traces_of_one_function_share_their_memory(result: dict[str, Any]) -> None:
    traces, gradients = result["traces_of_one_function"]
    # A second piece of memory may have been needed for the first time; ten traces would have kept ten.
    assert traces == 13 and gradients < 2


def test_nothing_is_left_of_functions_and_variables_that_end(result: dict[str, Any]) -> None:
    graphs, nbytes = result["traces_of_functions_that_end"]
    assert graphs == 0 and nbytes < 50_000  # TensorFlow itself keeps something of every trace.
    assert result["traces_of_eager_steps"] <= 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tensorflow_and_pytorch_send_the_same_bytes_for_the_same_gradients(
        transport: str, results: list[dict[str, Any]]) -> None:
    buckets = ["twobit.bias", "twobit.row", "twobit.wide", "twobit.wide.1024", "twobit.wide.2048"]
    collectives = {*buckets, *(name.replace("twobit", "twobit.sums") for name in buckets if transport == "sra")}
    for mine, theirs in zip(results, results_of("torch", 2, "payloads")):
        mine, theirs = mine["payloads"][transport], theirs[transport]
        assert mine["sent"].keys() == theirs["sent"].keys() == collectives
        for name in collectives:
            assert len(mine["sent"][name]) == len(theirs["sent"][name]) == STEPS - 1
            for found, wanted in zip(mine["sent"][name], theirs["sent"][name]):
                assert_same_bits(found, wanted, name)
        for found, wanted in zip(mine["reduced"], theirs["reduced"]):
            for name in SHAPES:
                assert_same_bits(found[name], wanted[name], f"reduced {name}")

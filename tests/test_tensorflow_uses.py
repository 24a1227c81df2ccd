"""TensorFlow and Keras: less usual ways to train send each gradient once, in the order of steps, on every rank.

Gradients are 0.25 and the threshold 0.5, if nothing else is said: 0.5 is sent in every second step, else 0.
"""

from __future__ import annotations

from typing import Any

import pytest

from .jobs import results_of, waits_for_the_job

pytestmark = waits_for_the_job

# The kernel of a model that Keras trains changes by minus what was sent.
EXPECTED: dict[str, Any] = {
    # 0.25, then 0.5; what is left of them is 0.25, and the next two add up to 1: twice 0.5.
    "a_function_called_twice_in_another": [[[0.0] * 3, [0.5] * 3], [[0.5] * 3, [0.5] * 3]],
    "a_function_traced_before": [0.0, 0.5, 0.0, 0.5, 0.0, 0.5, 0.0],
    "a_function_traced_in_another_trace": [[0.0, 0.0, 0.5], [0.0, 0.5, 0.5], [0.0, 0.0, 0.5]],
    "a_loop_that_adds_up": [1.0, 1.5],
    "a_loop_that_trains": [-2.5],
    "a_loop_over_a_dataset": [-1.5],
    "a_condition": [0.0, -1.0, 0.5, 0.0],
    # 0.25, 0.5, 0.25, 0.25
    "a_condition_of_two_exchanges": [0.0, 0.5, 0.5, 0.0],
    "several_tapes_added_up": [0.5, 1.0, 0.5],
    "a_variable_of_two_models": [[0.0, 0.0], [0.5, 0.0], [0.5, 0.0], [0.5]],
    "models_that_become_one": [[0.0, 0.0], [0.0], [0.5, 0.5, 0.5], [0.0]],
    "variables_created_later": [[0.0], [0.5, 0.0], [0.0, 0.5, 0.0]],
    # Both variables are in one bucket, which is summed where the step says so.
    "a_transport_that_changes": [[[0.0, 0.0], [0.5, 0.5]] * 3, ["sra"] * 3, 1],
    "a_model_as_an_argument": [0.0, 0.5],
    "several_steps_per_execution": -1.5,
    # The last two steps have gradients of 0.5 and 0.25.
    "fitted_again_and_again": [[0.0, -0.5, -0.5, -1.5], ["dense/kernel:0"]],
    "a_cloned_model": [0.0, -0.5, -0.5],
    "a_layer_used_twice": -0.5,
    "a_train_step_of_the_users_own": -1.0,
    # Gradients of 1/16 and a threshold of 3/32: nothing is sent, then 3/32 of 2/16; 1/32 is left, times a scale that
    # has become 8 or 128.
    "two_loss_scales": [[-3 / 32, 8.0, 8 / 32], [-3 / 32, 128.0, 128 / 32]],
    "two_loss_scales_eagerly": [[-3 / 32, 8.0, 8 / 32], [-3 / 32, 128.0, 128 / 32]],
    "two_losses_changed_after_they_were_scaled": True,
    "a_loss_changed_after_it_was_scaled": [-3 / 32, 8.0, 8 / 32],
    "an_unscaled_loss_beside_a_scaled_one": [[-3 / 32, 8.0, 8 / 32], [-3 / 32, None, 1 / 32]],
    "one_variable_in_mixed_precision": [[0.0, 0.5, 0.0, 0.5], 1],
}


@pytest.mark.parametrize("use", EXPECTED)
def test_every_gradient_is_sent_once_and_in_order(use: str) -> None:
    for result in results_of("tensorflow", 2, "uses"):
        assert result[use] == EXPECTED[use]


def test_statistics_go_to_tensorboard_on_rank_0() -> None:
    first, second = [result["statistics_for_tensorboard"] for result in results_of("tensorflow", 2, "uses")]
    nbytes = 2 * 8 + 2048 // 4  # Block table and codes.
    assert first == {f"{step} twobit/wide/kernel:0/{name}": value for step, exchanges in ((4, 3), (8, 7))
                     for name, value in (("compressed_exchanges", exchanges), ("nbytes", nbytes))}
    assert second == {}


def test_statistics_bear_the_number_of_the_step_that_an_execution_ended_with() -> None:
    found = results_of("tensorflow", 2, "uses")[0]["statistics_of_many_steps_per_execution"]
    # Executions end after 3, 6, 8, 11, 14 and 16 steps; an entry is written by the first that reaches a multiple of 4.
    assert {key: value for key, value in found.items() if "exchanges" in key} == {
        f"{step} twobit/wide/kernel:0/compressed_exchanges": step - 1.0 for step in (6, 8, 14, 16)}


def test_every_use_is_tested() -> None:
    assert results_of("tensorflow", 2, "uses")[0].keys() == {
        *EXPECTED, "statistics_for_tensorboard", "statistics_of_many_steps_per_execution"}

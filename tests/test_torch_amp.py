"""PyTorch: mixed precision with a real ``GradScaler`` on two real ranks equals the same training without one."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from .launcher import run_ranks
from .scenarios import torch_amp as scenario
from .simulation import assert_same_bits

MISTAKES = {
    "unscaled_before_synchronize": r"UnsupportedOperationError: the GradScaler would unscale gradients that are still "
                                    r"being exchanged: call optimizer\.synchronize\(\)",
    "another_scaler": r"ConfigError: the optimizer's step was called by another GradScaler",
    "loaded_at_another_scale": r"ConfigError: residuals of gradients that were multiplied by 1024 were loaded, and the "
                                r"first step's gradients were multiplied by 4: pass the scaler as TwoBit\(scaler=",
    "no_scaler": r"ConfigError: scaler must be a torch\.amp\.GradScaler, not 1024\.0",
}


@pytest.fixture(scope="module")
def results() -> list[Any]:
    """Every configuration in one job of two ranks; per rank."""
    return run_ranks(2, "tests.scenarios.torch_amp:run", names=list(scenario.CONFIGURATIONS))


@pytest.mark.parametrize("name", scenario.CONFIGURATIONS)
def test_every_rank_skips_the_steps_in_which_one_overflows(name: str, results: list[Any]) -> None:
    for result in results:
        assert [step for step, skipped in enumerate(result[name]["skipped"]) if skipped] == list(scenario.OVERFLOWS)


@pytest.mark.parametrize("name", scenario.CONFIGURATIONS)
def test_training_equals_one_without_a_scaler_bit_for_bit(name: str, results: list[Any]) -> None:
    weights, tensors = scenario.expected(name, len(results))
    for rank, result in enumerate(results):
        result = result[name]
        scale = np.float32(result["scale"])
        for step, (found, wanted) in enumerate(zip(result["weights"], weights)):
            for parameter in wanted:
                assert_same_bits(found[parameter], wanted[parameter], f"step {step}, rank {rank}, {parameter}")
        assert result["residuals"].keys() == result["levels"].keys() == tensors.keys()
        for parameter, tensor in tensors.items():
            assert_same_bits(result["residuals"][parameter].reshape(-1) / scale, tensor.residuals[rank], parameter)
            assert_same_bits(result["levels"][parameter] / scale, np.array(tensor.levels), parameter)


def test_the_scale_both_fell_and_grew(results: list[Any]) -> None:
    assert results[0]["adaptive levels"]["scale"] not in (scenario.INITIAL_SCALE, 1.0)


def test_mistakes_with_scalers_are_told_to_every_rank() -> None:
    for told in run_ranks(2, "tests.scenarios.torch_amp:mistakes"):
        assert told.keys() == MISTAKES.keys()
        for mistake, message in told.items():
            assert re.match(MISTAKES[mistake], message), message

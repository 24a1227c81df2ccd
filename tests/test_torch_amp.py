"""PyTorch: mixed precision with a real ``GradScaler`` on two real ranks equals the same training without one."""

from __future__ import annotations

import re
from typing import Any

import pytest

from .jobs import results_of, waits_for_the_job
from .scenarios import torch_amp as scenario

pytestmark = waits_for_the_job

UNSYNCHRONIZED = (r"UnsupportedOperationError: the GradScaler would unscale gradients that are still to be exchanged: "
                  r"call optimizer\.synchronize\(\)")
MISTAKES = {
    "unscaled_before_synchronize": UNSYNCHRONIZED,
    "unscaled_before_the_last_pass": UNSYNCHRONIZED,
    "stepped_before_synchronize_by_a_scaling_optimizer": UNSYNCHRONIZED,
    "synchronized_again_by_the_step": r"UnsupportedOperationError: the optimizer's step would exchange gradients that "
                                      r"the GradScaler has unscaled.*within `with optimizer\.skip_synchronize\(\):`",
    "another_scaler": r"ConfigError: the optimizer's step was called by another GradScaler",
    "loaded_at_another_scale": r"ConfigError: residuals of gradients that were multiplied by 2048 were loaded, and the "
                                r"first step's gradients were multiplied by 4: pass the scaler as TwoBit\(scaler=",
    "scaled_later": r"ConfigError: residuals of gradients that no GradScaler had multiplied were there before the "
                    r"first step of one, whose scale was 1024: .*follow_loss_scale\(scaler\.get_scale\(\)\)",
    "no_scaler": r"ConfigError: scaler must be a torch\.amp\.GradScaler, not 1024\.0",
}


@pytest.fixture(scope="module")
def results() -> list[Any]:
    """Every configuration in one job of two ranks; per rank."""
    return results_of("torch", 2, "amp")


@pytest.mark.parametrize("name", scenario.CONFIGURATIONS)
def test_every_rank_skips_the_steps_in_which_one_overflows(name: str, results: list[Any]) -> None:
    for result in results:
        assert [step for step, skipped in enumerate(result[name]["skipped"]) if skipped] == list(scenario.OVERFLOWS)


@pytest.mark.parametrize("name", scenario.CONFIGURATIONS)
def test_training_equals_one_without_a_scaler_bit_for_bit(name: str, results: list[Any]) -> None:
    scenario.assert_expected(name, [result[name] for result in results])


def test_the_scale_both_fell_and_grew(results: list[Any]) -> None:
    assert results[0]["adaptive levels"]["scale"] not in (scenario.INITIAL_SCALE, 1.0)


def test_mistakes_with_scalers_are_told_to_every_rank() -> None:
    for told in results_of("torch", 2, "amp_mistakes"):
        assert told.keys() == MISTAKES.keys()
        for mistake, message in told.items():
            assert re.match(MISTAKES[mistake], message), message

"""PyTorch: mixed precision with a real ``GradScaler`` on two real ranks equals the same training without one."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from hvd_twobit.residuals import ResidualRegistry
from hvd_twobit.torch.loss_scale import LossScale

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


def test_the_scale_is_read_when_it_may_have_changed_and_not_in_a_gradient_hook(
        monkeypatch: pytest.MonkeyPatch) -> None:
    residuals, scaler = ResidualRegistry(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss_scale = LossScale(residuals, scaler)
    loss_scale.follow()
    with monkeypatch.context() as patched:
        patched.setattr(scaler, "get_scale", lambda: pytest.fail("the device was waited for"))
        loss_scale.follow()
    scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0})
    assert residuals.loss_scale == 1024
    loss_scale.follow()
    assert residuals.loss_scale == 4
    scaler.scale(torch.ones(1))
    scaler.update(8.0)
    assert residuals.loss_scale == 8


def test_the_scale_of_a_scaler_that_changes_it_in_its_own_way_is_read_at_every_step() -> None:
    class Own(torch.amp.GradScaler):
        def update(self, new_scale: Any = None) -> None:
            self._init_scale *= 2

    residuals, scaler = ResidualRegistry(), Own("cpu", init_scale=2.0)
    loss_scale = LossScale(residuals, scaler)
    loss_scale.follow()
    scaler.update()
    loss_scale.follow()
    assert residuals.loss_scale == 4

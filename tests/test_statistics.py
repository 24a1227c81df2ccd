"""Statistics: what is counted and sampled, and the warning where a fixed threshold does not fit."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from hvd_twobit.codec import Codec
from hvd_twobit.config import TwoBitConfig
from hvd_twobit.memory import HOST
from hvd_twobit.residuals import ResidualRegistry
from hvd_twobit.statistics import TensorSummary

from .exchanges import decode, payload

ELEMENTS = 4096
SHAPE = (64, 64)


def exchange(steps: int, gradients: np.ndarray, **arguments: float) -> ResidualRegistry:
    """So many exchanges of one rank with itself."""
    registry = ResidualRegistry()
    one = Codec(TwoBitConfig.from_arguments(**arguments), registry)
    out = np.empty(ELEMENTS, np.float32)
    for step in range(steps):
        values = gradients[step % len(gradients)]
        if one.ready("layer.weight", SHAPE):
            decode(one, "layer.weight", SHAPE, payload(one, "layer.weight", SHAPE, values), 1, out, 1.0)
        else:
            one.observe("layer.weight", SHAPE, values, 1, 1.0)
    return registry


def noise(size: float) -> np.ndarray:
    return np.random.default_rng(0).normal(scale=size, size=(50, ELEMENTS)).astype(np.float32)


def test_nothing_is_told_of_a_tensor_before_its_first_exchange() -> None:
    registry = ResidualRegistry()
    registry.declare("w", (3,))
    assert registry.stats() == {}


def test_in_warm_up_a_tensor_sends_all_its_bytes() -> None:
    summary = exchange(2, noise(1), warmup_steps=5).stats()["layer.weight"]
    assert summary == TensorSummary(0, None, 0.0, 0.0, 0.0, 4 * ELEMENTS, 1.0)


def test_in_a_second_warm_up_nothing_is_told_of_the_codes_before_it() -> None:
    registry = exchange(3, noise(1))
    before = registry.stats()["layer.weight"]
    registry.forget_levels()
    one = Codec(TwoBitConfig.from_arguments(), registry)
    assert not one.ready("layer.weight", SHAPE)
    one.observe("layer.weight", SHAPE, noise(1)[0], 1, 1.0)
    summary = registry.stats()["layer.weight"]
    assert before.level is not None and before.nonzero_share > 0
    assert (summary.level, summary.nonzero_share, summary.ratio) == (None, 0.0, 1.0)
    assert summary.compressed_exchanges == before.compressed_exchanges == 2


def test_one_exchange_is_told_exactly() -> None:
    gradient = np.zeros(ELEMENTS, np.float32)
    gradient[:512] = [0.75, -0.75] * 256
    registry = exchange(1, gradient[None], threshold=0.5)
    nbytes = ELEMENTS // 4
    assert registry.stats() == {"layer.weight": TensorSummary(
        1, 0.5, 512 / ELEMENTS, HOST.norm(gradient), HOST.norm(gradient / 3), nbytes, 4 * ELEMENTS / nbytes)}
    assert registry.stats()["layer.weight"].residual_ratio == pytest.approx(1 / 3)


def test_adaptive_levels_are_told_as_their_mean_with_the_bytes_of_their_table() -> None:
    summary = exchange(2, noise(1)).stats()["layer.weight"]
    assert summary.compressed_exchanges == 1 and summary.nbytes == 4 * 8 + ELEMENTS // 4
    assert summary.level == pytest.approx(2 * np.abs(noise(1)[0]).mean(), rel=1e-5)
    assert 0.2 < summary.nonzero_share < 0.6


def test_norms_are_of_the_hundredth_exchange_then() -> None:
    gradients = np.ones((200, ELEMENTS), np.float32) * np.arange(1, 201, dtype=np.float32)[:, None]
    assert exchange(99, gradients, threshold=1.0).stats()["layer.weight"].gradient_norm == 64
    assert exchange(150, gradients, threshold=1.0).stats()["layer.weight"].gradient_norm == 6400
    assert exchange(200, gradients, threshold=1.0).stats()["layer.weight"].gradient_norm == 12800


def test_norms_do_not_overflow() -> None:
    assert HOST.norm(np.full(4, 1e38, np.float32)) == pytest.approx(2e38)


@pytest.mark.parametrize("threshold, size, problem", [
    (0.5, 1e-5, "has sent 0 of its codes in 100 steps: its fixed threshold of 0.5 is too high"),
    (1e-4, 1.0, "holds back more than 100 times its fixed threshold of 0.0001 in some elements: it is too low"),
])
def test_a_fixed_threshold_that_does_not_fit_is_told_once_by_name(
        threshold: float, size: float, problem: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hvd_twobit"):
        exchange(99, noise(size), threshold=threshold)
        assert not caplog.messages
        exchange(350, noise(size), threshold=threshold)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"hvd_twobit: tensor 'layer.weight' {problem}")
    fitting = 2 * np.abs(noise(size)[49]).mean()
    assert f"threshold={fitting:.4g} would fit them" in caplog.messages[0]


@pytest.mark.parametrize("threshold, size", [(0.5, 0.3), (0.5, 0.0), ("auto", 1e-5), ("auto", 1.0)])
def test_levels_that_fit_are_not_warned_of(threshold: float, size: float, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hvd_twobit"):
        exchange(250, noise(size), threshold=threshold)
    assert not caplog.messages


def test_the_ranks_that_shall_not_warn_do_not(caplog: pytest.LogCaptureFixture) -> None:
    one = Codec(TwoBitConfig.from_arguments(0.5), ResidualRegistry(), warns=False)
    for values in [*noise(1e-5)] * 3:
        payload(one, "w", SHAPE, values)
    assert not caplog.messages

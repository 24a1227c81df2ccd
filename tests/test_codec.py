"""The codec: what is encoded and decoded again is what the simulation of all ranks says, with memory that is kept."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_twobit.codec import Codec
from hvd_twobit.config import TwoBitConfig
from hvd_twobit.errors import PayloadError, ResidualError
from hvd_twobit.residuals import ResidualRegistry

from .simulation import SimulatedAdaptiveTensor, SimulatedTensor, assert_same_bits, gradient, uncompressed

SHAPE = (37, 61)
ELEMENTS = 37 * 61


@pytest.fixture(params=["numpy", "numba"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def codec(backend: str, positive: float = 0.5, negative: float = -0.5) -> tuple[Codec, ResidualRegistry]:
    registry = ResidualRegistry()
    return Codec(TwoBitConfig(positive, negative, 1024), registry, backend), registry


@pytest.mark.parametrize("thresholds", [[(0.5, -0.5)] * 3, [(0.5, -0.25)] * 3, [(0.5, -0.5), (0.1, -0.1), (0.3, -2.0)]])
def test_three_ranks_exchange_what_the_simulation_says(backend: str, thresholds: list[tuple[float, float]]) -> None:
    simulated = SimulatedTensor(thresholds, ELEMENTS)
    ranks = [codec(backend, *pair) for pair in thresholds]
    out = np.empty(ELEMENTS, np.float32)
    for step in range(5):
        gradients = [gradient(1, rank, step, "w", SHAPE) for rank in range(3)]
        gathered = np.concatenate([ranks[rank][0].encode("w", SHAPE, gradients[rank].reshape(-1)) for rank in range(3)])
        wanted = simulated.step(gradients, 1 / 3)
        for rank, (one, registry) in enumerate(ranks):
            one.decode("w", SHAPE, gathered, 3, out, 1 / 3)
            np.testing.assert_array_equal(out.view(np.uint32), wanted.view(np.uint32))
            np.testing.assert_array_equal(registry["w"].reshape(-1).view(np.uint32),
                                          simulated.residuals[rank].view(np.uint32))


def test_a_step_allocates_nothing_of_the_gradients_size() -> None:
    one, _ = codec("numba")
    values = gradient(1, 0, 0, "w", (1 << 20,))
    out = np.empty_like(values)

    def step() -> None:
        one.decode("w", values.shape, one.encode("w", values.shape, values), 1, out, 1.0)

    step()
    tracemalloc.start()
    step()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < values.nbytes // 64


def test_the_payload_of_a_tensor_is_the_same_memory_at_every_step(backend: str) -> None:
    one, _ = codec(backend)
    values = gradient(1, 0, 0, "w", SHAPE).reshape(-1)
    assert one.encode("w", SHAPE, values) is one.encode("w", SHAPE, values)
    assert one.encode("w", SHAPE, values) is not one.encode("v", SHAPE, values)


def test_small_tensors_are_not_compressed(backend: str) -> None:
    one, _ = codec(backend)
    assert one.compresses(1024) and not one.compresses(1023)


def test_a_changed_shape_is_an_error_before_anything_changes(backend: str) -> None:
    one, registry = codec(backend)
    one.encode("w", SHAPE, gradient(1, 0, 0, "w", SHAPE).reshape(-1))
    before = registry["w"].copy()
    with pytest.raises(ResidualError, match="'w' has shape"):
        one.encode("w", (61, 37), np.ones(ELEMENTS, np.float32))
    np.testing.assert_array_equal(registry["w"], before)


def test_after_a_reset_a_name_may_have_another_shape(backend: str) -> None:
    one, registry = codec(backend)
    one.encode("w", SHAPE, np.ones(ELEMENTS, np.float32))
    registry.reset()
    out = np.empty(7, np.float32)
    one.decode("w", (7,), one.encode("w", (7,), np.ones(7, np.float32)), 1, out, 1.0)
    assert (out == 0.5).all() and (registry["w"] == 0.5).all()


def test_foreign_bytes_leave_the_gradient_alone(backend: str) -> None:
    one, _ = codec(backend)
    out = np.full(ELEMENTS, 3, np.float32)
    with pytest.raises(PayloadError, match="tensor 'w': the payload of rank 0 begins with"):
        one.decode("w", SHAPE, np.zeros(one.encode("w", SHAPE, out).size, np.uint8), 1, out, 1.0)
    assert (out == 3).all()


def adaptive(backend: str, **arguments: Any) -> tuple[Codec, ResidualRegistry]:
    registry = ResidualRegistry()
    return Codec(TwoBitConfig.from_arguments(**arguments), registry, backend), registry


def exchange(ranks: Sequence[Codec], gradients: Sequence[np.ndarray], scale: float) -> np.ndarray:
    """One exchange of a tensor, compressed or not; what all ranks received."""
    shape, flat = gradients[0].shape, [gradient.reshape(-1) for gradient in gradients]
    out = np.empty(gradients[0].size, np.float32)
    if not ranks[0].ready("w", shape):
        assert not any(rank.ready("w", shape) for rank in ranks)
        out[:] = uncompressed(flat, scale)
        for rank in ranks:
            rank.observe("w", shape, out, len(ranks), scale)
        return out
    gathered = np.concatenate([rank.encode("w", shape, values) for rank, values in zip(ranks, flat)])
    for rank in ranks:
        rank.decode("w", shape, gathered, len(ranks), out, scale)
    return out


@pytest.mark.parametrize("elements", [0, 1, 16, 1024, 1025, 4000])
@pytest.mark.parametrize("block_elements", [16, 1024])
def test_adaptive_levels_are_those_of_the_simulation(elements: int, block_elements: int) -> None:
    made = [adaptive(backend, min_elements=0, block_elements=block_elements, warmup_steps=1)
            for backend in ("numpy", "numba", "numba")]
    simulated = SimulatedAdaptiveTensor(3, elements, 1, block_elements)
    sizes = np.float32([1, 1, 1, 1, 2.0**20, 2.0**20, 1, 2.0**-20, 2.0**-20, 0, 0, 1])
    for step, size in enumerate(sizes):
        gradients = [gradient(1, rank, step, "w", (elements,)) * size for rank in range(3)]
        assert_same_bits(exchange([one for one, _ in made], gradients, 1 / 3), simulated.step(gradients, 1 / 3), "sum")
        for rank, (_, registry) in enumerate(made):
            assert_same_bits(registry.tensor("w", (elements,)).levels, np.array(simulated.levels), f"levels, {step}")
            if step > 1:
                assert_same_bits(registry["w"], simulated.residuals[rank], f"residual, {step}")


def test_levels_of_ranks_with_other_gradients_are_the_same_bits() -> None:
    made = [adaptive("numba") for _ in range(3)]
    for step in range(30):
        exchange([one for one, _ in made], [gradient(1, rank, step, "w", SHAPE) * np.float32(10.0**rank)
                                            for rank in range(3)], 1 / 3)
        levels = [registry.tensor("w", SHAPE).levels for _, registry in made]
        assert_same_bits(levels[1], levels[0], "levels")
        assert_same_bits(levels[2], levels[0], "levels")


def levels_after(gradients: Sequence[np.ndarray], ranks: int = 1) -> list[np.ndarray]:
    """The levels after each step, of ranks with the same gradients."""
    made = [adaptive("numba") for _ in range(ranks)]
    levels = []
    for values in gradients:
        with np.errstate(over="ignore", invalid="ignore"):
            exchange([one for one, _ in made], [values] * ranks, 1 / ranks)
        if (found := made[0][1].tensor("w", values.shape).levels) is not None:
            levels.append(found)
    return levels


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 1e-45, 1e-38, 1e-6, 1.0, 1e6, 1e30, 3e38]), st.integers(0, 3)),
                min_size=2, max_size=30))
def test_levels_are_finite_and_above_zero_whatever_the_gradients(steps: list[tuple[float, int]]) -> None:
    gradients = []
    for step, (size, not_finite) in enumerate(steps):
        values = gradient(1, 0, step, "w", (1500,)).clip(-1, 1) * np.float32(size)
        values[:not_finite] = [np.nan, np.inf, -np.inf][:not_finite]
        gradients.append(values)
    for levels in levels_after(gradients, 2):
        assert (levels > 0).all() and np.isfinite(levels).all()


def test_levels_follow_gradients_that_become_a_million_times_larger_within_two_steps() -> None:
    gradients = [gradient(1, 0, step, "w", SHAPE) * np.float32(1e6 if step >= 10 else 1) for step in range(14)]
    levels = levels_after(gradients)
    assert levels[9].max() < 10 and levels[11].min() > 1e5


def test_after_zeros_for_many_steps_large_gradients_are_sent_within_three_steps() -> None:
    one, registry = adaptive("numba")
    zeros, ones = np.zeros(SHAPE, np.float32), np.ones(SHAPE, np.float32)
    for _ in range(100):
        assert not exchange([one], [zeros], 1.0).any()
    received = [exchange([one], [ones], 1.0) for _ in range(3)]
    assert (sum(received) == 3).all() and not registry["w"].any()


def test_gradients_that_are_not_finite_tell_nothing_of_the_next_ones() -> None:
    one, registry = adaptive("numba")
    values = np.ones(SHAPE, np.float32)
    values[0, 0] = np.inf
    exchange([one], [values], 1.0)
    assert not one.ready("w", SHAPE) and registry.tensor("w", SHAPE).levels is None
    exchange([one], [np.ones(SHAPE, np.float32)], 1.0)
    assert one.ready("w", SHAPE) and (registry.tensor("w", SHAPE).levels == 2).all()


def test_levels_of_another_step_are_noticed_and_named() -> None:
    made = [adaptive("numba"), adaptive("numba")]
    for step in range(3):
        exchange([one for one, _ in made], [gradient(1, rank, step, "w", SHAPE) for rank in range(2)], 0.5)
    made[1][1].scale(2.0)
    with pytest.raises(PayloadError, match="'w': the payload of rank 1 has a levels_checksum of 0x.* on every rank$"):
        exchange([one for one, _ in made], [gradient(1, rank, 3, "w", SHAPE) for rank in range(2)], 0.5)


def test_levels_in_the_unit_of_another_loss_scale_are_told_with_the_scale() -> None:
    made = [adaptive("numba"), adaptive("numba")]
    for step in range(2):
        exchange([one for one, _ in made], [gradient(1, rank, step, "w", SHAPE) for rank in range(2)], 0.5)
    for (_, registry), loss_scale in zip(made, (8.0, 16.0)):
        registry.follow_loss_scale(loss_scale)
    with pytest.raises(PayloadError, match="levels_checksum.*; this rank's loss scale is 8, and has to be the same"):
        exchange([one for one, _ in made], [gradient(1, rank, 3, "w", SHAPE) for rank in range(2)], 0.5)


def test_levels_of_blocks_of_another_size_are_refused_when_they_are_used() -> None:
    one, registry = adaptive("numba", block_elements=512)
    exchange([one], [np.ones(SHAPE, np.float32)], 1.0)
    other = Codec(TwoBitConfig(), registry)
    with pytest.raises(ResidualError, match="'w' has 5 levels, but 2257 elements in blocks of 1024 take 3"):
        other.ready("w", SHAPE)


def test_a_resumed_rank_goes_on_bit_for_bit() -> None:
    one, registry = adaptive("numba")
    for step in range(5):
        exchange([one], [gradient(1, 0, step, "w", SHAPE)], 1.0)
    other, resumed = adaptive("numba")
    resumed.load_state_dict(registry.state_dict())
    for step in range(5, 10):
        values = gradient(1, 0, step, "w", SHAPE)
        assert_same_bits(exchange([other], [values], 1.0), exchange([one], [values], 1.0), f"step {step}")


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_an_undone_step_leaves_the_rank_as_it_was(steps_before: int) -> None:
    one, registry = adaptive("numba")
    registry.can_undo = True
    for step in range(steps_before):
        exchange([one], [gradient(1, 0, step, "w", SHAPE)], 1.0)
    before = registry.state_dict()
    registry.begin_step()
    exchange([one], [gradient(1, 0, steps_before, "w", SHAPE)], 1.0)
    registry.undo_step()
    after = registry.state_dict()
    assert after["uncompressed_steps"] == before["uncompressed_steps"]
    for part in ("residuals", "levels"):
        assert after[part].keys() == before[part].keys()
        for name in before[part]:
            assert_same_bits(after[part][name], before[part][name], part)


def test_a_fixed_threshold_is_in_the_unit_of_the_gradient_before_it_is_scaled() -> None:
    one, registry = codec("numba", 0.5, -0.25)
    values = gradient(1, 0, 0, "w", SHAPE).reshape(-1)
    plain, _ = codec("numba", 0.5, -0.25)
    registry.follow_loss_scale(1024.0)
    out, wanted = np.empty((2, ELEMENTS), np.float32)
    one.decode("w", SHAPE, one.encode("w", SHAPE, values * 1024), 1, out, 1.0)
    plain.decode("w", SHAPE, plain.encode("w", SHAPE, values), 1, wanted, 1.0)
    assert_same_bits(out / 1024, wanted, "sum")


@pytest.mark.parametrize("loss_scale", [2.0 ** 127, 2.0 ** -126])
def test_a_fixed_threshold_stays_usable_at_any_loss_scale(loss_scale: float) -> None:
    one, registry = codec("numba", 1e20, -1e-30)
    registry.follow_loss_scale(loss_scale)
    out = np.empty(ELEMENTS, np.float32)
    one.decode("w", SHAPE, one.encode("w", SHAPE, np.ones(ELEMENTS, np.float32)), 1, out, 1.0)

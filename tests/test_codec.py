"""The codec: what is encoded and decoded again is what the simulation of all ranks says, with memory that is kept."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_twobit import kernels
from hvd_twobit.buckets import Bucket, Part, plan
from hvd_twobit.codec import Codec
from hvd_twobit.config import TRANSPORTS, TwoBitConfig
from hvd_twobit.errors import PayloadError, ResidualError
from hvd_twobit.residuals import ResidualRegistry

from .backends import DEFINITION, ON_ARRAYS
from .exchanges import arrived, bucket_of, decode, payload
from .simulation import SimulatedAdaptiveTensor, SimulatedTensor, assert_same_bits, gradient, uncompressed

SHAPE = (37, 61)
ELEMENTS = 37 * 61


@pytest.fixture(params=ON_ARRAYS)
def backend(request: pytest.FixtureRequest) -> str:
    """The name of each kernel backend that takes arrays in turn."""
    return request.param


def codec(backend: str, positive: float = 0.5, negative: float = -0.5) -> tuple[Codec, ResidualRegistry]:
    registry = ResidualRegistry()
    return Codec(TwoBitConfig(positive, negative, 1024), registry, backend), registry


@pytest.mark.parametrize("thresholds", [[(0.5, -0.5)] * 3, [(0.5, -0.25)] * 3, [(0.5, -0.5), (0.1, -0.1), (0.3, -2.0)]])
@pytest.mark.parametrize("transport", ["allgather", "sra"])
def test_three_ranks_exchange_what_the_simulation_says(backend: str, thresholds: list[tuple[float, float]],
                                                       transport: str) -> None:
    shapes = {"w": SHAPE, "tiny": (3,), "empty": (0, 2), "v": (1500,)}
    simulated = {name: SimulatedTensor(thresholds, int(np.prod(shape))) for name, shape in shapes.items()}
    ranks = [codec(backend, *pair) for pair in thresholds]
    for step in range(5):
        gradients = [{name: gradient(1, rank, step, name, shape) for name, shape in shapes.items()}
                     for rank in range(3)]
        gradients[1]["w"][3, 5] = np.nan
        wanted = {name: tensor.step([of_rank[name] for of_rank in gradients], 1 / 3)
                  for name, tensor in simulated.items()}
        contents = arrived([one for one, _ in ranks], bucket_of(gradients[0]), gradients, transport)
        for rank, ((one, registry), received) in enumerate(zip(ranks, contents)):
            for name, tensor in simulated.items():
                out = np.empty(wanted[name].size, np.float32)
                one.decode(received, name, out, 1 / 3)
                assert_same_bits(out, wanted[name], name)
                assert_same_bits(registry[name].reshape(-1), tensor.residuals[rank], f"residual {name}")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_tensor_that_is_cut_into_buckets_is_the_same_as_a_whole_one(transport: str) -> None:
    whole, cut = ([adaptive("numba", min_elements=0, block_elements=64) for _ in range(5)] for _ in range(2))
    values = [gradient(1, rank, 0, "w", (2000,)) for rank in range(5)]
    for one, _ in [*whole, *cut]:
        one.observe("w", (2000,), values[0], 5, 0.2)
    wanted, found = np.empty((2, 2000), np.float32)
    for step in range(1, 6):
        values = [gradient(1, rank, step, "w", (2000,)) for rank in range(5)]
        for received, (one, _) in zip(arrived([one for one, _ in whole], bucket_of({"w": values[0]}),
                                              [{"w": value} for value in values], "allgather"), whole):
            one.decode(received, "w", wanted, 0.2)
        buckets = plan([("w", (2000,))], 300, 64)
        assert len(buckets) == 9
        contents = [arrived([one for one, _ in cut], bucket, [{"w": value} for value in values], transport)
                    for bucket in buckets]
        for rank, (one, registry) in enumerate(cut):
            for received in contents:
                one.decode(received[rank], "w", found, 0.2)
            assert_same_bits(found, wanted, "sum")
            assert_same_bits(registry["w"], whole[rank][1]["w"], "residual")
            assert_same_bits(registry.tensor("w", (2000,)).levels, whole[rank][1].tensor("w", (2000,)).levels, "levels")
        for name in ("compressed_exchanges", "nonzero_share", "level", "residual_norm"):
            assert len({getattr(registry.stats()["w"], name) for _, registry in (whole[0], cut[0])}) == 1


@pytest.mark.parametrize("thresholds, form", [([(0.5, -0.5)] * 3, "counts"), ([(0.5, -0.25)] * 3, "counts"),
                                              ([(0.5, -0.5), (0.1, -0.1), (0.3, -2.0)], "sums")])
@pytest.mark.parametrize("transports", [("allgather", "sra"), ("sra", "allgather"), ("sra", "sra")])
def test_pieces_of_a_tensor_that_travelled_apart_get_one_form_of_the_same_values(
        thresholds: list[tuple[float, float]], form: str, transports: tuple[str, str]) -> None:
    codecs = [codec("numba", *pair)[0] for pair in thresholds]
    gradients = [{"w": gradient(1, rank, 0, "w", (2500,))} for rank in range(3)]
    gradients[2]["w"][1100] = np.nan
    buckets = [Bucket((Part("w", (2500,), *bounds),)) for bounds in ((0, 1024), (1024, 2500))]
    contents = [arrived(codecs, bucket, gradients, transport)[0] for bucket, transport in zip(buckets, transports)]
    wanted, found = np.empty((2, 2500), np.float32)
    for received in contents:
        codecs[0].decode(received, "w", wanted, 1 / 3)
    for piece in codecs[0].alike([piece for received in contents for piece in codecs[0].pieces(received, "w")]):
        assert [name for name in ("codes", "counts", "sums") if getattr(piece, name) is not None] == [form]
        out = found[piece.part.start:piece.part.stop]
        if piece.counts is not None:
            assert piece.levels.shape[0] == 1
            DEFINITION.unpack_counts(piece.counts, piece.bits, piece.levels[0], piece.block_elements, out, 1 / 3)
        elif piece.sums is not None:
            out[:] = piece.sums.astype(np.float64) / 3
    assert np.count_nonzero(wanted) > 100
    assert_same_bits(found, wanted, "gradient")


def test_a_step_allocates_nothing_of_the_gradients_size() -> None:
    one, _ = codec("numba")
    values = gradient(1, 0, 0, "w", (1 << 20,))
    out = np.empty_like(values)
    layout = one.layout(Bucket.of("w", values.shape), 1)
    payloads = layout.new()

    def step() -> None:
        one.encode(layout, payloads, "w", values)
        one.seal(layout, payloads)
        one.decode(one.receive(layout, payloads, 1), "w", out, 1.0)

    step()
    tracemalloc.start()
    step()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < values.nbytes // 64


def test_small_tensors_are_not_compressed(backend: str) -> None:
    one, _ = codec(backend)
    assert one.compresses(1024) and not one.compresses(1023)


def test_a_changed_shape_is_an_error_before_anything_changes(backend: str) -> None:
    one, registry = codec(backend)
    payload(one, "w", SHAPE, gradient(1, 0, 0, "w", SHAPE).reshape(-1))
    before = registry["w"].copy()
    with pytest.raises(ResidualError, match="'w' has shape"):
        payload(one, "w", (61, 37), np.ones(ELEMENTS, np.float32))
    np.testing.assert_array_equal(registry["w"], before)


def test_after_a_reset_a_name_may_have_another_shape(backend: str) -> None:
    one, registry = codec(backend)
    payload(one, "w", SHAPE, np.ones(ELEMENTS, np.float32))
    registry.reset()
    out = np.empty(7, np.float32)
    decode(one, "w", (7,), payload(one, "w", (7,), np.ones(7, np.float32)), 1, out, 1.0)
    assert (out == 0.5).all() and (registry["w"] == 0.5).all()


def test_foreign_bytes_leave_the_gradient_alone(backend: str) -> None:
    one, _ = codec(backend)
    out = np.full(ELEMENTS, 3, np.float32)
    with pytest.raises(PayloadError, match="tensor 'w': the payload of rank 0 begins with"):
        decode(one, "w", SHAPE, np.zeros(payload(one, "w", SHAPE, out).size, np.uint8), 1, out, 1.0)
    assert (out == 3).all()


def adaptive(backend: str, **arguments: Any) -> tuple[Codec, ResidualRegistry]:
    registry = ResidualRegistry()
    return Codec(TwoBitConfig.from_arguments(**arguments), registry, backend), registry


def exchange(ranks: Sequence[Codec], gradients: Sequence[np.ndarray], scale: float,
             transport: str = "allgather") -> np.ndarray:
    """One exchange of a tensor, compressed or not; what all ranks received."""
    shape, flat = gradients[0].shape, [gradient.reshape(-1) for gradient in gradients]
    out = np.empty(gradients[0].size, np.float32)
    if not ranks[0].ready("w", shape):
        assert not any(rank.ready("w", shape) for rank in ranks)
        out[:] = uncompressed(flat, scale)
        for rank in ranks:
            rank.observe("w", shape, out, len(ranks), scale)
        return out
    for rank, contents in zip(ranks, arrived(ranks, bucket_of({"w": gradients[0]}),
                                             [{"w": values} for values in gradients], transport)):
        rank.decode(contents, "w", out, scale)
    return out


@pytest.mark.parametrize("elements", [0, 1, 16, 1024, 1025, 4000])
@pytest.mark.parametrize("block_elements", [16, 1024])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_adaptive_levels_are_those_of_the_simulation(elements: int, block_elements: int, transport: str) -> None:
    made = [adaptive(backend, min_elements=0, block_elements=block_elements, warmup_steps=1)
            for backend in (*ON_ARRAYS, kernels.DEFAULT_BACKEND)]
    ranks = len(made)
    simulated = SimulatedAdaptiveTensor(ranks, elements, 1, block_elements)
    sizes = np.float32([1, 1, 1, 1, 2.0**20, 2.0**20, 1, 2.0**-20, 2.0**-20, 0, 0, 1])
    for step, size in enumerate(sizes):
        gradients = [gradient(1, rank, step, "w", (elements,)) * size for rank in range(ranks)]
        found = exchange([one for one, _ in made], gradients, 1 / ranks, transport)
        assert_same_bits(found, simulated.step(gradients, 1 / ranks), "sum")
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
    decode(one, "w", SHAPE, payload(one, "w", SHAPE, values * 1024), 1, out, 1.0)
    decode(plain, "w", SHAPE, payload(plain, "w", SHAPE, values), 1, wanted, 1.0)
    assert_same_bits(out / 1024, wanted, "sum")


@pytest.mark.parametrize("loss_scale", [2.0 ** 127, 2.0 ** -126])
def test_a_fixed_threshold_stays_usable_at_any_loss_scale(loss_scale: float) -> None:
    one, registry = codec("numba", 1e20, -1e-30)
    registry.follow_loss_scale(loss_scale)
    out = np.empty(ELEMENTS, np.float32)
    decode(one, "w", SHAPE, payload(one, "w", SHAPE, np.ones(ELEMENTS, np.float32)), 1, out, 1.0)

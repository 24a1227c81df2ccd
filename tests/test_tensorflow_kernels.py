"""The kernels as operations of TensorFlow: on the CPU device, plain and compiled by XLA, the reference's bits.

Both are called in threads that flush subnormal numbers (the first test says so), with shapes that are not known before.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_twobit.kernels import Quantizer, block_count, count_bits, counts_nbytes, packed_nbytes, reference
from hvd_twobit.tensorflow import kernels

from .simulation import assert_same_bits
from .test_kernels import any_floats, any_levels

SMALLEST = np.float32(1e-45)
SCALES = [1.0, 0.5, 1 / 3, -2.5, 1e-40, 1e40, 0.0]

# XLA takes a second to compile for new shapes, so there are few of these.
by_xla_or_not = pytest.mark.parametrize("by_xla, sizes", [
    (False, st.tuples(st.one_of(st.integers(0, 100), st.integers(0, 5000)), st.sampled_from([16, 48, 1024, 2048,
                                                                                             10**6]))),
    (True, st.sampled_from([(1, 16), (2500, 1024), (2100, 10**6)]))], ids=["plain", "xla"])
"""Calls a test with operations as they are, and with those that XLA compiles; and with sizes to draw from."""


def around_limits(random: np.random.Generator, elements: int) -> np.ndarray:
    """Numbers whose sums are halves of a last place, around those where another way to add begins."""
    exponent = random.integers(0, 60, elements, np.uint32)
    mantissa = random.choice(np.array([0, 1, 2, 3, 0x400000, 0x7FFFFE, 0x7FFFFF], np.uint32), elements)
    sign = random.integers(0, 2, elements, np.uint32)
    return (sign << 31 | exponent << 23 | mantissa).astype(np.uint32).view(np.float32)


def test_threads_of_tensorflow_flush_subnormal_numbers() -> None:
    subnormal = tf.constant([1e-40, 1e-40])
    assert not tf.function(lambda: tf.reduce_any(tf.map_fn(lambda value: value * 1.0, subnormal) > 0))()


@by_xla_or_not
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), kind=st.sampled_from([any_floats, around_limits]))
@settings(deadline=None, max_examples=100)
def test_quantize_pack_is_that_of_the_reference(by_xla: bool, sizes: st.SearchStrategy, data: st.DataObject, seed: int,
                                                kind: Callable[..., np.ndarray]) -> None:
    elements, block_elements = data.draw(sizes)
    random = np.random.default_rng(seed)
    parts = any_levels(random, (4, block_count(elements, block_elements)))
    if random.random() < 0.3:
        parts *= np.float32(1e-42)
    parts[:2] = np.where(parts[:2] == 0, SMALLEST, parts[:2])
    quantizer = Quantizer(block_elements, parts[0], -parts[1], parts[2], -parts[3])
    gradient, residual = kind(random, elements), kind(random, elements)

    packed, left = np.empty(packed_nbytes(elements), np.uint8), residual.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        selected_sum, selected_count = reference.quantize_pack(gradient, left, packed, quantizer)
        blocks = [slice(start, start + block_elements) for start in range(0, max(1, elements), block_elements)]
        unselected_sum = np.array([0 if count else reference.sum_in_lanes(np.abs(left[block]))
                                   for block, count in zip(blocks, selected_count)], np.float32)
    found = kernels.traced(kernels.quantize_pack, by_xla, block_elements=block_elements)(
        tf.constant(gradient), tf.constant(residual), tf.constant(np.stack([parts[0], -parts[1]], axis=-1)),
        tf.constant(np.stack([parts[2], -parts[3]], axis=-1)))
    assert found[0].numpy().tobytes() == packed.tobytes()
    assert_same_bits(found[1].numpy(), left, "residual")
    assert_same_bits(found[2].numpy(), selected_sum, "selected_sum")
    assert found[3].numpy().tolist() == selected_count.tolist()
    assert_same_bits(found[4].numpy(), unselected_sum, "unselected_sum")


def test_sums_that_nobody_wants_are_zeros() -> None:
    *_, selected_sum, count, unselected_sum = kernels.quantize_pack(
        tf.ones([40]), tf.zeros([40]), *[tf.constant([[0.5, -0.5]] * 3)] * 2, block_elements=16, with_sums=False)
    assert (selected_sum.numpy().tolist(), unselected_sum.numpy().tolist()) == ([0.0] * 3, [0.0] * 3)
    assert count.numpy().tolist() == [16, 16, 8]


@by_xla_or_not
@given(data=st.data(), ranks=st.sampled_from([1, 2, 5]), kind=st.sampled_from(["one", "equal", "differ", "mixed"]),
       symmetric=st.booleans(), scale=st.sampled_from(SCALES), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=100)
def test_unpack_sum_is_that_of_the_reference(by_xla: bool, sizes: st.SearchStrategy, data: st.DataObject, ranks: int,
                                             kind: str, symmetric: bool, scale: float, seed: int) -> None:
    elements, block_elements = data.draw(sizes)
    random = np.random.default_rng(seed)
    blocks = block_count(elements, block_elements)
    levels = any_levels(random, (ranks, blocks, 2)) * np.float32([1, -1])
    levels[np.isnan(levels)] = 1
    equal = random.random(blocks) < {"one": 1, "equal": 1, "differ": 0, "mixed": 0.5}[kind]
    levels[:, equal] = levels[:1, equal]
    if symmetric:
        levels[..., 1] = -levels[..., 0]
    packed = random.integers(0, 256, (ranks, packed_nbytes(elements)), np.uint8)
    packed &= 0b10101010 | packed >> np.uint8(1) & np.uint8(0xFF if random.random() < 0.5 else 0b10101010)
    wanted = np.empty(elements, np.float32)
    reference.unpack_sum(packed, levels, block_elements, wanted, scale)
    given_levels = levels[:1] if kind == "one" else levels
    found = kernels.traced(kernels.unpack_sum, by_xla, block_elements=block_elements, levels_of_all=kind == "one")(
        tf.constant(packed), tf.constant(given_levels), tf.constant(elements), tf.constant(scale, tf.float64))
    assert_same_bits(found.numpy(), wanted, f"{kind} levels")


@by_xla_or_not
@given(data=st.data(), ranks=st.sampled_from([2, 8, 200]), planes=st.sampled_from([1, 2]), symmetric=st.booleans(),
       scale=st.sampled_from(SCALES), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=100)
def test_unpack_counts_is_that_of_the_reference(by_xla: bool, sizes: st.SearchStrategy, data: st.DataObject, ranks: int,
                                                planes: int, symmetric: bool, scale: float, seed: int) -> None:
    elements, block_elements = data.draw(sizes)
    random = np.random.default_rng(seed)
    levels = any_levels(random, (block_count(elements, block_elements), 2)) * np.float32([1, -1])
    if symmetric or planes == 1:
        levels[:, 1] = -levels[:, 0]
    bits = count_bits(ranks)
    counts = random.integers(0, 256, (planes, counts_nbytes(packed_nbytes(elements) // 4, bits)), np.uint8)
    wanted = np.empty(elements, np.float32)
    reference.unpack_counts(counts, bits, levels, block_elements, wanted, scale)
    found = kernels.traced(kernels.unpack_counts, by_xla, bits=bits, block_elements=block_elements)(
        tf.constant(counts), tf.constant(levels), tf.constant(elements), tf.constant(scale, tf.float64))
    assert_same_bits(found.numpy(), wanted, f"counts of {bits} bits")


@pytest.mark.parametrize("by_xla", [False, True], ids=["plain", "xla"])
def test_sums_of_other_ranks_are_scaled_in_float64_and_rounded_once(by_xla: bool) -> None:
    random = np.random.default_rng(5)
    sums = np.concatenate([any_floats(random, 5000), around_limits(random, 5000)])
    call = kernels.traced(kernels.scaled, by_xla)
    for scale in SCALES:
        with np.errstate(over="ignore", invalid="ignore"):
            wanted = (sums.astype(np.float64) * scale).astype(np.float32)
        assert_same_bits(call(tf.constant(sums), tf.constant(scale, tf.float64)).numpy(), wanted, f"times {scale}")

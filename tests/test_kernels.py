"""The kernels: the rule on small examples, for every backend; then the others against NumPy's, to the bit."""

from __future__ import annotations

import dataclasses
import types

import numpy as np
import pytest
from hypothesis import strategies as st

from hvd_twobit import kernels
from hvd_twobit.kernels import Quantizer, block_count, packed_nbytes

from .backends import BACKENDS, DEFINITION, OTHERS, holds_for

MARGIN = 64
SPECIAL = np.concatenate([
    np.array([0.0, -0.0, np.inf, -np.inf, 3.4028235e38, -3.4028235e38, 1e-45, -1e-45, 1.1754942e-38, 0.5, -0.5, 1.0],
             np.float32),
    np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFA12345], np.uint32).view(np.float32),  # NaNs, two signaling
])


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def quantizer_of(block_elements: int, *thresholds_and_levels: np.ndarray) -> Quantizer:
    return Quantizer(block_elements, *(np.asarray(part, np.float32) for part in thresholds_and_levels))


def quantize(backend: types.ModuleType, gradient: np.ndarray, residual: np.ndarray,
             quantizer: Quantizer) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Packed bytes, new residual, selected sum and count; the arguments are not changed."""
    gradient_before = gradient.copy()
    residual_buffer, residual = with_margins(residual)
    packed_buffer, packed = with_margins(np.full(packed_nbytes(gradient.size), 0x55, np.uint8))
    selected_sum, selected_count = backend.quantize_pack(gradient, residual, packed, quantizer)
    assert gradient.tobytes() == gradient_before.tobytes(), "the gradient was changed"
    check_margins(residual_buffer, packed_buffer)
    return packed, residual, selected_sum, selected_count


def unpack(backend: types.ModuleType, packed: np.ndarray, levels: np.ndarray, block_elements: int, elements: int,
           scale: float = 1.0) -> np.ndarray:
    buffer, out = with_margins(np.full(elements, 7, np.float32))
    backend.unpack_sum(packed, np.ascontiguousarray(levels, np.float32), block_elements, out, scale)
    check_margins(buffer)
    return out


def with_margins(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A buffer, and within it a copy of the array, so that ``check_margins`` sees what is written beside it."""
    buffer = np.full(array.size + 2 * MARGIN, 77, array.dtype)
    buffer[MARGIN:-MARGIN] = array
    return buffer, buffer[MARGIN:-MARGIN]


def check_margins(*buffers: np.ndarray) -> None:
    for buffer in buffers:
        assert (buffer[:MARGIN] == 77).all() and (buffer[-MARGIN:] == 77).all(), "written out of bounds"


def words(*codes: int) -> np.ndarray:
    """Codes packed without help of the kernels, padded to whole words."""
    padded = list(codes) + [0] * (-len(codes) % 16)
    return np.array([[int("".join(f"{code:02b}" for code in padded[i:i + 4]), 2) for i in range(0, len(padded), 4)]],
                    np.uint8)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


# ---- quantize_pack: the rule ---------------------------------------------------------------------------------------

def test_a_residual_at_a_threshold_or_beyond_gets_a_code_and_loses_its_level(backend: types.ModuleType) -> None:
    gradient = floats(0.5, 0.49, -0.5, -0.49, 2.0, -2.0, 0.25, 0.0)
    packed, residual, _, _ = quantize(backend, gradient, np.zeros(8, np.float32), Quantizer.fixed(0.5, -0.5, 8))
    assert packed.tolist() == words(0b11, 0b00, 0b10, 0b00, 0b11, 0b10, 0b00, 0b00)[0].tolist()
    assert residual.tolist() == floats(0.0, 0.49, 0.0, -0.49, 1.5, -1.5, 0.25, 0.0).tolist()


def test_the_gradient_is_added_to_the_residual_before_the_decision(backend: types.ModuleType) -> None:
    packed, residual, _, _ = quantize(backend, floats(0.25, 0.25), floats(0.25, -0.5), Quantizer.fixed(0.5, -0.5, 2))
    assert packed.tolist() == words(0b11, 0b00)[0].tolist() and residual.tolist() == [0.0, -0.25]


def test_levels_may_differ_from_thresholds(backend: types.ModuleType) -> None:
    quantizer = quantizer_of(16, [0.5], [-0.25], [2.0], [-1.0])
    packed, residual, _, _ = quantize(backend, floats(0.5, -0.25), np.zeros(2, np.float32), quantizer)
    assert packed.tolist() == words(0b11, 0b10)[0].tolist() and residual.tolist() == [-1.5, 0.75]


def test_every_block_has_its_own_thresholds_and_levels(backend: types.ModuleType) -> None:
    quantizer = quantizer_of(16, [1, 2, 3], [-1, -2, -3], [10, 20, 30], [-10, -20, -30])
    gradient = np.full(40, 2, np.float32)
    packed, residual, selected_sum, selected_count = quantize(backend, gradient, np.zeros(40, np.float32), quantizer)
    assert packed.tolist() == words(*[0b11] * 32)[0].tolist() + [0] * 4
    assert residual.tolist() == [-8.0] * 16 + [-18.0] * 16 + [2.0] * 8
    assert selected_sum.tolist() == [32.0, 32.0, 0.0] and selected_count.tolist() == [16, 16, 0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_is_dropped_and_reported_as_code_01(backend: types.ModuleType,
                                                                          value: float) -> None:
    packed, residual, selected_sum, selected_count = quantize(
        backend, floats(value, 1.0), floats(0.25, 0.0), Quantizer.fixed(0.5, -0.5, 2))
    assert packed.tolist() == words(0b01, 0b11)[0].tolist() and residual.tolist() == [0.25, 0.5]
    assert selected_sum.tolist() == [1.0] and selected_count.tolist() == [1]


def test_a_sum_that_overflows_is_dropped_and_reported_as_code_01(backend: types.ModuleType) -> None:
    packed, residual, _, _ = quantize(backend, floats(3e38, -3e38), floats(3e38, -3e38), Quantizer.fixed(0.5, -0.5, 2))
    assert packed.tolist() == words(0b01, 0b01)[0].tolist() and residual.tolist() == floats(3e38, -3e38).tolist()


def test_a_threshold_of_zero_selects_every_element_but_none_of_the_padding(backend: types.ModuleType) -> None:
    quantizer = quantizer_of(16, [0], [-0.0], [1], [-1])
    packed, _, _, selected_count = quantize(backend, floats(0, 0, 0), np.zeros(3, np.float32), quantizer)
    assert packed.tolist() == words(0b11, 0b11, 0b11)[0].tolist() and selected_count.tolist() == [3]


def test_selected_sum_and_count_are_of_magnitudes_before_the_level_is_taken_out(backend: types.ModuleType) -> None:
    _, _, selected_sum, selected_count = quantize(
        backend, floats(1.0, -2.0, 0.25, -0.25), np.zeros(4, np.float32), Quantizer.fixed(0.5, -0.5, 4))
    assert selected_sum.tolist() == [3.0] and selected_count.tolist() == [2]
    assert selected_sum.dtype == np.float32 and selected_count.dtype == np.uint32


def test_selected_sum_adds_chunks_of_1024_elements_in_float64(backend: types.ModuleType) -> None:
    gradient = np.zeros(3 * 1024, np.float32)
    gradient[[0, 1024, 2048]] = 2.0**24, 1.0, 1.0  # in float32, 2**24 + 1 is 2**24
    _, _, selected_sum, _ = quantize(backend, gradient, np.zeros_like(gradient), Quantizer.fixed(0.5, -0.5, 3 * 1024))
    assert selected_sum.tolist() == [2.0**24 + 2]


@pytest.mark.parametrize("elements", [0, 1, 15, 16, 17])
def test_bytes_beyond_the_last_element_are_zero_up_to_a_whole_word(backend: types.ModuleType, elements: int) -> None:
    packed, _, _, _ = quantize(backend, np.ones(elements, np.float32), np.ones(elements, np.float32),
                               Quantizer.fixed(0.5, -0.5, elements))
    assert packed.tolist() == (words(*[0b11] * elements)[0].tolist() if elements else [])


@holds_for(list(BACKENDS), 40, 2, seed=st.integers(0, 2**32 - 1), elements=st.integers(1, 3000),
           steps=st.integers(1, 12))
def test_what_was_sent_and_the_residual_add_up_to_the_gradients_exactly(
        backend: types.ModuleType, seed: int, elements: int, steps: int) -> None:
    """Exactly, because gradients and levels are small multiples of 1/1024."""
    random = np.random.default_rng(seed)
    gradients = random.integers(-4096, 4096, (steps, elements)).astype(np.float32) / 1024
    sent, residual = push_all(backend, gradients, quantizer_of(
        1008, *np.outer([0.25, -0.5, 0.5, -0.75], np.ones(block_count(elements, 1008)))))
    assert np.array_equal(sent + residual, gradients.sum(axis=0, dtype=np.float64))


@holds_for(list(BACKENDS), 40, 2, seed=st.integers(0, 2**32 - 1), elements=st.integers(1, 3000),
           steps=st.integers(1, 12))
def test_what_was_sent_and_the_residual_add_up_to_any_gradients_but_for_rounding(
        backend: types.ModuleType, seed: int, elements: int, steps: int) -> None:
    random = np.random.default_rng(seed)
    gradients = random.standard_normal((steps, elements), np.float32)
    sent, residual = push_all(backend, gradients, Quantizer.fixed(0.3, -0.7, elements))
    largest = np.abs(gradients).sum(axis=0) + 0.7 * steps
    roundings = 2 * steps * largest * 2.0**-24  # an addition and a subtraction a step
    assert (np.abs(sent + residual - gradients.sum(axis=0, dtype=np.float64)) <= roundings).all()


def push_all(backend: types.ModuleType, gradients: np.ndarray, quantizer: Quantizer) -> tuple[np.ndarray, np.ndarray]:
    """Float64 sum of all that was decoded, and the last residual."""
    elements = gradients.shape[1]
    residual, sent = np.zeros(elements, np.float32), np.zeros(elements)
    levels = np.stack([quantizer.positive_level, quantizer.negative_level], axis=-1)[None]
    for gradient in gradients:
        packed, residual, _, _ = quantize(backend, gradient, residual, quantizer)
        sent += unpack(backend, packed[None], levels, quantizer.block_elements, elements)
    return sent, residual


# ---- unpack_sum: the rule ------------------------------------------------------------------------------------------

def test_codes_decode_to_nothing_nan_the_negative_and_the_positive_level(backend: types.ModuleType) -> None:
    out = unpack(backend, words(0b00, 0b01, 0b10, 0b11), [[[0.5, -0.25]]], 16, 4)
    assert np.array_equal(out, floats(0.0, np.nan, -0.25, 0.5), equal_nan=True)


def test_ranks_of_equal_levels_are_counted_so_that_their_order_does_not_matter(backend: types.ModuleType) -> None:
    level = np.float32(0.1)
    packed = np.concatenate([words(0b11)] * 11 + [words(0b10)])
    for order in (packed, packed[::-1].copy()):
        out = unpack(backend, order, [[[level, -level]]] * 12, 16, 1)
        assert out[0] == np.float32(10) * level != sum([level] * 10, np.float32(0))


def test_equal_levels_that_are_not_symmetrical_are_counted_by_sign(backend: types.ModuleType) -> None:
    packed = np.concatenate([words(0b11, 0b10, 0b00), words(0b11, 0b11, 0b10), words(0b11, 0b10, 0b00)])
    out = unpack(backend, packed, [[[0.5, -0.125]]] * 3, 16, 3)
    assert out.tolist() == [1.5, 0.25, -0.125]


def test_ranks_of_different_levels_are_added_in_their_order(backend: types.ModuleType) -> None:
    packed = np.concatenate([words(0b11), words(0b11), words(0b10)])
    out = unpack(backend, packed, [[[1e8, -1]], [[1, -1]], [[1, -1e8]]], 16, 1)
    assert out.tolist() == [0.0]  # 1e8 + 1 rounds to 1e8


def test_nan_of_any_rank_makes_that_element_nan(backend: types.ModuleType) -> None:
    packed = np.concatenate([words(0b11, 0b11, 0b11), words(0b11, 0b01, 0b10), words(0b10, 0b11, 0b01)])
    for levels in ([[[0.5, -0.5]]] * 3, [[[0.5, -0.25]]] * 3, [[[0.5, -0.5]], [[1, -1]], [[2, -2]]]):
        assert np.isnan(unpack(backend, packed, levels, 16, 3, 0.5)).tolist() == [False, True, True]


def test_the_float32_sum_is_scaled_in_float64_and_rounded_once(backend: types.ModuleType) -> None:
    packed = np.concatenate([words(0b11)] * 3)
    level, scale = np.float32(0.1), 1 / 3
    out = unpack(backend, packed, [[[level, -level]]] * 3, 16, 1, scale)
    total = np.float32(3) * level
    assert out[0] == np.float32(np.float64(total) * scale) != total * np.float32(scale)


def test_every_block_has_its_own_levels_and_may_or_may_not_have_those_of_other_ranks(backend: types.ModuleType) -> None:
    packed = np.concatenate([words(*[0b11] * 33)] * 2)
    levels = [[[1, -1], [2, -1], [4, -4]], [[1, -1], [2, -1], [8, -8]]]
    assert unpack(backend, packed, levels, 16, 33).tolist() == [2.0] * 16 + [4.0] * 16 + [12.0]


def test_the_sum_of_no_ranks_is_zero(backend: types.ModuleType) -> None:
    out = unpack(backend, np.empty((0, 4), np.uint8), np.empty((0, 1, 2)), 16, 5, 0.5)
    assert out.tolist() == [0.0] * 5


def test_rows_of_packed_may_lie_apart_and_at_odd_addresses(backend: types.ModuleType) -> None:
    received = np.full((3, 11), 0x55, np.uint8)
    received[:, 3:7] = words(0b11, 0b10)
    assert unpack(backend, received[:, 3:7], [[[0.5, -0.5]]] * 3, 16, 2).tolist() == [1.5, -1.5]


# ---- arguments -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, array, message", [
    ("gradient", np.zeros(32, np.float64), "gradient is float64"),
    ("gradient", np.zeros(64, np.float32)[::2], "gradient is float32.*contiguous"),
    ("gradient", np.zeros(31, np.float32), r"residual is float32\[32\].*float32\[31\]"),
    ("residual", np.zeros(33, np.float32), r"residual is float32\[33\].*float32\[32\]"),
    ("residual", np.zeros((2, 16), np.float32), "residual is float32"),
    ("residual", np.zeros(32, ">f4"), "residual is >f4"),
    ("packed", np.zeros(7, np.uint8), r"packed is uint8\[7\].*uint8\[8\]"),
    ("packed", np.zeros(12, np.uint8), r"packed is uint8\[12\].*uint8\[8\]"),
    ("packed", np.zeros(8, np.int8), "packed is int8"),
])
def test_quantize_pack_refuses_arrays_that_do_not_fit(backend: types.ModuleType, name: str, array: np.ndarray,
                                                      message: str) -> None:
    arguments = {"gradient": np.zeros(32, np.float32), "residual": np.zeros(32, np.float32),
                 "packed": np.zeros(8, np.uint8), name: array}
    with pytest.raises(ValueError, match=message):
        backend.quantize_pack(**arguments, quantizer=Quantizer.fixed(0.5, -0.5, 32))


@pytest.mark.parametrize("field", ["positive_threshold", "negative_threshold", "positive_level", "negative_level"])
@pytest.mark.parametrize("array", [np.ones(1, np.float32), np.ones(2, np.float64), np.ones(3, np.float32)])
def test_quantize_pack_refuses_thresholds_and_levels_that_do_not_fit(backend: types.ModuleType, field: str,
                                                                     array: np.ndarray) -> None:
    quantizer = dataclasses.replace(quantizer_of(16, *[np.ones(2)] * 4), **{field: array})
    with pytest.raises(ValueError, match=f"{field} is {array.dtype}"):
        backend.quantize_pack(np.zeros(32, np.float32), np.zeros(32, np.float32), np.zeros(8, np.uint8), quantizer)


@pytest.mark.parametrize("block_elements", [0, -16, 8, 17])
def test_blocks_are_whole_words(backend: types.ModuleType, block_elements: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 16, not {block_elements}"):
        quantizer_of(block_elements, *[np.ones(2)] * 4)
    with pytest.raises(ValueError, match=f"multiple of 16, not {block_elements}"):
        unpack(backend, np.zeros((1, 4), np.uint8), [[[1, -1]]], block_elements, 5)


@pytest.mark.parametrize("name, array, message", [
    ("packed", np.zeros((2, 7), np.uint8), r"packed is uint8\[2, 7\], but must be uint8\[rows, 8\]"),
    ("packed", np.zeros(8, np.uint8), r"packed is uint8\[8\]"),
    ("packed", np.zeros((2, 8), np.int8), "packed is int8"),
    ("packed", np.zeros((2, 16), np.uint8)[:, ::2], "rows of packed must be contiguous"),
    ("packed", np.zeros((2, 8), np.uint8)[::-1], "in order of their addresses"),
    ("levels", np.zeros((1, 2, 2), np.float32), r"levels is float32\[1, 2, 2\].*float32\[2, 2, 2\]"),
    ("levels", np.zeros((2, 1, 2), np.float32), r"levels is float32\[2, 1, 2\].*float32\[2, 2, 2\]"),
    ("levels", np.zeros((2, 2, 2), np.float64), "levels is float64"),
    ("out", np.zeros(32, np.float64), "out is float64"),
    ("out", np.zeros(64, np.float32)[::2], "out is float32"),
])
def test_unpack_sum_refuses_arrays_that_do_not_fit(backend: types.ModuleType, name: str, array: np.ndarray,
                                                   message: str) -> None:
    arguments = {"packed": np.zeros((2, 8), np.uint8), "levels": np.zeros((2, 2, 2), np.float32),
                 "out": np.zeros(32, np.float32), name: array}
    with pytest.raises(ValueError, match=message):
        backend.unpack_sum(**arguments, block_elements=16)


def test_arrays_that_are_only_read_may_be_read_only_and_unaligned(backend: types.ModuleType) -> None:
    gradient = np.frombuffer(b"\0" + floats(1.0, -1.0).tobytes() + b"\0", np.uint8)[1:9].view(np.float32)
    assert not gradient.flags.writeable and not gradient.flags.aligned
    packed, _, _, _ = quantize(backend, gradient, np.zeros(2, np.float32), Quantizer.fixed(0.5, -0.5, 2))
    packed.flags.writeable = False
    assert unpack(backend, packed[None], [[[0.5, -0.5]]], 16, 2).tolist() == [0.5, -0.5]


def test_an_unknown_backend_is_refused_with_the_names_of_those_there_are() -> None:
    with pytest.raises(KeyError, match=f"'abacus': choose one of {', '.join(sorted(kernels.BACKENDS))}"):
        kernels.load("abacus")


# ---- the others against the reference ------------------------------------------------------------------------------

lengths = st.one_of(st.integers(0, 100), st.integers(0, 100), st.integers(0, 5000), st.integers(0, 100_000))
block_sizes = st.one_of(st.just(1024), st.just(10**6), st.integers(1, 200).map(lambda words: 16 * words))
seeds = st.integers(0, 2**32 - 1)


def any_floats(random: np.random.Generator, elements: int) -> np.ndarray:
    """A mixture of any bits at all, numbers of ordinary size, subnormal numbers and special values."""
    kinds = random.dirichlet(np.full(4, 0.5))
    parts = [random.integers(0, 2**32, elements, np.uint32).view(np.float32),
             random.standard_normal(elements, np.float32),
             random.integers(0, 2**23, elements, np.uint32).view(np.float32),
             random.choice(SPECIAL, elements)]
    return np.choose(random.choice(4, elements, p=kinds), [part.view(np.uint32) for part in parts]).view(np.float32)


def any_levels(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Positive numbers of ordinary size; sometimes as small or as large as float32 goes, or none at all."""
    size = random.choice([1e-42, 1e-30, 1.0, 1.0, 1.0, 1.0, 1e30, 3e38, np.inf, np.nan])
    return (random.random(shape) * size).astype(np.float32)


@holds_for(OTHERS, 500, 25, elements=lengths, block_elements=block_sizes, seed=seeds)
def test_quantize_pack_is_that_of_the_reference_to_the_bit(compared: types.ModuleType, elements: int,
                                                           block_elements: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    parts = any_levels(random, (4, block_count(elements, block_elements)))
    quantizer = quantizer_of(block_elements, parts[0], -parts[1], parts[2], -parts[3])
    gradient, residual = any_floats(random, elements), any_floats(random, elements)
    for expected, found in zip(quantize(DEFINITION, gradient, residual, quantizer),
                               quantize(compared, gradient, residual, quantizer)):
        assert same_bits(expected, found)


@holds_for(OTHERS, 500, 60, elements=lengths, block_elements=block_sizes, ranks=st.integers(0, 9),
           kind=st.sampled_from(["symmetrical", "equal", "half", "differ", "mixed"]),
           scale=st.sampled_from([1.0, 1.0, 0.5, 1 / 3, 1 / 7, -2.5, 1e-40, 1e40, 0.0]),
           apart=st.sampled_from([0, 1, 4, 13]), seed=seeds)
def test_unpack_sum_is_that_of_the_reference_to_the_bit(compared: types.ModuleType, elements: int, block_elements: int,
                                                        ranks: int, kind: str, scale: float, apart: int,
                                                        seed: int) -> None:
    random = np.random.default_rng(seed)
    blocks = block_count(elements, block_elements)
    levels = any_levels(random, (ranks, blocks, 2)) * floats(1, -1)
    equal = np.full(blocks, kind != "differ") if kind != "mixed" else random.random(blocks) < 0.5
    levels[:, equal, 0] = levels[:1, equal, 0]
    if kind != "half":
        levels[:, equal, 1] = levels[:1, equal, 1]
    symmetrical = np.full(blocks, kind == "symmetrical") if kind != "mixed" else random.random(blocks) < 0.5
    levels[:, symmetrical, 1] = -levels[:, symmetrical, 0]
    packed = random.integers(0, 256, (ranks, packed_nbytes(elements) + apart), np.uint8)[:, :packed_nbytes(elements)]
    if random.random() < 0.7:
        packed &= 0b10101010 | packed >> np.uint8(1)  # no code 01
    expected = unpack(DEFINITION, packed, levels, block_elements, elements, scale)
    found = unpack(compared, packed, levels, block_elements, elements, scale)
    assert np.array_equal(np.isnan(expected), np.isnan(found))
    assert same_bits(expected[~np.isnan(expected)], found[~np.isnan(found)])

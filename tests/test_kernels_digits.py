"""The kernels of digits: a word's digits on small examples, exact sums, and Numba against the NumPy reference."""

from __future__ import annotations

import types
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import strategies as st

from hvd_twobit.kernels import Digits, block_count, packed_nbytes

from .backends import DEFINITION, OTHERS, compared_with_the_definition, few, holds_for
from .test_kernels import check_margins, floats, same_bits, with_margins, words

FACTORS = [1.0, 0.5, 1 / 3, 3.0, 7.0, 0.1, -1.7, 1e-30, 1e30]


def pack(backend: types.ModuleType, packed: np.ndarray, digits: Digits) -> np.ndarray:
    buffer, packed_words = with_margins(np.full(digits.word_count(4 * packed.size), 7.0))
    backend.pack_digits(packed, digits, packed_words)
    check_margins(buffer)
    return packed_words


def unpack(backend: types.ModuleType, summed: np.ndarray, digits: Digits, levels: object, elements: int,
           divisor: float = 1.0, block_elements: int = 16, scale: float = 1.0) -> np.ndarray:
    buffer, out = with_margins(np.full(elements, 7, np.float32))
    backend.unpack_digits(summed, digits, divisor, np.array(levels, np.float32), block_elements, out, scale)
    check_margins(buffer)
    return out


def any_codes(random: np.random.Generator, ranks: int, elements: int) -> np.ndarray:
    """Packed codes of so many ranks, without code 01; now and then all ranks send the same for every element."""
    packed = random.integers(0, 256, (ranks, packed_nbytes(elements)), np.uint8)
    if random.random() < 0.3:
        packed[:] = random.choice([0b11111111, 0b10101010, 0b11101110])
    return packed & (0b10101010 | packed >> np.uint8(1))


# ---- a word --------------------------------------------------------------------------------------------------------

def test_an_element_is_a_digit_of_the_word_of_its_lane(backend: types.ModuleType) -> None:
    codes = [0] * 48
    codes[0], codes[16], codes[33] = 0b11, 0b10, 0b11
    packed_words = pack(backend, words(*codes)[0], Digits(2, symmetric=True))
    assert packed_words.tolist() == [1 - 5, 5 ** 2] + [0] * 14


def test_without_symmetry_the_negative_digit_is_beyond_all_sums_of_positive_ones(backend: types.ModuleType) -> None:
    packed_words = pack(backend, words(*[0b11] * 16, *[0b10] * 16)[0], Digits(2, symmetric=False))
    assert packed_words.tolist() == [1 + 3 * 7] * 16


def test_code_01_makes_its_word_nan_and_with_it_all_elements_of_the_word(backend: types.ModuleType) -> None:
    digits = Digits(2, symmetric=True)
    codes = [0b11] * (16 * digits.per_word + 16)
    codes[17] = 0b01
    summed = pack(backend, words(*codes)[0], digits) + pack(backend, words(*[0b10] * len(codes))[0], digits)
    assert np.flatnonzero(np.isnan(summed)).tolist() == [1]
    out = unpack(backend, summed, digits, [[1, -1]] * block_count(len(codes), 16), len(codes))
    assert np.flatnonzero(np.isnan(out)).tolist() == list(range(1, 16 * digits.per_word, 16))
    assert not out[~np.isnan(out)].any()


def test_sums_are_weighed_and_scaled_as_unpack_sum_does(backend: types.ModuleType) -> None:
    digits = Digits(3, symmetric=True)
    level, scale = np.float32(0.1), 1 / 3
    out = unpack(backend, 3 * pack(backend, words(0b11)[0], digits), digits, [[level, -level]], 1, scale=scale)
    total = np.float32(3) * level
    assert out[0] == np.float32(np.float64(total) * scale) != total * np.float32(scale)


def test_levels_that_turn_out_symmetrical_are_weighed_by_the_difference_of_counts(backend: types.ModuleType) -> None:
    """A loss scale can bring both thresholds to the limit of float32, where a sum per sign would be inf - inf."""
    digits, level = Digits(4, symmetric=False), np.finfo(np.float32).max
    summed = 2 * pack(backend, words(0b11)[0], digits) + 2 * pack(backend, words(0b10)[0], digits)
    assert unpack(backend, summed, digits, [[level, -level]], 1).tolist() == [0.0]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16, 100, 1000])
def test_words_are_as_full_as_the_bound_of_all_roundings_allows(ranks: int, symmetric: bool) -> None:
    digits = Digits(ranks, symmetric)

    def error(count: int) -> Fraction:
        largest = sum(abs(digits.negative) * digits.radix ** digit for digit in range(count))
        return Fraction(largest * ranks * (ranks + 9), 2**54)

    assert error(digits.per_word) <= Fraction(1, 2) < error(digits.per_word + 1)


def test_digits_of_no_rank_are_refused() -> None:
    with pytest.raises(ValueError, match="not of 0"):
        Digits(0, symmetric=True)


@pytest.mark.parametrize("arguments, message", [
    (dict(packed=np.zeros(6, np.uint8)), "packed is of 6 bytes"),
    (dict(packed=np.zeros(8, np.int8)), "packed is int8"),
    (dict(words=np.zeros(17)), r"words is float64\[17\].*float64\[16\]"),
    (dict(words=np.zeros(16, np.float32)), "words is float32"),
])
def test_pack_digits_refuses_arrays_that_do_not_fit(backend: types.ModuleType, arguments: dict[str, np.ndarray],
                                                    message: str) -> None:
    with pytest.raises(ValueError, match=message):
        backend.pack_digits(**{"packed": np.zeros(8, np.uint8), "words": np.zeros(16), "digits": Digits(2, True),
                               **arguments})


@pytest.mark.parametrize("arguments, message", [
    (dict(words=np.zeros(32)), r"words is float64\[32\].*float64\[16\]"),
    (dict(words=np.zeros(32)[::2]), "words is float64.*contiguous"),
    (dict(levels=np.zeros((1, 2), np.float32)), r"levels is float32\[1, 2\].*float32\[2, 2\]"),
    (dict(levels=np.ones((2, 2), np.float32)), "levels are not symmetric"),
    (dict(out=np.zeros(32)), "out is float64"),
    (dict(block_elements=8), "multiple of 16, not 8"),
])
def test_unpack_digits_refuses_arrays_that_do_not_fit(backend: types.ModuleType, arguments: dict[str, object],
                                                      message: str) -> None:
    with pytest.raises(ValueError, match=message):
        backend.unpack_digits(**{"words": np.zeros(16), "digits": Digits(2, True), "divisor": 1.0, "block_elements": 16,
                                 "levels": np.zeros((2, 2), np.float32), "out": np.zeros(32, np.float32), **arguments})


# ---- sums ----------------------------------------------------------------------------------------------------------

@holds_for(OTHERS, 300, 12, elements=st.one_of(st.integers(0, 100), st.integers(0, 5000)),
           block_elements=st.sampled_from([16, 48, 1024, 10**6]), ranks=st.sampled_from([1, 2, 3, 4, 5, 8, 16, 33]),
           symmetric=st.booleans(), before=st.sampled_from(FACTORS), after=st.sampled_from(FACTORS),
           some_joined=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_the_sum_of_words_that_were_scaled_on_the_way_is_unpack_sum_of_the_codes(
        compared: types.ModuleType, elements: int, block_elements: int, ranks: int, symmetric: bool, before: float,
        after: float, some_joined: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    digits = Digits(ranks, symmetric)
    contributors = int(random.integers(0, ranks + 1)) if some_joined else ranks
    packed = any_codes(random, contributors, elements)
    levels = random.random((block_count(elements, block_elements), 2)).astype(np.float32) * floats(1, -1)
    if symmetric:
        levels[:, 1] = -levels[:, 0]
    of_ranks = np.broadcast_to(levels, (contributors, *levels.shape)).copy()
    scale = before * after
    wanted = np.empty(elements, np.float32)
    DEFINITION.unpack_sum(packed, of_ranks, block_elements, wanted, scale)
    summed = np.zeros(digits.word_count(elements))
    for rank in range(contributors):
        packed_words = pack(compared, packed[rank], digits)
        assert same_bits(packed_words, pack(DEFINITION, packed[rank], digits))
        summed += packed_words * before
    summed *= after
    for backend in (DEFINITION, compared):
        found = unpack(backend, summed, digits, levels, elements, scale, block_elements, scale)
        assert np.array_equal(found, wanted)


@compared_with_the_definition
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16, 64, 300])
def test_the_largest_sums_survive_the_worst_factors_in_any_order(compared: types.ModuleType, ranks: int,
                                                                 symmetric: bool) -> None:
    digits = Digits(ranks, symmetric)
    random = np.random.default_rng(ranks)
    elements = 16 * digits.per_word
    codes = random.choice([0b11, 0b10], 16 * digits.per_word)
    rank_words = pack(compared, words(*codes)[0], digits)
    level = [[1, -1] if symmetric else [1, -0.5]] * block_count(elements, 16)
    wanted = np.where(codes == 0b11, ranks, -ranks * (1 if symmetric else 0.5)).astype(np.float32)
    for before, after in few(compared, 10.0 ** random.uniform(-3, 3, (50, 2))):
        total = np.zeros_like(rank_words)
        for _ in range(ranks):
            total += rank_words * before
        assert np.array_equal(unpack(compared, total * after, digits, level, elements, before * after), wanted)


@holds_for(OTHERS, 100, 15, elements=st.integers(0, 3000), symmetric=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_digits_are_those_of_the_reference_to_the_bit_with_nan_zeros_and_any_levels(
        compared: types.ModuleType, elements: int, symmetric: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    digits = Digits(int(random.integers(1, 9)), symmetric)
    packed = random.integers(0, 256, packed_nbytes(elements), np.uint8)
    found = pack(compared, packed, digits)
    assert np.array_equal(found, pack(DEFINITION, packed, digits), equal_nan=True)
    size = random.choice([1e-42, 1e-30, 1.0, 1e30, 3e38, np.inf])
    levels = (random.random((block_count(elements, 64), 2)) * size).astype(np.float32) * floats(1, -1)
    levels[:, 1] = -levels[:, 0] if symmetric else levels[:, 1]
    scale = random.choice([1.0, 1 / 3, -2.5, 1e-40, 1e40])
    one, other = (unpack(each, found, digits, levels, elements, 1.0, 64, scale) for each in (DEFINITION, compared))
    assert np.array_equal(np.isnan(one), np.isnan(other))
    assert same_bits(one[~np.isnan(one)], other[~np.isnan(other)])

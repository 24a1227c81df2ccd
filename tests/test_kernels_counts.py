"""Counts of codes, what lies between two halves of a sum: ``pack_counts`` and ``unpack_counts`` are ``unpack_sum``."""

from __future__ import annotations

import types

import numpy as np
import pytest
from hypothesis import strategies as st

from hvd_twobit import kernels
from hvd_twobit.kernels import CODE_NOT_FINITE, block_count, count_bits, counts_nbytes, packed_nbytes

from .backends import DEFINITION, OTHERS, holds_for
from .simulation import assert_same_bits


def packed_codes(random: np.random.Generator, ranks: int, elements: int, not_finite: bool) -> np.ndarray:
    """Codes of all ranks, uint8[ranks, bytes], in a buffer in which rows lie apart."""
    codes = random.choice(np.array([0, 0, 3, 2, CODE_NOT_FINITE if not_finite else 0], np.uint8),
                          (ranks, 4 * packed_nbytes(elements)))
    codes[:, elements:] = 0
    four = codes.reshape(ranks, packed_nbytes(elements), 4)
    rows = np.full((ranks, packed_nbytes(elements) + 5), 0x55, np.uint8)
    rows[:, 3:-2] = four[..., 0] << 6 | four[..., 1] << 4 | four[..., 2] << 2 | four[..., 3]
    return rows[:, 3:-2]


def counted(backend: types.ModuleType, packed: np.ndarray, planes: int, bits: int) -> np.ndarray:
    """The counts, written between bytes that must not change."""
    nbytes = counts_nbytes(packed.shape[1] // 4, bits)
    rows = np.full((planes, nbytes + 32), 0xA7, np.uint8)
    backend.pack_counts(packed, bits, rows[:, 16:nbytes + 16])
    assert (rows[:, :16] == 0xA7).all() and (rows[:, nbytes + 16:] == 0xA7).all()
    return rows[:, 16:nbytes + 16]


def words(*codes: int) -> np.ndarray:
    padded = [*codes, *[0] * (-len(codes) % 16)]
    return np.array([[padded[i] << 6 | padded[i + 1] << 4 | padded[i + 2] << 2 | padded[i + 3]
                      for i in range(0, len(padded), 4)]], np.uint8)


def test_a_count_is_codes_11_less_codes_10_and_its_lowest_value_a_nan(backend: types.ModuleType) -> None:
    packed = np.concatenate([words(3, 2, 0, 3, 1), words(3, 2, 0, 2, 0), words(3, 2, 3, 0, 2)])
    assert counted(backend, packed, 1, 4).tobytes() == bytes([0xD3, 0x01, 0x08, 0, 0, 0, 0, 0])
    assert counted(backend, packed, 1, 8).tobytes() == bytes([3, 0xFD, 1, 0, 0x80, *[0] * 11])
    assert counted(backend, packed, 1, 16).tobytes()[:10] == bytes([3, 0, 0xFD, 0xFF, 1, 0, 0, 0, 0, 0x80])


def test_two_planes_count_both_codes(backend: types.ModuleType) -> None:
    packed = np.concatenate([words(3, 2, 0, 3, 1), words(3, 2, 0, 2, 0), words(3, 2, 3, 0, 2)])
    assert counted(backend, packed, 2, 8)[:, :5].tolist() == [[3, 0, 1, 1, 128], [0, 3, 0, 1, 128]]


@pytest.mark.parametrize("ranks, bits", [(1, 4), (7, 4), (8, 8), (127, 8), (128, 16), (32767, 16)])
def test_as_few_bits_as_the_ranks_need(ranks: int, bits: int) -> None:
    assert count_bits(ranks) == bits


def test_more_ranks_than_a_count_can_tell_are_refused() -> None:
    with pytest.raises(ValueError, match="32768 ranks"):
        count_bits(32768)


@pytest.mark.parametrize("ranks", [7, 127])
@pytest.mark.parametrize("code", [3, 2])
def test_the_most_ranks_that_fit_are_counted_exactly(backend: types.ModuleType, ranks: int, code: int) -> None:
    packed = np.repeat(words(*[code] * 16), ranks, axis=0)
    out = np.empty(16, np.float32)
    bits = count_bits(ranks)
    backend.unpack_counts(counted(backend, packed, 1, bits), bits, np.float32([[1, -1]]), 16, out)
    assert (out == (ranks if code == 3 else -ranks)).all()


@holds_for(OTHERS, 300, 20, elements=st.sampled_from([0, 1, 15, 16, 17, 1000, 1023, 1024, 1025, 1040, 2500]),
           block_elements=st.sampled_from([16, 48, 1024, 4096]), ranks=st.sampled_from([0, 1, 2, 3, 7, 8, 127, 128]),
           planes=st.sampled_from([1, 2]), symmetrical=st.booleans(), not_finite=st.booleans(),
           scale=st.sampled_from([1.0, 1 / 3, 0.25, -1.5]), seed=st.integers(0, 2**32))
def test_both_halves_are_unpack_sum_and_those_of_the_reference_to_the_bit(
        compared: types.ModuleType, elements: int, block_elements: int, ranks: int, planes: int, symmetrical: bool,
        not_finite: bool, scale: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    packed = packed_codes(random, ranks, elements, not_finite)
    blocks = block_count(elements, block_elements)
    levels = np.exp(random.normal(0, 20, (blocks, 2))).astype(np.float32) * np.float32([1, -1])
    if symmetrical or planes == 1:
        levels[:, 1] = -levels[:, 0]
    for bits in [bits for bits in kernels.COUNT_BITS if bits >= count_bits(ranks)]:
        counts = counted(compared, packed, planes, bits)
        assert counts.tobytes() == counted(DEFINITION, packed, planes, bits).tobytes()
        wanted, definition, out = np.empty((3, elements), np.float32)
        DEFINITION.unpack_sum(packed, np.ascontiguousarray(np.broadcast_to(levels, (ranks, blocks, 2))), block_elements,
                         wanted, scale)
        DEFINITION.unpack_counts(counts, bits, levels, block_elements, definition, scale)
        compared.unpack_counts(counts, bits, levels, block_elements, out, scale)
        for found in (definition, out):
            assert_same_bits(found, wanted, f"{bits} bits")


@pytest.mark.parametrize("packed, bits, counts, message", [
    (np.zeros((8, 4), np.uint8), 4, np.zeros((1, 8), np.uint8), "counts of 8 ranks cannot have 4 bits"),
    (np.zeros((2, 4), np.uint8), 5, np.zeros((1, 10), np.uint8), "cannot have 5 bits"),
    (np.zeros((2, 5), np.uint8), 4, np.zeros((1, 8), np.uint8), "packed is"),
    (np.zeros((2, 4), np.uint8), 4, np.zeros((1, 7), np.uint8), "counts is"),
    (np.zeros((2, 4), np.uint8), 4, np.zeros((3, 8), np.uint8), "3 planes"),
    (np.zeros((2, 4), np.int8), 4, np.zeros((1, 8), np.uint8), "packed is"),
])
def test_pack_counts_refuses_arrays_that_do_not_fit(backend: types.ModuleType, packed: np.ndarray, bits: int,
                                                    counts: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        backend.pack_counts(packed, bits, counts)


@pytest.mark.parametrize("changed, message", [
    (dict(bits=3), "bits must be one of"), (dict(counts=np.zeros((1, 9), np.uint8)), "counts is"),
    (dict(counts=np.zeros((0, 8), np.uint8)), "0 planes"), (dict(levels=np.ones((2, 2), np.float32)), "levels is"),
    (dict(block_elements=8), "block_elements must be"), (dict(out=np.zeros(16, np.float64)), "out is"),
])
def test_unpack_counts_refuses_arrays_that_do_not_fit(backend: types.ModuleType, changed: dict, message: str) -> None:
    arguments = dict(counts=np.zeros((1, 8), np.uint8), bits=4, levels=np.ones((1, 2), np.float32), block_elements=16,
                     out=np.zeros(16, np.float32))
    with pytest.raises(ValueError, match=message):
        backend.unpack_counts(**{**arguments, **changed})

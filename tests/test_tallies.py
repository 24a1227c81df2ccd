"""Codes as digits of integers: the kernels, what a bucket's integers hold, and codecs that exchange them."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_twobit.buckets import Bucket
from hvd_twobit.codec import Codec, Contents
from hvd_twobit.config import TwoBitConfig
from hvd_twobit.errors import PayloadError
from hvd_twobit.kernels import Tallies, count_bits, counts_nbytes
from hvd_twobit.residuals import ResidualRegistry

from .backends import DEFINITION, OTHERS, holds_for
from .exchanges import encoded
from .simulation import gradient

# ---- kernels -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ranks, planes, per_integer", [(1, 1, 20), (2, 1, 13), (3, 1, 11), (4, 1, 10), (8, 1, 7),
                                                        (64, 1, 4), (2, 2, 20), (3, 2, 15), (7, 2, 10), (1000, 1, 2)])
def test_so_many_digits_fit_into_an_integer(ranks: int, planes: int, per_integer: int) -> None:
    assert Tallies(ranks, planes).per_integer == per_integer


@given(st.integers(1, 32767), st.sampled_from([1, 2]), st.data())
@settings(max_examples=300)
def test_the_multiplier_divides_every_sum_exactly(ranks: int, planes: int, data: st.DataObject) -> None:
    tallies = Tallies(ranks, planes)
    limit = tallies.radix ** tallies.per_integer
    assert limit <= 2**32 and tallies.multiplier < 2**32
    drawn = data.draw(st.integers(0, limit - 1))
    near = drawn // tallies.radix * tallies.radix
    for x in {drawn, near, max(near - 1, 0), limit - 1}:
        assert x * tallies.multiplier < 2**64 and x * tallies.multiplier >> tallies.shift == x // tallies.radix


def test_digits_of_a_group_are_the_words_of_codes_in_order(backend: types.ModuleType) -> None:
    packed = np.array([0b11000000, 0, 0, 0, 0b10110000, 0, 0, 0], np.uint8)  # 11 0 ..; 10 11 0 ..
    words = np.empty((1, 16), np.uint32)
    assert not backend.pack_tallies(packed, Tallies(2, 1), words)
    assert words.tolist() == [[2 + 5 * 0, 1 + 5 * 2] + [1 + 5] * 14]
    words = np.empty((2, 16), np.uint32)
    assert not backend.pack_tallies(packed, Tallies(2, 2), words)
    assert words.tolist() == [[1, 3] + [0] * 14, [3] + [0] * 15]


def test_a_code_01_is_told_and_has_the_digit_of_zero(backend: types.ModuleType) -> None:
    words = np.empty((1, 16), np.uint32)
    assert backend.pack_tallies(np.array([0, 0, 0, 0b01], np.uint8), Tallies(2, 1), words)
    assert words.tolist() == [[1] * 16]


@holds_for(OTHERS, 200, 8, elements=st.integers(0, 70 * 16), ranks=st.sampled_from([1, 2, 3, 4, 7, 8, 16, 100]),
           planes=st.sampled_from([1, 2]), all_there=st.booleans(), seed=st.integers(0, 2**32))
def test_counts_of_added_tallies_are_those_of_the_codes(compared: types.ModuleType, elements: int, ranks: int,
                                                        planes: int, all_there: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    tallies, bits, words = Tallies(ranks, planes), count_bits(ranks), elements // 16
    contributors = ranks if all_there else int(random.integers(0, ranks + 1))
    packed = random.integers(0, 256, (contributors, 4 * words), np.uint8)
    packed |= (packed & 0x55) << 1  # no code 01
    total = np.zeros((planes, tallies.integers(words)), np.uint32)
    for codes in packed:
        definition, found = np.empty_like(total), np.empty_like(total)
        assert not DEFINITION.pack_tallies(codes, tallies, definition)
        assert not compared.pack_tallies(codes, tallies, found)
        assert definition.tobytes() == found.tobytes()
        total += definition
    wanted, *both = (np.empty((planes, counts_nbytes(words, bits)), np.uint8) for _ in range(3))
    DEFINITION.pack_counts(packed, bits, wanted)
    for module, counts in zip((DEFINITION, compared), both):
        module.unpack_tallies(total, tallies, contributors, bits, counts)
        assert counts.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("arguments, message", [
    (dict(words=np.zeros((1, 32), np.uint32)), "words is uint32"),
    (dict(words=np.zeros((1, 16), np.int32)), "words is int32"),
    (dict(contributors=3), "3 of 2 ranks"), (dict(bits=5), "cannot have 5 bits"),
    (dict(counts=np.zeros((2, 8), np.uint8)), "counts has 2 planes"),
])
def test_unpack_tallies_refuses_arrays_that_do_not_fit(backend: types.ModuleType, arguments: dict[str, Any],
                                                       message: str) -> None:
    fitting = dict(words=np.zeros((1, 16), np.uint32), tallies=Tallies(2, 1), contributors=2, bits=4,
                   counts=np.zeros((1, 8), np.uint8))
    with pytest.raises(ValueError, match=message):
        backend.unpack_tallies(**{**fitting, **arguments})


def test_pack_tallies_refuses_arrays_that_do_not_fit(backend: types.ModuleType) -> None:
    with pytest.raises(ValueError, match="words is"):
        backend.pack_tallies(np.zeros(4, np.uint8), Tallies(2, 1), np.zeros((1, 32), np.uint32))
    with pytest.raises(ValueError, match="packed is"):
        backend.pack_tallies(np.zeros(5, np.uint8), Tallies(2, 1), np.zeros((1, 16), np.uint32))


# ---- codecs --------------------------------------------------------------------------------------------------------

SHAPES = {"w": (40, 40), "tiny": (3,), "empty": (0, 2), "v": (100,)}
BUCKET = Bucket(tuple(part for name, shape in SHAPES.items() for part in Bucket.of(name, shape).parts))


def codecs(*configs: TwoBitConfig) -> list[Codec]:
    made = [Codec(config, ResidualRegistry(), warns=False) for config in configs]
    for one in made:
        for name, shape in SHAPES.items():
            one.observe(name, shape, np.full(int(np.prod(shape)), 0.2, np.float32), len(made), 1.0)
    return made


def added(ranks: list[Codec], gradients: list[dict[str, np.ndarray]], joined: tuple[int, ...] = ()) -> np.ndarray:
    """What Horovod's allreduce makes of the integers of all ranks; those that have joined contribute zeros."""
    total = 0
    for rank, (one, values) in enumerate(zip(ranks, gradients)):
        layout = one.layout(BUCKET, 1)
        into = one.tally_layout(layout, len(ranks))
        integers = np.full(into.size, 7, np.uint32)
        one.tally(layout, encoded(one, layout, values), rank, into, integers)
        total = total + integers * np.uint32(rank not in joined)
    return np.asarray(total, np.uint32)


def received(one: Codec, ranks: int, total: np.ndarray) -> Contents:
    layout = one.layout(BUCKET, 1)
    return one.receive_tallies(layout, one.tally_layout(layout, ranks), total)


def gradients_of(ranks: int) -> list[dict[str, np.ndarray]]:
    return [{name: gradient(1, rank, 0, name, shape) for name, shape in SHAPES.items()} for rank in range(ranks)]


def decoded(one: Codec, contents: Contents, name: str) -> np.ndarray:
    out = np.full(int(np.prod(SHAPES[name])), 7, np.float32)
    one.decode(contents, name, out, 0.5)
    return out


ADAPTIVE = TwoBitConfig(min_elements=0, block_elements=64)
FIXED = TwoBitConfig(0.5, -0.25, min_elements=0)


@pytest.mark.parametrize("config", [ADAPTIVE, FIXED])
def test_an_element_that_is_not_finite_makes_its_span_nan_on_all_ranks_and_nothing_else(config: TwoBitConfig) -> None:
    values = gradients_of(9)
    clean = codecs(*[config] * 9)
    contents = received(clean[0], 9, added(clean, values))
    plain = {name: decoded(clean[0], contents, name) for name in SHAPES}
    values[4]["w"].reshape(-1)[70], values[7]["v"][99] = np.inf, np.nan
    ranks = codecs(*[config] * 9)
    total = added(ranks, values)
    for one in (ranks[0], ranks[4]):
        contents = received(one, 9, total)
        span = 64 if config.adaptive else 1024
        first, last = decoded(one, contents, "w"), decoded(one, contents, "v")
        assert np.flatnonzero(np.isnan(first)).tolist() == list(range(70 // span * span, (70 // span + 1) * span))
        assert np.flatnonzero(np.isnan(last)).tolist() == list(range(99 // span * span, 100))
        assert (first[np.isfinite(first)] == plain["w"][np.isfinite(first)]).all()
        assert np.isfinite(decoded(one, contents, "tiny")).all()


@pytest.mark.parametrize("config", [ADAPTIVE, FIXED])
def test_a_rank_that_has_joined_counts_for_nothing(config: TwoBitConfig) -> None:
    values = gradients_of(3)
    with_zeros, without = codecs(*[config] * 3), codecs(*[config] * 3)
    some = received(with_zeros[0], 3, added(with_zeros, values, joined=(1,)))
    layout = without[0].layout(BUCKET, 1)
    payloads = [encoded(one, layout, part) for one, part in zip(without, values)]
    wanted = without[0].receive(layout, np.concatenate([payloads[0], payloads[2]]), 2)
    for name in SHAPES:
        assert decoded(with_zeros[0], some, name).tobytes() == decoded(without[0], wanted, name).tobytes()


def test_thresholds_that_differ_are_refused_with_their_values() -> None:
    ranks = codecs(TwoBitConfig(0.5, -0.5, 0), TwoBitConfig(0.25, -0.25, 0))
    with pytest.raises(PayloadError, match=r"tensors 'w' to 'v': ranks have thresholds \[\(0.25, -0.25\), \(0.5, -0.5"):
        received(ranks[0], 2, added(ranks, gradients_of(2)))


def test_levels_that_differ_are_told_with_the_rank() -> None:
    ranks = codecs(*[ADAPTIVE] * 3)
    total = added(ranks, gradients_of(3))
    ranks[1]._residuals.scale(2.0)
    with pytest.raises(PayloadError, match="tensors 'w' to 'v': the payload of rank 0 has a levels_checksum"):
        received(ranks[1], 3, total)


@pytest.mark.parametrize("position, value, message", [
    (8, 0x12345678, "rank 1 begins with b'xV4"), (9, 7, "rank 1 has version 7"),
    (10, 3, "rank 1 has an element_count of 3"), (12, 17, "rank 1 has block_elements 17"),
    (24, 0xFFFFFFFF, "rank 0 has a block table that says of block 0 a selected_sum of nan"),
])
def test_integers_that_are_not_a_sum_of_headers_and_tables_are_refused(position: int, value: int,
                                                                      message: str) -> None:
    ranks = codecs(*[ADAPTIVE] * 3)
    total = added(ranks, gradients_of(3))
    total[position] = value
    with pytest.raises(PayloadError, match=f"tensors 'w' to 'v': the payload of {message}"):
        received(ranks[0], 3, total)


def test_another_number_of_integers_is_refused() -> None:
    ranks = codecs(*[ADAPTIVE] * 2)
    total = added(ranks, gradients_of(2))
    with pytest.raises(PayloadError, match=f"{total.size - 1} integers arrived, but 1703 elements of 2 ranks take"):
        received(ranks[0], 2, total[:-1])

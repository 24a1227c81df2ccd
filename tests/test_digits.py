"""Sums that an allreduce makes of digits: what comes back is what an allgather of the codes gives, to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_twobit.codec import Codec
from hvd_twobit.config import TwoBitConfig
from hvd_twobit.digit_codec import DigitCodec, quantize_once, sum_of
from hvd_twobit.digits import DigitLayout, fingerprint
from hvd_twobit.errors import PayloadError
from hvd_twobit.kernels import Digits
from hvd_twobit.residuals import ResidualRegistry

from . import exchanges

CONFIGURATIONS = {
    "adaptive": TwoBitConfig(block_elements=64),
    "fixed": TwoBitConfig(0.5, -0.5),
    "asymmetrical": TwoBitConfig(0.5, -0.25),
    "warm-up": TwoBitConfig(block_elements=64, warmup_steps=2),
}
FACTORS = [(1.0, 1.0), (1.0, 1 / 3), (1 / 3, 1.0), (3.0, 0.25), (7.0, 1 / 7)]


def reduced(words: Sequence[np.ndarray], before: float = 1.0, after: float = 1.0) -> np.ndarray:
    """What Horovod's allreduce makes of the words of the ranks that have not joined."""
    return np.sum([part * before for part in words], axis=0) * after


def gradients(random: np.random.Generator, ranks: int, elements: int) -> list[np.ndarray]:
    values = random.standard_normal((ranks, elements)) * np.exp(random.standard_normal(elements))
    return list(values.astype(np.float32))


class Ranks:
    """All ranks of one tensor, encoded and decoded in both ways."""

    def __init__(self, config: TwoBitConfig, ranks: int, elements: int) -> None:
        self.registries = [[ResidualRegistry() for _ in range(ranks)] for _ in range(2)]
        self.codecs = [Codec(config, registry) for registry in self.registries[0]]
        self.digit_codecs = [DigitCodec(config, registry) for registry in self.registries[1]]
        self.ranks, self.shape = ranks, (elements,)

    def gathered(self, tensors: Sequence[np.ndarray], scale: float) -> np.ndarray:
        out = np.empty(self.shape, np.float32)
        if not self.codecs[0].ready("t", self.shape):
            summed = (np.sum(tensors, axis=0, dtype=np.float64) * scale).astype(np.float32)
            for codec in self.codecs:
                codec.observe("t", self.shape, summed, self.ranks, scale)
            return summed
        payloads = np.concatenate([exchanges.payload(codec, "t", self.shape, part)
                                   for codec, part in zip(self.codecs, tensors)])
        for codec in self.codecs:
            exchanges.decode(codec, "t", self.shape, payloads, self.ranks, out, scale)
        return out

    def summed(self, tensors: Sequence[np.ndarray], before: float, after: float) -> list[np.ndarray]:
        """The result on every rank."""
        if not self.digit_codecs[0].ready("t", self.shape):
            words = reduced([codec.encode_uncompressed("t", self.shape, part, rank, self.ranks) for rank, (codec, part)
                             in enumerate(zip(self.digit_codecs, tensors))], before, after)
            return [codec.decode_uncompressed("t", self.shape, words, rank, self.ranks).astype(np.float32)
                    for rank, codec in enumerate(self.digit_codecs)]
        words = reduced([codec.encode("t", self.shape, part, rank, self.ranks) for rank, (codec, part)
                         in enumerate(zip(self.digit_codecs, tensors))], before, after)
        outs = [np.empty(self.shape, np.float32) for _ in range(self.ranks)]
        for rank, (codec, out) in enumerate(zip(self.digit_codecs, outs)):
            codec.decode("t", self.shape, words, rank, self.ranks, out)
        return outs


@pytest.mark.parametrize("name", CONFIGURATIONS)
@given(st.integers(1, 6), st.integers(0, 700), st.sampled_from(FACTORS), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=25)
def test_sums_residuals_and_levels_are_those_of_an_allgather(name: str, ranks: int, elements: int,
                                                             factors: tuple[float, float], seed: int) -> None:
    random = np.random.default_rng(seed)
    both = Ranks(CONFIGURATIONS[name], ranks, elements)
    before, after = factors
    for _ in range(6):
        # Multiples of 1/64, whose sums are exact where tensors travel uncompressed.
        tensors = [np.round(part * 64) / 64 for part in gradients(random, ranks, elements)]
        wanted = both.gathered(tensors, before * after)
        compressed = all(codec.ready("t", both.shape) for codec in both.digit_codecs)
        for out in both.summed(tensors, before, after):
            assert np.array_equal(out, wanted) if compressed else np.allclose(out, wanted, rtol=2e-7, atol=1e-6)
        for one, other in zip(*both.registries):
            # What levels are learnt from was rounded in another order.
            if one.tensor("t", both.shape).levels is not None:
                assert np.allclose(one.tensor("t", both.shape).levels, other.tensor("t", both.shape).levels, rtol=1e-6)
                one.take_shared(other.shared())
            assert np.array_equal(one.residual("t", both.shape), other.residual("t", both.shape))
            assert one.stats().keys() == other.stats().keys()
            for tensor in one.stats():
                assert other.stats()[tensor].nonzero_share == one.stats()[tensor].nonzero_share


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_ranks_that_have_joined_count_as_zeros_and_for_the_average(name: str) -> None:
    random = np.random.default_rng(0)
    codecs = [DigitCodec(CONFIGURATIONS[name], ResidualRegistry()) for _ in range(4)]
    twin = Ranks(CONFIGURATIONS[name], 2, 500)
    for _ in range(5):
        one, two = gradients(random, 2, 500)
        wanted = twin.summed([one, two], 1.0, 1 / 4)[0]
        ready = codecs[1].ready("t", (500,))
        encode = "encode" if ready else "encode_uncompressed"
        words = reduced([getattr(codecs[rank], encode)("t", (500,), part, rank, 4)
                         for rank, part in ((1, one), (3, two))], after=1 / 4)
        for rank in (1, 3):
            out = np.empty(500, np.float32)
            if ready:
                assert codecs[rank].decode("t", (500,), words, rank, 4, out).contributors == 2
            else:
                out[:] = codecs[rank].decode_uncompressed("t", (500,), words, rank, 4)
            assert np.array_equal(out, wanted)


def once(config: TwoBitConfig, tensors: Sequence[np.ndarray], before: float = 1.0, after: float = 1.0) -> np.ndarray:
    """The sum of tensors that are exchanged once; all ranks get the same bits."""
    ranks = len(tensors)
    words = reduced([quantize_once(config, tensor, rank, ranks) for rank, tensor in enumerate(tensors)], before, after)
    outs = [np.full(tensors[0].size, 7, np.float32) for _ in range(ranks)]
    for rank, out in enumerate(outs):
        sum_of(config, words, "t", rank, ranks, out)
        assert np.array_equal(out, outs[0], equal_nan=True)
    return outs[0]


@pytest.mark.parametrize("name", ["fixed", "asymmetrical"])
def test_once_a_fixed_threshold_stands_for_itself(name: str) -> None:
    config = CONFIGURATIONS[name]
    tensors = gradients(np.random.default_rng(1), 3, 1000)
    up, down = np.float32(config.positive_threshold), np.float32(config.negative_threshold)
    positives = sum((part >= up).astype(np.float32) for part in tensors)
    negatives = sum((part <= down).astype(np.float32) for part in tensors)
    total = (positives - negatives) * up if up == -down else positives * up + negatives * down
    assert np.array_equal(once(config, tensors, 3.0, 1 / 7), (total.astype(np.float64) * (3.0 * (1 / 7))).astype("f4"))


def test_once_what_reaches_the_mean_magnitude_of_its_block_is_sent_as_the_mean_of_what_was_sent() -> None:
    tensor = np.repeat(np.array([0, 3, -3, 1, 6, 5], np.float32), 16)
    found = once(TwoBitConfig(block_elements=32), [tensor, tensor], after=0.5)
    assert found.tolist() == [0.0] * 16 + [3.0] * 16 + [-3.0] * 16 + [0.0] * 16 + [6.0] * 16 + [0.0] * 16


def test_once_a_rank_without_anything_to_say_does_not_pull_the_level_down() -> None:
    tensor = np.full(64, 0.25, np.float32)
    found = once(TwoBitConfig(block_elements=64), [tensor, np.zeros_like(tensor), np.zeros_like(tensor)])
    assert found.tolist() == [0.25] * 64


def test_once_levels_of_different_size_are_weighed_by_their_use() -> None:
    one, two = np.full(64, 1, np.float32), np.array([3] * 32 + [0] * 32, np.float32)
    assert once(TwoBitConfig(block_elements=64), [one, two], 3.0).tolist() == [10.0] * 32 + [5.0] * 32


@pytest.mark.parametrize("ranks, least, most", [(1, 0.45, 0.46), (4, 0.45, 0.46)])
def test_once_tensors_of_equal_scale_come_back_with_the_error_that_the_documentation_tells(ranks: int, least: float,
                                                                                          most: float) -> None:
    tensors = np.random.default_rng(7).standard_normal((ranks, 100_000), np.float32)
    wanted = tensors.sum(axis=0)
    error = np.linalg.norm(once(TwoBitConfig(), list(tensors)) - wanted) / np.linalg.norm(wanted)
    assert least < error < most


@pytest.mark.parametrize("name", ["adaptive", "fixed"])
def test_once_an_element_that_is_not_finite_reaches_all_ranks(name: str) -> None:
    tensors = gradients(np.random.default_rng(2), 2, 1000)
    tensors[1][123], tensors[0][999] = np.inf, np.nan
    found = once(CONFIGURATIONS[name], tensors)
    lanes = np.flatnonzero(np.isnan(found)) % 16
    assert np.isnan(found[[123, 999]]).all() and set(lanes.tolist()) == {123 % 16, 999 % 16}
    assert np.isnan(found).sum() <= 2 * Digits(2, True).per_word


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("elements", [0, 1])
def test_once_the_smallest_tensors_come_back(name: str, elements: int) -> None:
    tensor = np.full(elements, 2, np.float32)
    assert once(CONFIGURATIONS[name], [tensor, tensor]).shape == (elements,)


# ---- what receivers check ------------------------------------------------------------------------------------------

def reduce_with(operation: Any, config: TwoBitConfig = CONFIGURATIONS["fixed"]) -> None:
    tensors = gradients(np.random.default_rng(3), 2, 100)
    words = operation([quantize_once(config, tensor, rank, 2) for rank, tensor in enumerate(tensors)], axis=0)
    sum_of(config, words, "t", 0, 2, np.empty(100, np.float32))


@pytest.mark.parametrize("operation, message", [
    (np.max, "tensor 't': the fingerprints of 2 ranks"), (np.min, "tensor 't': what came back to rank 0 is not a sum"),
    (np.prod, "not a sum"), (lambda parts, axis: 0 * parts[0], r"presence is \[0\.0, 0\.0\]; .*hvd.Sum or hvd.Average"),
    (lambda parts, axis: parts[0] + 2 * parts[1], "not a sum"),
    (lambda parts, axis: np.inf * parts[0], "not a sum"),
    (lambda parts, axis: parts[1], "not a sum"),
    (lambda parts, axis: parts[0][:-1], "words came back, but 100 elements of up to 2 ranks take"),
])
def test_what_is_not_a_sum_is_refused(operation: Any, message: str) -> None:
    with np.errstate(invalid="ignore"), pytest.raises(PayloadError, match=message):
        reduce_with(operation)


def test_other_arguments_on_another_rank_are_told() -> None:
    one, two = gradients(np.random.default_rng(4), 2, 100)
    words = quantize_once(TwoBitConfig(0.5, -0.5), one, 0, 2) + quantize_once(TwoBitConfig(0.25, -0.25), two, 1, 2)
    with pytest.raises(PayloadError, match="tensor 't': the fingerprints of 2 ranks .* give TwoBit the same arguments"):
        sum_of(TwoBitConfig(0.5, -0.5), words, "t", 0, 2, np.empty(100, np.float32))


def test_transport_and_buckets_are_no_part_of_what_ranks_must_have_in_common() -> None:
    config = CONFIGURATIONS["fixed"]
    one, two = gradients(np.random.default_rng(4), 2, 100)
    other = dataclasses.replace(config, transport="allreduce", bucket_cap_mb=1.0)
    words = quantize_once(config, one, 0, 2) + quantize_once(other, two, 1, 2)
    found, wanted = np.empty(100, np.float32), once(config, [one, two])
    sum_of(config, words, "t", 0, 2, found)
    assert np.array_equal(found, wanted)


def test_other_levels_on_another_rank_are_told_with_the_way_out() -> None:
    both = Ranks(CONFIGURATIONS["adaptive"], 2, 100)
    tensors = gradients(np.random.default_rng(5), 2, 100)
    both.summed(tensors, 1, 1)
    both.registries[1][1].scale(2)
    with pytest.raises(PayloadError, match=r"tensor 't': .* residuals\.take_shared\("):
        both.summed(tensors, 1, 1)
    both.registries[1][1].take_shared(both.registries[1][0].shared())
    both.summed(tensors, 1, 1)


def test_fingerprints_depend_on_all_bytes_and_where_parts_end() -> None:
    marks = [fingerprint(*parts) for parts in ((b"ab", b"c"), (b"a", b"bc"), (b"ab", b"d"), (b"abc",))]
    assert len(set(marks)) == 4 and all(0 <= mark < 2**24 for mark in marks)


def test_the_tail_lies_behind_the_codes() -> None:
    layout = DigitLayout(1000, 4, Digits(4, True), 3, 2)
    words = np.zeros(layout.size)
    layout.signature(words)[:] = layout.signed(2, 9)
    layout.write_table(words, np.array([1, 3, 5], np.float32), np.array([2, 4, 6], np.uint32))
    assert words[layout.tail_offset:].tolist() == [0, 0, 1, 0, 9, 1, 2, 3, 4, 5, 6]
    assert layout.tail_offset == Digits(4, True).word_count(1000)


def test_a_third_column_has_what_ranks_tell_that_selected_nothing() -> None:
    layout = DigitLayout(1000, 1, Digits(1, True), 2, 3)
    words = np.zeros(layout.size)
    layout.write_table(words, np.array([1.5, 2.5], np.float32), np.array([3, 0], np.uint32))
    assert layout.table(words).tolist() == [[1.5, 3, 0], [0, 0, 2.5]]

"""The kernels in NumPy: the definition of what the others compute, and the oracle of the tests.

Written to be read, one line per rule, with temporaries of the size of the gradient; training uses ``cpu.py``.

Source of the rule: MXNet 1.9.1, ``src/kvstore/gradient_compression-inl.h`` (codes, packing, residual), but for
non-finite elements, which MXNet keeps in the residual for ever and which are dropped and reported here.
"""

from __future__ import annotations

import numpy as np

from . import (
    CODE_NEGATIVE,
    CODE_NOT_FINITE,
    CODE_POSITIVE,
    CODE_ZERO,
    ELEMENTS_PER_WORD,
    SUM_CHUNK_ELEMENTS,
    Digits,
    Quantizer,
    Tallies,
    block_count,
    check_pack_counts_arguments,
    check_pack_digits_arguments,
    check_quantize_arguments,
    check_tallies_arguments,
    check_unpack_arguments,
    check_unpack_counts_arguments,
    check_unpack_digits_arguments,
    check_unpack_tallies_arguments,
)


def quantize_pack(gradient: np.ndarray, residual: np.ndarray, packed: np.ndarray,
                  quantizer: Quantizer) -> tuple[np.ndarray, np.ndarray]:
    """Add ``gradient`` to ``residual``, take out what two bits can say of it, and pack the codes.

    Args:
        gradient: float32[n], not changed.
        residual: float32[n], updated in place. Where the sum is not finite it keeps its value.
        packed: uint8[4 * ceil(n / 16)], overwritten; bits beyond element n are zero.
        quantizer: thresholds and levels, one per block.

    Returns:
        ``(selected_sum, selected_count)``, float32[blocks] and uint32[blocks]: sum and number of the magnitudes
        ``abs(residual + gradient)`` that got code 11 or 10, before the level was taken out.
    """
    check_quantize_arguments(gradient, residual, packed, quantizer)
    blocks = block_count(gradient.size, quantizer.block_elements)
    block_of = np.arange(gradient.size) // quantizer.block_elements
    with np.errstate(over="ignore", invalid="ignore"):
        total = residual + gradient
        finite = np.isfinite(total)
        positive = finite & (total >= quantizer.positive_threshold[block_of])
        negative = finite & ~positive & (total <= quantizer.negative_threshold[block_of])
        codes = np.full(gradient.size, CODE_ZERO, np.uint8)
        codes[positive], codes[negative], codes[~finite] = CODE_POSITIVE, CODE_NEGATIVE, CODE_NOT_FINITE
        residual[finite] = total[finite]
        residual[positive] -= quantizer.positive_level[block_of[positive]]
        residual[negative] -= quantizer.negative_level[block_of[negative]]
        magnitude = np.where(positive | negative, np.abs(total), np.float32(0))
        selected_sum = np.zeros(blocks, np.float32)
        selected_count = np.zeros(blocks, np.uint32)
        for block in range(blocks):
            start = block * quantizer.block_elements
            stop = start + quantizer.block_elements
            selected_sum[block] = sum_in_lanes(magnitude[start:stop])
            selected_count[block] = np.count_nonzero((positive | negative)[start:stop])
    packed[:] = _pack(codes)
    return selected_sum, selected_count


def unpack_sum(packed: np.ndarray, levels: np.ndarray, block_elements: int, out: np.ndarray,
               scale: float = 1.0) -> None:
    """Overwrite ``out`` with the sum of k ranks' codes times their levels, then scaled.

    Where all ranks have the same levels in a block the sum is a count times the level, so that it does not depend on
    the order of ranks; elsewhere contributions are added in rank order. Code 01 from any rank makes an element NaN.

    Args:
        packed: uint8[k, 4 * ceil(n / 16)]; rows may lie apart.
        levels: float32[k, blocks, 2], the positive and the negative level of each rank.
        block_elements: elements of a block, a multiple of 16.
        out: float32[n], overwritten.
        scale: what the float32 sum is multiplied by, in float64 and rounded to float32 once, as Horovod scales.
    """
    check_unpack_arguments(packed, levels, block_elements, out)
    ranks = packed.shape[0]
    codes = _unpack(packed)[:, :out.size]
    out[:] = 0
    with np.errstate(over="ignore", invalid="ignore"):
        for block in range(block_count(out.size, block_elements)):
            part = slice(block * block_elements, (block + 1) * block_elements)
            positive, negative = levels[:, block, 0], levels[:, block, 1]
            if ranks == 0:
                continue
            if np.all(positive == positive[0]) and np.all(negative == negative[0]):
                positives = np.count_nonzero(codes[:, part] == CODE_POSITIVE, axis=0)
                negatives = np.count_nonzero(codes[:, part] == CODE_NEGATIVE, axis=0)
                if positive[0] == -negative[0]:
                    out[part] = (positives - negatives).astype(np.float32) * positive[0]
                else:
                    out[part] = (positives.astype(np.float32) * positive[0]
                                 + negatives.astype(np.float32) * negative[0])
            else:
                for rank in range(ranks):
                    value = np.zeros(4, np.float32)
                    value[CODE_POSITIVE], value[CODE_NEGATIVE] = positive[rank], negative[rank]
                    out[part] += value[codes[rank, part]]
        if scale != 1.0:
            out[:] = (out.astype(np.float64) * scale).astype(np.float32)
    out[np.any(codes == CODE_NOT_FINITE, axis=0)] = np.nan


def pack_counts(packed: np.ndarray, bits: int, counts: np.ndarray) -> None:
    """Count the codes that k ranks sent for each element.

    Args:
        packed: uint8[k, 4 * words]; rows may lie apart.
        bits: 4, 8 or 16: a count is a signed integer, little-endian, of two elements of 4 bits the first in the low
            half of a byte. Its lowest value stands for NaN: a rank sent code 01.
        counts: uint8[1, 2 * bits * words], overwritten with how many sent 11 less how many sent 10; or uint8[2, ..]:
            how many sent 11, and how many sent 10. Rows may lie apart.
    """
    check_pack_counts_arguments(packed, bits, counts)
    codes = _unpack(packed)
    positives = np.count_nonzero(codes == CODE_POSITIVE, axis=0)
    negatives = np.count_nonzero(codes == CODE_NEGATIVE, axis=0)
    for plane, values in enumerate([positives - negatives] if len(counts) == 1 else [positives, negatives]):
        values[np.any(codes == CODE_NOT_FINITE, axis=0)] = -(1 << (bits - 1))
        counts[plane] = _packed_counts(values, bits)


def unpack_counts(counts: np.ndarray, bits: int, levels: np.ndarray, block_elements: int, out: np.ndarray,
                  scale: float = 1.0) -> None:
    """Overwrite ``out`` with what counts stand for: bit for bit what ``unpack_sum`` makes of the ranks' codes.

    Args:
        counts: uint8[1 or 2, 2 * bits * ceil(n / 16)], see ``pack_counts``.
        bits: bits of a count.
        levels: float32[blocks, 2], the positive and the negative level of all ranks. One plane of counts tells enough
            where they are each other's negative.
        block_elements: elements of a block, a multiple of 16.
        out: float32[n], overwritten.
        scale: as for ``unpack_sum``.
    """
    check_unpack_counts_arguments(counts, bits, levels, block_elements, out)
    if bits == 4:
        nibbles = np.stack([counts & 15, counts >> 4], axis=-1).reshape(len(counts), -1).astype(np.int8)
        values = (nibbles ^ 8) - 8
    else:
        values = np.ascontiguousarray(counts).view(f"<i{bits // 8}")
    values = values[:, :out.size]
    block_of = np.arange(out.size) // block_elements
    positive, negative = levels[block_of, 0], levels[block_of, 1]
    with np.errstate(over="ignore", invalid="ignore"):
        out[:] = values[0].astype(np.float32) * positive
        if len(values) == 2:
            apart = positive != -negative
            together = (values[0].astype(np.float32) - values[1].astype(np.float32)) * positive
            out[:] = np.where(apart, out + values[1].astype(np.float32) * negative, together)
        if scale != 1.0:
            out[:] = (out.astype(np.float64) * scale).astype(np.float32)
    out[np.any(values == -(1 << (bits - 1)), axis=0)] = np.nan


def pack_tallies(packed: np.ndarray, tallies: Tallies, words: np.ndarray) -> bool:
    """Overwrite ``words`` with the digits of packed codes.

    Args:
        packed: uint8[4 * n].
        tallies: see ``Tallies``.
        words: uint32[tallies.planes, tallies.integers(n)].

    Returns:
        Whether code 01 is among the codes.
    """
    check_tallies_arguments(packed, tallies, words)
    codes = _unpack(packed[None])[0].reshape(-1, ELEMENTS_PER_WORD)
    for plane, integers in enumerate(words):
        digit_of = np.zeros(4, np.uint32)
        if tallies.planes == 1:
            digit_of[[CODE_NEGATIVE, CODE_ZERO, CODE_NOT_FINITE, CODE_POSITIVE]] = 0, 1, 1, 2
        else:
            digit_of[[CODE_POSITIVE, CODE_NEGATIVE][plane]] = 1
        digits = np.zeros((integers.size // ELEMENTS_PER_WORD * tallies.per_integer, ELEMENTS_PER_WORD), np.uint32)
        digits[:len(codes)] = digit_of[codes]
        powers = np.array([tallies.radix ** k for k in range(tallies.per_integer)], np.uint32)
        integers[:] = (digits.reshape(-1, tallies.per_integer, ELEMENTS_PER_WORD)
                       * powers[:, None]).sum(axis=1, dtype=np.uint32).reshape(-1)
    return bool((codes == CODE_NOT_FINITE).any())


def unpack_tallies(words: np.ndarray, tallies: Tallies, contributors: int, bits: int, counts: np.ndarray) -> None:
    """Overwrite ``counts`` with those of the codes whose digits were added up.

    Args:
        words: uint32[tallies.planes, tallies.integers(n)]: the sum over ranks of what ``pack_tallies`` made.
        tallies: those of ``pack_tallies``.
        contributors: number of ranks whose words were added.
        bits: bits of a count, see ``pack_counts``.
        counts: uint8[tallies.planes, 2 * bits * n], without any NaN.
    """
    check_unpack_tallies_arguments(words, tallies, contributors, bits, counts)
    for integers, plane in zip(words, counts):
        digits = [integers // np.uint32(tallies.radix ** k) % np.uint32(tallies.radix)
                  for k in range(tallies.per_integer)]
        by_word = np.stack([digit.reshape(-1, ELEMENTS_PER_WORD) for digit in digits], axis=1).reshape(-1)
        values = by_word[:plane.size * 8 // bits].astype(np.int64) - (contributors if tallies.planes == 1 else 0)
        plane[:] = _packed_counts(values, bits)


def pack_digits(packed: np.ndarray, digits: Digits, words: np.ndarray) -> None:
    """Overwrite ``words`` with the digits of packed codes.

    Args:
        packed: uint8[4 * ceil(n / 16)].
        digits: see ``Digits``.
        words: float64[digits.word_count(n)], overwritten with whole numbers, or NaN where code 01 is among them.
    """
    check_pack_digits_arguments(packed, digits, words)
    digit_of = np.zeros(4)
    digit_of[CODE_POSITIVE], digit_of[CODE_NEGATIVE], digit_of[CODE_NOT_FINITE] = 1, digits.negative, np.nan
    padded = np.zeros((words.size // ELEMENTS_PER_WORD, digits.per_word, ELEMENTS_PER_WORD))
    padded.reshape(-1)[:4 * packed.size] = digit_of[_unpack(packed[None])[0]]
    words[:] = 0
    for digit in range(digits.per_word):
        words += padded[:, digit].reshape(-1) * float(digits.radix ** digit)


def unpack_digits(words: np.ndarray, digits: Digits, divisor: float, levels: np.ndarray, block_elements: int,
                  out: np.ndarray, scale: float = 1.0) -> None:
    """Overwrite ``out`` with the sum of levels that the sum of the ranks' words tells, then scaled.

    With the same levels on all ranks it is to the bit what ``unpack_sum`` makes of the ranks' codes, but for NaN, which
    takes all elements of its word.

    Args:
        words: float64[digits.word_count(n)]: what the ranks' words add up to, times ``divisor``.
        digits: those of ``pack_digits``.
        divisor: what is taken out of the words before they are rounded to whole numbers.
        levels: float32[blocks, 2], the positive and the negative level.
        block_elements: elements of a block, a multiple of 16.
        out: float32[n], overwritten.
        scale: what the float32 sum is multiplied by, in float64 and rounded to float32 once.
    """
    check_unpack_digits_arguments(words, digits, levels, block_elements, out)
    sums = np.zeros((words.size // ELEMENTS_PER_WORD, digits.per_word, ELEMENTS_PER_WORD))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        rest = np.rint(words / divisor) - sum(digits.middle * digits.radix ** digit for digit in range(digits.per_word))
        for digit in range(digits.per_word):
            higher = np.rint(rest / digits.radix)
            sums[:, digit] = (rest - higher * digits.radix + digits.middle).reshape(-1, ELEMENTS_PER_WORD)
            rest = higher
        total = sums.reshape(-1)[:out.size]
        positive, negative = levels[np.arange(out.size) // block_elements].T
        if digits.symmetric:
            out[:] = total.astype(np.float32) * positive
        else:
            negatives = np.floor(total / digits.negative)
            positives = total - negatives * digits.negative
            apart = positives.astype(np.float32) * positive + negatives.astype(np.float32) * negative
            out[:] = np.where(positive == -negative, (positives - negatives).astype(np.float32) * positive, apart)
        out[:] = (out.astype(np.float64) * scale).astype(np.float32)


def _packed_counts(values: np.ndarray, bits: int) -> np.ndarray:
    """Counts as ``pack_counts`` has them."""
    if bits == 4:
        return (values[0::2] & 15 | (values[1::2] & 15) << 4).astype(np.uint8)
    return values.astype(f"<i{bits // 8}").view(np.uint8)


def _pack(codes: np.ndarray) -> np.ndarray:
    """Codes of n elements to bytes: the first of four in the two highest bits, padded to whole words."""
    padded = np.zeros(-(-codes.size // ELEMENTS_PER_WORD) * ELEMENTS_PER_WORD, np.uint8)
    padded[:codes.size] = codes
    four = padded.reshape(-1, 4)
    return four[:, 0] << 6 | four[:, 1] << 4 | four[:, 2] << 2 | four[:, 3]


def _unpack(packed: np.ndarray) -> np.ndarray:
    """The inverse of ``_pack``, for k rows at a time: uint8[k, bytes] to codes uint8[k, 4 * bytes]."""
    codes = np.stack([packed >> 6 & 3, packed >> 4 & 3, packed >> 2 & 3, packed & 3], axis=-1)
    return codes.reshape(packed.shape[0], 4 * packed.shape[1])


def sum_in_lanes(magnitude: np.ndarray) -> np.float32:
    """Sum in the order that a vector unit adds: 16 float32 lanes within a chunk, chunks in float64.

    Rounding depends on the order, and backends must agree to the bit; this order is what a loop over 16-element
    words does without shuffling lanes.
    """
    total = 0.0
    for start in range(0, magnitude.size, SUM_CHUNK_ELEMENTS):
        chunk = magnitude[start:start + SUM_CHUNK_ELEMENTS]
        words = np.zeros(-(-chunk.size // ELEMENTS_PER_WORD) * ELEMENTS_PER_WORD, np.float32)
        words[:chunk.size] = chunk
        lanes = np.zeros(ELEMENTS_PER_WORD, np.float32)
        for word in words.reshape(-1, ELEMENTS_PER_WORD):
            lanes += word
        while lanes.size > 1:
            lanes = lanes[:lanes.size // 2] + lanes[lanes.size // 2:]
        total += float(lanes[0])
    with np.errstate(over="ignore"):
        return np.float32(total)

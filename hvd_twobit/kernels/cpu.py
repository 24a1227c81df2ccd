"""The kernels in Numba: what training uses. Bit-equal to ``reference.py``, at the speed of memory, on one thread.

The loops go over words of 16 elements, whose arithmetic ``vectors.py`` writes out; this file says which words, blocks
and ranks. Nothing checks bounds: the checks of arguments in ``__init__`` guard the loops. They release the GIL, use
no thread pool and no memory that grows with the gradient, neither reorder nor fuse float32 operations, do not depend
on whether the calling thread flushes subnormal numbers to zero, and may run in several threads at once.

Importing this module compiles all loops, 5 seconds on one core; the machine code is cached in ``__pycache__`` (or in
Numba's ``NUMBA_CACHE_DIR``) and later processes load it in 0.2 seconds. Where no directory is writable, every process
compiles. Each loop has exactly one signature, so that processes which start together write identical cache files.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numba import __version__ as numba_version
from numba import njit, types
from numba.core.registry import cpu_target

from . import (
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
    vectors,
)
from .vectors import (
    SHIFTS,
    add_word,
    append_digits,
    enter_ieee,
    leave_ieee,
    load_counts_4,
    load_counts_8,
    load_counts_16,
    open_words,
    pop_digits,
    push_digits,
    quantize_word,
    store_counts_4,
    store_counts_8,
    store_counts_16,
    store_word,
    take_digits_4,
    take_digits_8,
    take_digits_16,
)

_LOG = logging.getLogger(__name__)

_ONE, _ZERO = np.float32(1), np.float32(0)
_ALL_BITS = np.uint32(0xFFFFFFFF)


def quantize_pack(gradient: np.ndarray, residual: np.ndarray, packed: np.ndarray,
                  quantizer: Quantizer) -> tuple[np.ndarray, np.ndarray]:
    """Add ``gradient`` to ``residual``, take out what two bits can say of it, and pack the codes.

    Args:
        gradient: float32[n], not changed.
        residual: float32[n], updated in place. Where the sum is not finite it keeps its value.
        packed: uint8[4 * ceil(n / 16)], overwritten; bits beyond element n are zero.
        quantizer: thresholds and levels, one per block.

    Returns:
        ``(selected_sum, selected_count)``, float32[blocks] and uint32[blocks], as ``reference.quantize_pack``.

    Raises:
        ValueError: the arrays do not fit each other.
    """
    check_quantize_arguments(gradient, residual, packed, quantizer)
    blocks = block_count(gradient.size, quantizer.block_elements)
    selected_sum, selected_count = np.empty(blocks, np.float32), np.empty(blocks, np.uint32)
    _quantize_blocks(gradient, residual, packed, quantizer.block_elements,
                     quantizer.positive_threshold, quantizer.negative_threshold,
                     quantizer.positive_level, quantizer.negative_level, selected_sum, selected_count)
    return selected_sum, selected_count


def unpack_sum(packed: np.ndarray, levels: np.ndarray, block_elements: int, out: np.ndarray,
               scale: float = 1.0) -> None:
    """Overwrite ``out`` with the sum of k ranks' codes times their levels, then scaled.

    Args:
        packed: uint8[k, 4 * ceil(n / 16)]; rows may lie apart.
        levels: float32[k, blocks, 2], the positive and the negative level of each rank.
        block_elements: elements of a block, a multiple of 16.
        out: float32[n], overwritten.
        scale: what the float32 sum is multiplied by, in float64 and rounded to float32 once, as Horovod scales.

    Raises:
        ValueError: the arrays do not fit each other.
    """
    check_unpack_arguments(packed, levels, block_elements, out)
    scratch = np.empty(SUM_CHUNK_ELEMENTS + ELEMENTS_PER_WORD, np.float32)
    _unpack_blocks(packed, levels, block_elements, out, scale, scratch)


def pack_counts(packed: np.ndarray, bits: int, counts: np.ndarray) -> None:
    """Count the codes that k ranks sent for each element; see ``reference.pack_counts``.

    Args:
        packed: uint8[k, 4 * words]; rows may lie apart.
        bits: 4, 8 or 16.
        counts: uint8[1 or 2, 2 * bits * words], overwritten; rows may lie apart.

    Raises:
        ValueError: the arrays do not fit each other, or the bits are too few for k ranks.
    """
    check_pack_counts_arguments(packed, bits, counts)
    _count_codes(packed, bits, counts, np.empty(SUM_CHUNK_ELEMENTS, np.float32))


def unpack_counts(counts: np.ndarray, bits: int, levels: np.ndarray, block_elements: int, out: np.ndarray,
                  scale: float = 1.0) -> None:
    """Overwrite ``out`` with what counts stand for; see ``reference.unpack_counts``.

    Args:
        counts: uint8[1 or 2, 2 * bits * ceil(n / 16)]; rows may lie apart.
        bits: bits of a count.
        levels: float32[blocks, 2], the positive and the negative level of all ranks.
        block_elements: elements of a block, a multiple of 16.
        out: float32[n], overwritten.
        scale: as for ``unpack_sum``.

    Raises:
        ValueError: the arrays do not fit each other.
    """
    check_unpack_counts_arguments(counts, bits, levels, block_elements, out)
    scratch = np.empty(SUM_CHUNK_ELEMENTS + ELEMENTS_PER_WORD, np.float32)
    _weigh_counts(counts, bits, levels, block_elements, out, scale, scratch)


def pack_tallies(packed: np.ndarray, tallies: Tallies, words: np.ndarray) -> bool:
    """Overwrite ``words`` with the digits of packed codes; see ``reference.pack_tallies``.

    Args:
        packed: uint8[4 * n].
        tallies: see ``Tallies``.
        words: uint32[tallies.planes, tallies.integers(n)].

    Returns:
        Whether code 01 is among the codes.

    Raises:
        ValueError: the arrays do not fit each other.
    """
    check_tallies_arguments(packed, tallies, words)
    return bool(_tally_codes(packed, tallies.radix, tallies.per_integer, words))


def unpack_tallies(words: np.ndarray, tallies: Tallies, contributors: int, bits: int, counts: np.ndarray) -> None:
    """Overwrite ``counts`` with those of the codes whose digits were added up; see ``reference.unpack_tallies``.

    Args:
        words: uint32[tallies.planes, tallies.integers(n)].
        tallies: those of ``pack_tallies``.
        contributors: number of ranks whose words were added.
        bits: bits of a count.
        counts: uint8[tallies.planes, 2 * bits * n], overwritten; rows may lie apart.

    Raises:
        ValueError: the arrays do not fit each other, or the bits are too few for the ranks.
    """
    check_unpack_tallies_arguments(words, tallies, contributors, bits, counts)
    _count_digits(words, tallies.per_integer, tallies.multiplier, tallies.shift, tallies.radix,
                  contributors if tallies.planes == 1 else 0, bits, counts)


def pack_digits(packed: np.ndarray, digits: Digits, words: np.ndarray) -> None:
    """Overwrite ``words`` with the digits of packed codes.

    Args:
        packed: uint8[4 * ceil(n / 16)].
        digits: see ``Digits``.
        words: float64[digits.word_count(n)], overwritten with whole numbers, or NaN where code 01 is among them.

    Raises:
        ValueError: the arrays do not fit each other.
    """
    check_pack_digits_arguments(packed, digits, words)
    _pack_groups(packed, digits.per_word, digits.radix, digits.negative, words)


def unpack_digits(words: np.ndarray, digits: Digits, divisor: float, levels: np.ndarray, block_elements: int,
                  out: np.ndarray, scale: float = 1.0) -> None:
    """Overwrite ``out`` with the sum of levels that the sum of the ranks' words tells, then scaled.

    Args:
        words: float64[digits.word_count(n)]: what the ranks' words add up to, times ``divisor``.
        digits: those of ``pack_digits``.
        divisor: what is taken out of the words before they are rounded to whole numbers.
        levels: float32[blocks, 2], the positive and the negative level.
        block_elements: elements of a block, a multiple of 16.
        out: float32[n], overwritten.
        scale: what the float32 sum is multiplied by, in float64 and rounded to float32 once.

    Raises:
        ValueError: the arrays do not fit each other.
    """
    check_unpack_digits_arguments(words, digits, levels, block_elements, out)
    middles = float(sum(digits.middle * digits.radix ** digit for digit in range(digits.per_word)))
    group = np.empty(ELEMENTS_PER_WORD * digits.per_word, np.float32)
    _unpack_groups(words, digits.per_word, digits.radix, digits.negative, digits.middle, middles, divisor, levels,
                   block_elements, out, scale, group)


def _compiled(signature: Any) -> Callable[[Callable], Callable]:
    """Compile now for one signature; cached on disk, or where that fails (nothing is writable) for this process.

    The name of Numba's cache files gets a digest of all that the machine code depends on. Numba alone keeps that in
    an index which it writes before the code, and numbers the code's files: processes that start together after an
    update, or on different CPUs with one file system, could load each other's code.
    """
    def decorate(function: Callable) -> Callable:
        try:
            depends_on = (Path(__file__).read_bytes(), Path(vectors.__file__).read_bytes(), ELEMENTS_PER_WORD,
                          SUM_CHUNK_ELEMENTS, numba_version, cpu_target.target_context.codegen().magic_tuple())
            function.__qualname__ += "_" + hashlib.sha256(repr(depends_on).encode()).hexdigest()[:16]
            return njit(signature, nogil=True, cache=True)(function)
        except (RuntimeError, OSError) as error:
            _LOG.info("machine code of %s is not cached, every process compiles it: %s", function.__name__, error)
            return njit(signature, nogil=True)(function)

    return decorate


def _array(dtype: types.Type, dimensions: int, layout: Literal["A", "C"] = "C", readonly: bool = False) -> types.Array:
    return types.Array(dtype, dimensions, layout, readonly=readonly, aligned=False)


@njit
def _quantize_words(gradient, residual, start, stop, packed, byte, valid, thresholds, levels, lanes):
    """Quantize the whole words ``start`` to ``stop`` into ``packed[byte:]``; returns how many elements were selected.

    Bits of codes that are not in ``valid`` become zero.
    """
    selected = 0
    for element in range(start, stop, ELEMENTS_PER_WORD):
        selected += quantize_word(gradient, residual, element, packed, byte, valid, thresholds, levels, lanes)
        byte += 4
    return selected


@njit
def _quantize_part_of_word(gradient, residual, start, stop, packed, byte, thresholds, levels, lanes, padded):
    """Quantize the last ``stop - start`` < 16 elements by way of ``padded`` f32[2, 16]; returns how many selected."""
    padded_gradient, padded_residual = padded[0], padded[1]
    valid, begin, end = np.uint32(0), np.int64(0), np.int64(ELEMENTS_PER_WORD)
    for element in range(ELEMENTS_PER_WORD):
        inside = start + element < stop
        padded_gradient[element] = gradient[start + element] if inside else _ZERO
        padded_residual[element] = residual[start + element] if inside else _ZERO
        valid = np.uint32(valid | (np.uint32(3 if inside else 0) << np.uint32(SHIFTS[element])))
    selected = _quantize_words(padded_gradient, padded_residual, begin, end, packed, byte, valid, thresholds, levels,
                               lanes)
    for element in range(stop - start):
        residual[start + element] = padded_residual[element]
    return selected


@njit
def _add_lanes(lanes):
    """Sum of 16 float32 lanes by halving, as ``reference.py`` defines it."""
    width = ELEMENTS_PER_WORD // 2
    while width:
        for lane in range(width):
            lanes[lane] += lanes[lane + width]
        width //= 2
    return lanes[0]


@_compiled(types.void(_array(types.float32, 1, readonly=True), _array(types.float32, 1), _array(types.uint8, 1),
                      types.int64, *[_array(types.float32, 1, readonly=True)] * 4,
                      _array(types.float32, 1), _array(types.uint32, 1)))
def _quantize_blocks(gradient, residual, packed, block_elements, positive_threshold, negative_threshold,
                     positive_level, negative_level, selected_sum, selected_count):
    """Quantize block by block, and chunk by chunk of the sum within a block."""
    lanes = np.empty(ELEMENTS_PER_WORD, np.float32)
    padded = np.empty((2, ELEMENTS_PER_WORD), np.float32)
    environment = enter_ieee()
    for block in range(selected_sum.size):
        thresholds = (positive_threshold[block], negative_threshold[block])
        levels = (positive_level[block], negative_level[block])
        block_start = block * block_elements
        block_stop = min(block_start + block_elements, gradient.size)
        total, selected = np.float64(0), 0
        for start in range(block_start, block_stop, SUM_CHUNK_ELEMENTS):
            stop = min(start + SUM_CHUNK_ELEMENTS, block_stop)
            whole_stop = stop - stop % ELEMENTS_PER_WORD
            for lane in range(ELEMENTS_PER_WORD):
                lanes[lane] = _ZERO
            selected += _quantize_words(gradient, residual, start, whole_stop, packed, start // 4, _ALL_BITS,
                                        thresholds, levels, lanes)
            if whole_stop < stop:
                selected += _quantize_part_of_word(gradient, residual, whole_stop, stop, packed, whole_stop // 4,
                                                   thresholds, levels, lanes, padded)
            total += np.float64(_add_lanes(lanes))
        selected_sum[block] = np.float32(total)
        selected_count[block] = selected
    leave_ieee(environment)


@njit
def _have_equal_levels(levels, block):
    """Whether all ranks (one at least) have the same levels in this block."""
    for rank in range(levels.shape[0]):
        for side in range(2):
            if levels[rank, block, side] != levels[0, block, side]:
                return False
    return levels.shape[0] > 0


@njit
def _weigh(positives, negatives, positive_level, negative_level):
    """Sum of so many codes 11 and 10 (float32 counts), where all ranks have the same levels."""
    if positive_level == -negative_level:
        return (positives - negatives) * positive_level
    return positives * positive_level + negatives * negative_level


@njit
def _scaled(total, scale):
    """A float32 times a float64, rounded to float32 once."""
    return np.float32(np.float64(total) * scale)


@njit
def _decode_words(packed, rank, word, values, out):
    """Overwrite ``out``, whole words, with the values of one rank's codes from ``word`` on."""
    for i in range(out.size // ELEMENTS_PER_WORD):
        store_word(packed, rank, word + i, values, out, ELEMENTS_PER_WORD * i)


@njit
def _add_words(packed, rank, word, values, out):
    """Add to ``out``, whole words, the values of one rank's codes from ``word`` on."""
    for i in range(out.size // ELEMENTS_PER_WORD):
        add_word(packed, rank, word + i, values, out, ELEMENTS_PER_WORD * i)


@njit
def _add_ranks(packed, word, values, out):
    """Overwrite ``out`` with the sum over all ranks of the values of their codes."""
    _decode_words(packed, 0, word, values, out)
    for rank in range(1, packed.shape[0]):
        _add_words(packed, rank, word, values, out)


@njit
def _sum_words(packed, word, levels, block, equal, scale, out, counts):
    """Overwrite ``out``, whole words of one block, with the scaled sum of the ranks.

    ``counts`` is scratch, as long as ``out`` at least.
    """
    ranks = packed.shape[0]
    if not equal:
        for i in range(out.size):
            out[i] = _ZERO
        for rank in range(ranks):
            _add_words(packed, rank, word, (_ZERO, levels[rank, block, 1], levels[rank, block, 0]), out)
        for i in range(out.size):
            out[i] = _scaled(out[i], scale)
        return
    positive, negative = levels[0, block, 0], levels[0, block, 1]
    if ranks == 1:
        values = (_scaled(_weigh(_ZERO, _ZERO, positive, negative), scale),
                  _scaled(_weigh(_ZERO, _ONE, positive, negative), scale),
                  _scaled(_weigh(_ONE, _ZERO, positive, negative), scale))
        _decode_words(packed, 0, word, values, out)
    elif positive == -negative:
        _add_ranks(packed, word, (_ZERO, -_ONE, _ONE), out)
        for i in range(out.size):
            out[i] = _scaled(_weigh(out[i], _ZERO, positive, negative), scale)
    else:
        counts = counts[:out.size]
        _add_ranks(packed, word, (_ZERO, _ZERO, _ONE), out)
        _add_ranks(packed, word, (_ZERO, _ONE, _ZERO), counts)
        for i in range(out.size):
            out[i] = _scaled(_weigh(out[i], counts[i], positive, negative), scale)


@_compiled(types.void(_array(types.uint8, 2, "A", readonly=True), _array(types.float32, 3, readonly=True),
                      types.int64, _array(types.float32, 1), types.float64, _array(types.float32, 1)))
def _unpack_blocks(packed, levels, block_elements, out, scale, scratch):
    """Sum block by block, and by chunks that stay in the first-level cache while ranks are added.

    ``scratch`` f32[SUM_CHUNK_ELEMENTS + 16] is for counts, and at its end for the last word if that is not full.
    """
    last_word = scratch[SUM_CHUNK_ELEMENTS:]
    environment = enter_ieee()
    for block in range(levels.shape[1]):
        equal = _have_equal_levels(levels, block)
        block_start = block * block_elements
        block_stop = min(block_start + block_elements, out.size)
        for start in range(block_start, block_stop, SUM_CHUNK_ELEMENTS):
            stop = min(start + SUM_CHUNK_ELEMENTS, block_stop)
            whole_stop = stop - stop % ELEMENTS_PER_WORD
            _sum_words(packed, start // ELEMENTS_PER_WORD, levels, block, equal, scale, out[start:whole_stop], scratch)
            if whole_stop < stop:
                _sum_words(packed, stop // ELEMENTS_PER_WORD, levels, block, equal, scale, last_word, scratch)
                for i in range(stop - whole_stop):
                    out[whole_stop + i] = last_word[i]
    leave_ieee(environment)


@njit
def _store_counts(values, counts, plane, word, bits):
    """Write ``values``, whole words of counts as float32, as integers from ``word`` of a plane on."""
    for i in range(values.size // ELEMENTS_PER_WORD):
        byte = 2 * bits * (word + i)
        if bits == 4:
            store_counts_4(values, ELEMENTS_PER_WORD * i, counts, plane, byte)
        elif bits == 8:
            store_counts_8(values, ELEMENTS_PER_WORD * i, counts, plane, byte)
        else:
            store_counts_16(values, ELEMENTS_PER_WORD * i, counts, plane, byte)


@njit
def _load_counts(counts, plane, word, bits, out):
    """Overwrite ``out``, whole words, with the counts from ``word`` of a plane on, as float32."""
    for i in range(out.size // ELEMENTS_PER_WORD):
        byte = 2 * bits * (word + i)
        if bits == 4:
            load_counts_4(counts, plane, byte, out, ELEMENTS_PER_WORD * i)
        elif bits == 8:
            load_counts_8(counts, plane, byte, out, ELEMENTS_PER_WORD * i)
        else:
            load_counts_16(counts, plane, byte, out, ELEMENTS_PER_WORD * i)


@_compiled(types.void(_array(types.uint8, 2, "A", readonly=True), types.int64, _array(types.uint8, 2, "A"),
                      _array(types.float32, 1)))
def _count_codes(packed, bits, counts, scratch):
    """Count by chunks that stay in the first-level cache while ranks are added; ``scratch`` is as long as a chunk."""
    words = packed.shape[1] // 4
    for start in range(0, words, SUM_CHUNK_ELEMENTS // ELEMENTS_PER_WORD):
        stop = min(start + SUM_CHUNK_ELEMENTS // ELEMENTS_PER_WORD, words)
        values = scratch[:ELEMENTS_PER_WORD * (stop - start)]
        for plane in range(counts.shape[0]):
            if packed.shape[0] == 0:
                values[:] = _ZERO
            elif counts.shape[0] == 1:
                _add_ranks(packed, start, (_ZERO, -_ONE, _ONE), values)
            elif plane == 0:
                _add_ranks(packed, start, (_ZERO, _ZERO, _ONE), values)
            else:
                _add_ranks(packed, start, (_ZERO, _ONE, _ZERO), values)
            _store_counts(values, counts, plane, start, bits)


@njit
def _weigh_words(counts, word, bits, positive, negative, scale, out, negatives):
    """Overwrite ``out``, whole words of one block, with what counts from ``word`` on stand for.

    ``negatives`` is scratch, as long as ``out`` at least.
    """
    _load_counts(counts, 0, word, bits, out)
    if counts.shape[0] == 1:
        for i in range(out.size):
            out[i] = _scaled(out[i] * positive, scale)
        return
    negatives = negatives[:out.size]
    _load_counts(counts, 1, word, bits, negatives)
    for i in range(out.size):
        out[i] = _scaled(_weigh(out[i], negatives[i], positive, negative), scale)


@_compiled(types.void(_array(types.uint8, 2, "A", readonly=True), types.int64, _array(types.float32, 2, readonly=True),
                      types.int64, _array(types.float32, 1), types.float64, _array(types.float32, 1)))
def _weigh_counts(counts, bits, levels, block_elements, out, scale, scratch):
    """Weigh block by block and chunk by chunk; ``scratch`` as for ``_unpack_blocks``."""
    last_word = scratch[SUM_CHUNK_ELEMENTS:]
    environment = enter_ieee()
    for block in range(levels.shape[0]):
        positive, negative = levels[block, 0], levels[block, 1]
        block_start = block * block_elements
        block_stop = min(block_start + block_elements, out.size)
        for start in range(block_start, block_stop, SUM_CHUNK_ELEMENTS):
            stop = min(start + SUM_CHUNK_ELEMENTS, block_stop)
            whole_stop = stop - stop % ELEMENTS_PER_WORD
            _weigh_words(counts, start // ELEMENTS_PER_WORD, bits, positive, negative, scale, out[start:whole_stop],
                         scratch)
            if whole_stop < stop:
                _weigh_words(counts, stop // ELEMENTS_PER_WORD, bits, positive, negative, scale, last_word, scratch)
                for i in range(stop - whole_stop):
                    out[whole_stop + i] = last_word[i]
    leave_ieee(environment)


@_compiled(types.int64(_array(types.uint8, 1, readonly=True), types.int64, types.int64, _array(types.uint32, 2)))
def _tally_codes(packed, radix, per_integer, words):
    """Append digits group by group, the highest first; returns how many words have a code 01."""
    total = packed.size // 4
    factor = np.uint32(radix)
    not_finite = 0
    for plane in range(words.shape[0]):
        integers = words[plane]
        if words.shape[0] == 1:
            digits = (np.uint32(1), np.uint32(0), np.uint32(2))
        elif plane == 0:
            digits = (np.uint32(0), np.uint32(0), np.uint32(1))
        else:
            digits = (np.uint32(0), np.uint32(1), np.uint32(0))
        integers[:] = 0
        for group in range(integers.size // ELEMENTS_PER_WORD):
            first = group * per_integer
            for word in range(min(first + per_integer, total) - 1, first - 1, -1):
                append_digits(packed, 4 * word, digits, factor, integers, ELEMENTS_PER_WORD * group)
    for byte in range(packed.size):
        not_finite |= packed[byte] & ~(packed[byte] >> 1) & 0x55
    return not_finite


@_compiled(types.void(_array(types.uint32, 2, readonly=True), types.int64, *[types.uint32] * 4, types.int64,
                      _array(types.uint8, 2, "A")))
def _count_digits(words, per_integer, multiplier, shift, radix, offset, bits, counts):
    """Take groups of integers apart, the lowest digit first."""
    total = counts.shape[1] // (2 * bits)
    rest = np.empty(ELEMENTS_PER_WORD, np.uint32)
    for plane in range(words.shape[0]):
        for group in range(words.shape[1] // ELEMENTS_PER_WORD):
            for i in range(ELEMENTS_PER_WORD):
                rest[i] = words[plane, ELEMENTS_PER_WORD * group + i]
            first = group * per_integer
            for word in range(first, min(first + per_integer, total)):
                if bits == 4:
                    take_digits_4(rest, multiplier, shift, radix, offset, counts, plane, 2 * bits * word)
                elif bits == 8:
                    take_digits_8(rest, multiplier, shift, radix, offset, counts, plane, 2 * bits * word)
                else:
                    take_digits_16(rest, multiplier, shift, radix, offset, counts, plane, 2 * bits * word)


@_compiled(types.void(_array(types.uint8, 1, readonly=True), types.int64, types.float64, types.float64,
                      _array(types.float64, 1)))
def _pack_groups(packed, per_word, radix, negative, words):
    """Pack group by group, in each the highest digits first."""
    digits = (np.float64(0), negative, np.float64(1))
    environment = enter_ieee()
    for group in range(words.size // ELEMENTS_PER_WORD):
        start = group * ELEMENTS_PER_WORD
        for i in range(start, start + ELEMENTS_PER_WORD):
            words[i] = 0
        first = group * per_word
        for word in range(min(first + per_word, packed.size // 4) - 1, first - 1, -1):
            push_digits(packed, word, digits, radix, words, start)
    leave_ieee(environment)


@njit
def _weigh_digits(sums, negative, positive_level, negative_level, scale):
    """Turn sums of digits into scaled sums of levels, in place; ``negative`` is the digit of code 10."""
    if negative < 0:
        for i in range(sums.size):
            sums[i] = _scaled(sums[i] * positive_level, scale)
    else:
        for i in range(sums.size):
            negatives = np.floor(np.float64(sums[i]) / negative)
            positives = np.float64(sums[i]) - negatives * negative
            sums[i] = _scaled(_weigh(np.float32(positives), np.float32(negatives), positive_level, negative_level),
                              scale)


@_compiled(types.void(_array(types.float64, 1, readonly=True), types.int64, types.float64, types.float64,
                      types.float64, types.float64, types.float64, _array(types.float32, 2, readonly=True),
                      types.int64, _array(types.float32, 1), types.float64, _array(types.float32, 1)))
def _unpack_groups(words, per_word, radix, negative, middle, middles, divisor, levels, block_elements, out, scale,
                   last_group):
    """Unpack group by group, in each the lowest digits first. ``last_group`` f32[16 * per_word] is scratch."""
    rest = np.empty(ELEMENTS_PER_WORD, np.float64)
    inverse = 1 / radix
    environment = enter_ieee()
    for group in range(words.size // ELEMENTS_PER_WORD):
        start = group * per_word * ELEMENTS_PER_WORD
        stop = min(start + per_word * ELEMENTS_PER_WORD, out.size)
        whole = stop - start == per_word * ELEMENTS_PER_WORD
        sums = out[start:stop] if whole else last_group[:-(-(stop - start) // ELEMENTS_PER_WORD) * ELEMENTS_PER_WORD]
        open_words(words, group * ELEMENTS_PER_WORD, divisor, middles, rest)
        for i in range(0, sums.size, ELEMENTS_PER_WORD):
            pop_digits(rest, radix, inverse, middle, sums, i)
        i = 0
        while i < sums.size:
            block = (start + i) // block_elements
            end = min(sums.size, (block + 1) * block_elements - start)
            _weigh_digits(sums[i:end], negative, levels[block, 0], levels[block, 1], scale)
            i = end
        if not whole:
            out[start:stop] = sums[:stop - start]
    leave_ieee(environment)

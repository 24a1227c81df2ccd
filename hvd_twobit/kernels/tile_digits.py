"""The programs of the Triton backend that bring codes into numbers which Horovod can add, and what they tell out again.

A tile has a group per row: 16 numbers, one per column. What ``tiles.py`` says of programs holds here too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import TILE_WORDS, WORD, integers, launched, scaled, shifts, store_counts, weighed

ROUNDS = tl.constexpr(1.5 * 2.0**52)


@triton.jit
def _codes_of_words(packed, words, inside, shift):
    """The codes of a word per row, i32 tile: those of words that are not there are zero. ``shift``: see ``shifts``."""
    return (tl.load(packed + words, mask=inside, other=0)[:, None] >> shift) & 3


# ---- digits of 32-bit integers --------------------------------------------------------------------------------------

@launched
def tally(packed, words: tl.int64, per_integer: tl.int32, radix: tl.int32, tallies, plane_stride: tl.int64, found,
          PLANES: tl.constexpr):
    """Make integers of codes, the digits of the last word first.

    Args:
        packed, words: bytes of so many words.
        per_integer, radix: see ``kernels.Tallies``.
        tallies: i32, the first plane; the other is ``plane_stride`` further.
        found: a byte that becomes 1 where code 01 is among the codes.
    """
    first = tl.program_id(0).to(tl.int64) * TILE_WORDS
    groups = tl.arange(0, TILE_WORDS)
    left = tl.minimum(words - first * per_integer, per_integer * TILE_WORDS).to(tl.int32)
    packed = integers(packed) + first * per_integer
    shift = shifts(tl.arange(0, 16)[None, :])
    one = tl.zeros([TILE_WORDS, 16], tl.int32)
    other = tl.zeros([TILE_WORDS, 16], tl.int32)
    not_finite = tl.zeros([TILE_WORDS, 16], tl.int32)
    for i in range(0, per_integer):
        word = groups * per_integer + (per_integer - 1 - i)
        inside = word < left
        codes = _codes_of_words(packed, word, inside, shift)
        not_finite += tl.where(codes == 1, 1, 0)
        if PLANES == 1:
            digits = tl.where(codes == 3, 2, tl.where(codes == 2, 0, 1))
            one = one * radix + tl.where(inside[:, None], digits, 0)
        else:
            one = one * radix + tl.where(codes == 3, 1, 0)
            other = other * radix + tl.where(codes == 2, 1, 0)
    at = tallies + first * WORD + groups[:, None] * WORD + tl.arange(0, 16)[None, :]
    inside = (groups * per_integer < left)[:, None]
    tl.store(at, one, mask=inside)
    if PLANES == 2:
        tl.store(at + plane_stride, other, mask=inside)
    tl.store(found, 1, mask=tl.max(not_finite) > 0)


@launched
def count_tallies(tallies, words: tl.int64, per_integer: tl.int32, radix: tl.int32, multiplier: tl.int64,
                  shift: tl.int32, offset: tl.int32, counts, BITS: tl.constexpr):
    """Take the integers of one plane apart into counts, the lowest digits first.

    Args:
        tallies: i32.
        words: of codes that were counted.
        per_integer, radix, multiplier, shift: see ``kernels.Tallies``.
        offset: what a digit is more than its count.
        counts: bytes.
    """
    first = tl.program_id(0).to(tl.int64) * TILE_WORDS
    groups = tl.arange(0, TILE_WORDS)
    left = tl.minimum(words - first * per_integer, per_integer * TILE_WORDS).to(tl.int32)
    counts = integers(counts) + first * per_integer * (BITS // 2)
    at = tallies + first * WORD + groups[:, None] * WORD + tl.arange(0, 16)[None, :]
    rest = tl.load(at, mask=(groups * per_integer < left)[:, None], other=0).to(tl.uint32, bitcast=True)
    for i in range(0, per_integer):
        higher = tl.umulhi(rest, multiplier.to(tl.uint32)) >> (shift - 32).to(tl.uint32)
        digits = (rest - higher * radix.to(tl.uint32)).to(tl.int32, bitcast=True) - offset
        rest = higher
        words_of_digit = groups * per_integer + i
        store_counts(counts, digits, words_of_digit, words_of_digit < left, BITS)


# ---- digits of doubles ----------------------------------------------------------------------------------------------

@launched
def push_digits(packed, words: tl.int64, per_word: tl.int32, radix: tl.float64, negative: tl.float64, doubles):
    """Make doubles of codes, the digits of the last word first.

    Args:
        packed, words: bytes of so many words.
        per_word, radix, negative: see ``kernels.Digits``.
        doubles: float64.
    """
    first = tl.program_id(0).to(tl.int64) * TILE_WORDS
    groups = tl.arange(0, TILE_WORDS)
    left = tl.minimum(words - first * per_word, per_word * TILE_WORDS).to(tl.int32)
    packed = integers(packed) + first * per_word
    shift = shifts(tl.arange(0, 16)[None, :])
    total = tl.zeros([TILE_WORDS, 16], tl.float64)
    for i in range(0, per_word):
        word = groups * per_word + (per_word - 1 - i)
        codes = _codes_of_words(packed, word, word < left, shift)
        digits = tl.where(codes == 3, 1.0, tl.where(codes == 1, float("nan"), 0.0)).to(tl.float64)
        total = total * radix + tl.where(codes == 2, negative, digits)
    at = doubles + first * WORD + groups[:, None] * WORD + tl.arange(0, 16)[None, :]
    tl.store(at, total, mask=(groups * per_word < left)[:, None])


@triton.jit
def _rounded(doubles):
    """The nearest whole numbers of doubles that are at most 2**51."""
    return (doubles + ROUNDS) - ROUNDS


@launched
def pop_digits(doubles, elements: tl.int64, per_word: tl.int32, radix: tl.float64, inverse: tl.float64,
               negative: tl.float64, middle: tl.float64, middles: tl.float64, divisor: tl.float64, levels,
               words_per_block: tl.int32, out, scale: tl.float64, SYMMETRIC: tl.constexpr):
    """Take doubles apart into sums of digits, the lowest first, and overwrite ``out`` with what they stand for.

    Args:
        doubles: float64.
        elements: float32 elements of ``out``.
        per_word, radix, negative, middle: see ``kernels.Digits``.
        inverse: of the radix.
        middles: the number whose digits are all ``middle``.
        divisor: what doubles are divided by first.
        levels: float32, a pair per block of ``words_per_block`` words.
        SYMMETRIC: see ``kernels.Digits``.
    """
    first = tl.program_id(0).to(tl.int64) * TILE_WORDS
    groups = tl.arange(0, TILE_WORDS)
    columns = tl.arange(0, 16)[None, :]
    left = tl.minimum(elements - first * per_word * WORD, per_word * (TILE_WORDS * WORD)).to(tl.int32)
    out += first * per_word * WORD
    at = doubles + first * WORD + groups[:, None] * WORD + columns
    rest = tl.load(at, mask=(groups * per_word * WORD < left)[:, None], other=0.0)
    rest = _rounded(rest / divisor) - middles
    for i in range(0, per_word):
        higher = _rounded(rest * inverse)
        total = (rest - higher * radix) + middle
        rest = higher
        starts = (groups * per_word + i)[:, None] * WORD
        there = starts < left
        pairs = levels + 2 * ((first * per_word + groups * per_word + i) // words_per_block)[:, None]
        positive_level = tl.load(pairs, mask=there, other=0.0)
        if SYMMETRIC:
            total = total.to(tl.float32) * positive_level
        else:
            negatives = tl.floor(total / negative)
            positives = total - negatives * negative
            total = weighed(positives.to(tl.float32), negatives.to(tl.float32), positive_level,
                            tl.load(pairs + 1, mask=there, other=0.0))
        total = scaled(total, scale)
        # Apart, so that the mask of whole words is the same for all elements of a thread.
        tl.store(out + (starts + columns), total, mask=starts < left // WORD * WORD)
        if left % WORD > 0:
            tl.store(out + (starts + columns), total, mask=(starts == left // WORD * WORD) & (columns < left % WORD))

"""Calls the compiled kernels with every array between two pages that may not be touched; a touch ends the process.

Run as a module by test_kernels_bounds. Each size is tried with arrays that end right before the second page, and with
arrays that begin right behind the first one; results are compared with the definition's, on ordinary memory.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_twobit.kernels import (
    COUNT_BITS,
    Digits,
    Quantizer,
    Tallies,
    block_count,
    counts_nbytes,
    packed_nbytes,
    whole_tensor,
)

from .backends import BACKENDS, DEFINITION, OTHERS
from .guarded import Guarded

SIZES = [*range(71), 79, 80, 81, *range(1007, 1042), 2047, 2048, 2049, 4096, 4103]
"""Elements: all parts of words, and what lies around blocks and chunks of 1024."""

INTERPRETED_SIZES = [1041]
"""The same, but one: Triton's interpreter is slow."""

RANKS = (0, 1, 2, 3)

DIGITS = (Digits(2, symmetric=True), Digits(8, symmetric=False))


def main() -> None:
    """Try all sizes; with an argument, only prove that a touch ends the process."""
    memory = [Guarded() for _ in range(7)]
    if len(sys.argv) > 1:
        touched = ctypes.c_char.from_address(memory[0].beyond(sys.argv[1] == "end")).value
        raise SystemExit(f"the guard did not hold: {touched!r}")
    for name in OTHERS:
        _try(BACKENDS[name], memory, SIZES if name != "triton" else INTERPRETED_SIZES)


def _try(compiled: Any, memory: Sequence[Guarded], sizes: Sequence[int]) -> None:
    random = np.random.default_rng(0)
    tried = 0
    for elements, at_end in itertools.product(sizes, (True, False)):
        for block_elements in sorted({16, 48, 1024, whole_tensor(elements)}):
            _quantize(compiled, DEFINITION, random, memory, elements, block_elements, at_end)
            for ranks, equal in itertools.product(RANKS, (True, False)):
                _unpack(compiled, DEFINITION, random, memory, elements, block_elements, ranks, equal, at_end)
            for digits in DIGITS:
                _digits(compiled, DEFINITION, random, memory, elements, block_elements, digits, at_end)
            tried += 1 + 2 * len(RANKS) + 2 * len(DIGITS)
        for planes, bits in itertools.product((1, 2), COUNT_BITS):
            _count(compiled, DEFINITION, random, memory, elements, planes, bits, at_end)
            _tally(compiled, DEFINITION, random, memory, elements, Tallies((1 << (bits - 1)) - 1, planes), bits, at_end)
            tried += 4
    print(tried, "calls stayed within their arrays")


def _same(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray], of: Any) -> None:
    for one, other in zip(found, wanted):
        if one.tobytes() != other.tobytes():
            raise SystemExit(f"not what the definition says: {of}")


def _quantize(compiled: Any, definition: Any, random: np.random.Generator, memory: Sequence[Guarded], elements: int,
              block_elements: int, at_end: bool) -> None:
    gradient, residual = random.standard_normal((2, elements)).astype(np.float32)
    gradient[random.random(elements) < 0.02] = np.nan
    packed = np.full(packed_nbytes(elements), 0xAA, np.uint8)
    threshold = random.uniform(0.1, 2, block_count(elements, block_elements)).astype(np.float32)
    levels = [threshold, -threshold, 2 * threshold, -threshold]
    wanted = [residual.copy(), packed.copy()]
    wanted += definition.quantize_pack(gradient, *wanted, Quantizer(block_elements, *levels))
    placed = [guarded.place(content, at_end) for guarded, content in zip(memory, [gradient, residual, packed, *levels])]
    sums = compiled.quantize_pack(*placed[:3], Quantizer(block_elements, *placed[3:]))
    _same([placed[1], placed[2], *sums], wanted, (elements, block_elements, at_end))


def _unpack(compiled: Any, definition: Any, random: np.random.Generator, memory: Sequence[Guarded], elements: int,
            block_elements: int, ranks: int, equal: bool, at_end: bool) -> None:
    nbytes, apart = packed_nbytes(elements), 32
    # Payloads as they are received: codes begin behind a header, and the last ones end the memory.
    payloads = random.integers(0, 256, ranks * (apart + nbytes), np.uint8)
    level = random.uniform(0.1, 2, (1 if equal else ranks, block_count(elements, block_elements), 2))
    levels = np.ascontiguousarray(np.broadcast_to(level, (ranks, *level.shape[1:]))).astype(np.float32)
    out = np.full(elements, 7, np.float32)

    def codes(memory: np.ndarray) -> np.ndarray:
        rows = memory.reshape(ranks, apart + nbytes)
        return rows[:, apart:] if at_end else rows[:, :nbytes]

    wanted = out.copy()
    definition.unpack_sum(codes(payloads), levels, block_elements, wanted, 1 / 3)
    received, levels, out = (guarded.place(content, at_end)
                             for guarded, content in zip(memory, (payloads, levels, out)))
    compiled.unpack_sum(codes(received), levels, block_elements, out, 1 / 3)
    _same([out], [wanted], (elements, block_elements, ranks, equal, at_end))


def _count(compiled: Any, definition: Any, random: np.random.Generator, memory: Sequence[Guarded], elements: int,
           planes: int, bits: int, at_end: bool) -> None:
    packed = random.integers(0, 256, (2, packed_nbytes(elements)), np.uint8)
    counts = np.zeros((planes, counts_nbytes(packed.shape[1] // 4, bits)), np.uint8)
    levels = random.uniform(0.1, 2, (block_count(elements, 48), 2)).astype(np.float32)
    out = np.full(elements, 7, np.float32)
    wanted = [counts.copy(), out.copy()]
    definition.pack_counts(packed, bits, wanted[0])
    definition.unpack_counts(wanted[0], bits, levels, 48, wanted[1], 1 / 3)
    placed = [guarded.place(content.reshape(-1), at_end) for guarded, content in
              zip(memory, (packed, counts, levels, out))]
    packed, counts, levels = (flat.reshape(content.shape) for flat, content in zip(placed, (packed, counts, levels)))
    compiled.pack_counts(packed, bits, counts)
    compiled.unpack_counts(counts, bits, levels, 48, placed[3], 1 / 3)
    _same([counts, placed[3]], wanted, (elements, planes, bits, at_end))


def _tally(compiled: Any, definition: Any, random: np.random.Generator, memory: Sequence[Guarded], elements: int,
           tallies: Tallies, bits: int, at_end: bool) -> None:
    packed = random.integers(0, 256, packed_nbytes(elements), np.uint8)
    words = np.zeros((tallies.planes, tallies.integers(packed.size // 4)), np.uint32)
    counts = np.zeros((tallies.planes, counts_nbytes(packed.size // 4, bits)), np.uint8)
    wanted = [words.copy(), counts.copy()]
    definition.pack_tallies(packed, tallies, wanted[0])
    definition.unpack_tallies(wanted[0], tallies, 1, bits, wanted[1])
    placed = [guarded.place(content.reshape(-1), at_end) for guarded, content in zip(memory, (packed, words, counts))]
    words, counts = placed[1].reshape(words.shape), placed[2].reshape(counts.shape)
    compiled.pack_tallies(placed[0], tallies, words)
    compiled.unpack_tallies(words, tallies, 1, bits, counts)
    _same([words, counts], wanted, (elements, tallies, at_end))


def _digits(compiled: Any, definition: Any, random: np.random.Generator, memory: Sequence[Guarded], elements: int,
            block_elements: int, digits: Digits, at_end: bool) -> None:
    packed = random.integers(0, 256, packed_nbytes(elements), np.uint8)
    packed &= 0b10101010 | packed >> np.uint8(1)  # no code 01, which would make whole words NaN
    level = random.uniform(0.1, 2, block_count(elements, block_elements)).astype(np.float32)
    levels, out = np.stack([level, -level], axis=-1), np.full(elements, 7, np.float32)
    words = np.full(digits.word_count(elements), 7.0)
    wanted, sums = words.copy(), out.copy()
    definition.pack_digits(packed, digits, wanted)
    definition.unpack_digits(wanted, digits, 1.0, levels, block_elements, sums, 1 / 3)
    packed, words, levels, out = (guarded.place(content, at_end)
                                  for guarded, content in zip(memory, (packed, words, levels, out)))
    compiled.pack_digits(packed, digits, words)
    compiled.unpack_digits(words, digits, 1.0, levels, block_elements, out, 1 / 3)
    _same([words, out], [wanted, sums], (elements, block_elements, digits, at_end))


if __name__ == "__main__":
    main()

"""Every kernel of the Triton backend against the reference in NumPy, to the bit.

Integers, floats and codes are random, but for the numbers that arithmetic may treat differently from one processor or
compiler to the next: subnormal ones, infinities, NaNs, sums that overflow, and residuals at a threshold or right beside
it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from hvd_twobit import kernels
from hvd_twobit.kernels import Digits, Quantizer, Tallies, block_count, counts_nbytes, packed_nbytes, whole_tensor

from .arranging import ALIGNED, ARRANGEMENTS, REFERENCE, compared
from .checking import LeftOut, Setup

SPECIAL = np.concatenate([
    np.array([0.0, -0.0, np.inf, -np.inf, 3.4028235e38, -3.4028235e38, 1e-45, -1e-45, 1.1754942e-38, 3e38, -3e38],
             np.float32),
    np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFA12345], np.uint32).view(np.float32),  # NaNs, two signaling
])

WHOLE = 0
"""In lists of blocks: the whole tensor."""

SCALES = (1.0, 1 / 3, 1e-42)

BLOCKS = (16, 48, 512, 1024, 4096, WHOLE)
TAILS = range(34)
SIZES = (1008, 1023, 1024, 1025, 4096, 16 * 1024 + 5, 2 * 16 * 1024, 100_003)

SHIFTED = ARRANGEMENTS[1:]
SHIFTED_SIZES = (21, 5_008)
"""Fewer: Triton compiles a kernel anew for each kind of number and address, which takes a second or more."""

FEW_CASES = ((ALIGNED, 16, 35), (ARRANGEMENTS[-1], WHOLE, 35))
"""For an interpreter: arrangement, elements of a block, elements."""


def quantize_pack(setup: Setup) -> Iterator[str]:
    """All lengths of a last word, blocks of several sizes, all arrangements."""
    backend, random = kernels.load("triton"), setup.random()
    cases = [(ALIGNED, block_elements, elements) for block_elements in BLOCKS for elements in [*TAILS, *SIZES]]
    cases += itertools.product(SHIFTED, BLOCKS, SHIFTED_SIZES)
    for arrangement, block_elements, elements in cases if setup.full else FEW_CASES:
        gradient, residual, quantizer = quantized(random, elements, block_elements)
        packed = np.full(packed_nbytes(elements), 0x55, np.uint8)
        text = compared(backend, setup.device, arrangement, "quantize_pack", gradient, residual, packed, quantizer)
        yield text and f"{text} (blocks of {block_elements or 'all'})"


def unpack_sum(setup: Setup) -> Iterator[str]:
    """Ranks with the same levels, symmetrical or not, and with levels of their own; levels that are not finite."""
    backend, random = kernels.load("triton"), setup.random()
    cases = [(case, ranks) for case in itertools.product([ALIGNED], (16, 1024, WHOLE), [*TAILS, *SIZES])
             for ranks in (1, 3)]
    cases += itertools.product(itertools.product(SHIFTED, BLOCKS, SHIFTED_SIZES), (0, 1, 2, 9, 300))
    few = itertools.product(FEW_CASES, (1, 3))
    for number, ((arrangement, block_elements, elements), ranks) in enumerate(cases if setup.full else few):
        packed, scale = codes(random, ranks, elements), SCALES[number % len(SCALES)]
        for levels in levels_of(random, ranks, elements, block_elements):
            text = compared(backend, setup.device, arrangement, "unpack_sum", packed, levels,
                            block_elements or whole_tensor(elements), np.full(elements, 7, np.float32), scale)
            yield text and f"{text} (blocks of {block_elements or 'all'}, scale {scale})"


def counts(setup: Setup) -> Iterator[str]:
    """``pack_counts`` and ``unpack_counts``: all widths, one plane and two, any bytes as counts."""
    backend, random = kernels.load("triton"), setup.random()
    cases = [(case, 4, planes, 7) for case in itertools.product([ALIGNED], (16, WHOLE), [*TAILS, *SIZES])
             for planes in (1, 2)]
    cases += [(case, bits, planes, ranks) for case in itertools.product(SHIFTED, (16, 1024, WHOLE), SHIFTED_SIZES)
              for bits, ranks in ((4, 1), (8, 127), (16, 300)) for planes in (1, 2)]
    few = [(case, 4, planes, 3) for case in FEW_CASES for planes in (1, 2)]
    for number, (case, bits, planes, ranks) in enumerate(cases if setup.full else few):
        arrangement, block_elements, elements = case
        nbytes = counts_nbytes(packed_nbytes(elements) // 4, bits)
        yield compared(backend, setup.device, arrangement, "pack_counts", codes(random, ranks, elements), bits,
                       np.full((planes, nbytes), 0x55, np.uint8))
        counted = random.integers(0, 256, (planes, nbytes), np.uint8)
        for levels in levels_of(random, 1, elements, block_elements):
            text = compared(backend, setup.device, arrangement, "unpack_counts", counted, bits, levels[0],
                            block_elements or whole_tensor(elements), np.full(elements, 7, np.float32),
                            SCALES[number % len(SCALES)])
            yield text and f"{text} (blocks of {block_elements or 'all'})"


def tallies(setup: Setup) -> Iterator[str]:
    """``pack_tallies`` and ``unpack_tallies``, of a few ranks and of many."""
    backend, random = kernels.load("triton"), setup.random()
    sizes, all_ranks = ([0, 1, 17, 5008, 40_003], [1, 2, 3, 7, 100]) if setup.full else ([33], [3])
    where = ARRANGEMENTS if setup.full else SHIFTED[1:]
    for ranks, planes, arrangement in itertools.product(all_ranks, (1, 2), where):
        made, bits = Tallies(ranks, planes), kernels.count_bits(ranks)
        for elements in sizes:
            words = packed_nbytes(elements) // 4
            integers = np.zeros((ranks, planes, made.integers(words)), np.uint32)
            for share, of_rank in zip((1.0, 0.0), (0, ranks - 1)):
                packed = codes(random, 1, elements, not_finite=share)[0]
                yield compared(backend, setup.device, arrangement, "pack_tallies", packed, made, integers[of_rank])
            for of_rank in integers:
                REFERENCE.pack_tallies(codes(random, 1, elements)[0], made, of_rank)
            total = integers.sum(axis=0, dtype=np.uint32)
            into = np.full((planes, counts_nbytes(words, bits)), 0x55, np.uint8)
            yield compared(backend, setup.device, arrangement, "unpack_tallies", total, made, ranks, bits, into)


def digits(setup: Setup) -> Iterator[str]:
    """``pack_digits`` and ``unpack_digits``, with and without a factor that is taken out again."""
    backend, random = kernels.load("triton"), setup.random()
    sizes, all_ranks = ([0, 1, 17, 5008, 40_003], [1, 2, 5, 64]) if setup.full else ([33], [3])
    where = ARRANGEMENTS if setup.full else SHIFTED[1:]
    for ranks, symmetric, arrangement in itertools.product(all_ranks, (True, False), where):
        made = Digits(ranks, symmetric)
        for number, elements in enumerate(sizes):
            words = np.zeros((ranks, made.word_count(elements)))
            packed = codes(random, ranks, elements, not_finite=0.001)
            yield compared(backend, setup.device, arrangement, "pack_digits", packed[0], made, words[0])
            for of_rank, into in zip(packed, words):
                REFERENCE.pack_digits(of_rank, made, into)
            divisor = (1.0, 1 / ranks)[number % 2]
            block_elements = (16, 1024, WHOLE)[number % 3]
            symmetrical, asymmetrical, *_ = levels_of(random, 1, elements, block_elements)
            levels = (symmetrical if symmetric else asymmetrical)[0]
            yield compared(backend, setup.device, arrangement, "unpack_digits", divisor * words.sum(axis=0), made,
                           divisor, levels, block_elements or whole_tensor(elements), np.full(elements, 7, np.float32),
                           SCALES[number % len(SCALES)])


def other_device(setup: Setup) -> Iterator[str]:
    """Kernels of the second GPU, while the first one is PyTorch's current device."""
    setup.needs_gpu("other devices")
    backend, random = kernels.load("triton"), setup.random()
    others = [torch.device("cuda", number) for number in range(torch.cuda.device_count())
              if number != torch.cuda.current_device()]
    if not others:
        raise LeftOut("there is one GPU only")
    for device in others[:1]:
        gradient, residual, quantizer = quantized(random, 5000, 1024)
        packed = np.zeros(packed_nbytes(5000), np.uint8)
        yield compared(backend, device, ALIGNED, "quantize_pack", gradient, residual, packed, quantizer)
        for levels in levels_of(random, 3, 5000, 1024):
            yield compared(backend, device, ALIGNED, "unpack_sum", codes(random, 3, 5000), levels, 1024,
                           np.zeros(5000, np.float32), 0.5)


# ---- what goes in ---------------------------------------------------------------------------------------------------

def quantized(random: np.random.Generator, elements: int,
              block_elements: int) -> tuple[np.ndarray, np.ndarray, Quantizer]:
    """A gradient, a residual, and thresholds and levels of every block (0: the whole tensor is one)."""
    blocks = block_count(elements, block_elements or whole_tensor(elements))
    up, down = random.uniform(0.25, 2, (2, blocks)).astype(np.float32)
    tiny = random.random(blocks) < 0.2
    up[tiny], down[tiny] = np.float32(3e-42), np.float32(5e-42)
    factors = random.uniform(0.5, 2, (2, blocks)).astype(np.float32)
    quantizer = Quantizer(block_elements or whole_tensor(elements), up, -down, up * factors[0], -down * factors[1])
    gradient = random.standard_normal(elements, np.float32)
    residual = random.standard_normal(elements, np.float32)
    block_of = np.arange(elements) // quantizer.block_elements
    small = tiny[block_of]
    gradient[small] *= np.float32(5e-42)
    residual[small] *= np.float32(5e-42)
    which = random.integers(0, 8, elements)
    gradient[which == 0] = random.choice(SPECIAL, np.count_nonzero(which == 0))
    residual[which == 1] = random.choice(SPECIAL[np.isfinite(SPECIAL)], np.count_nonzero(which == 1))
    at = which == 2  # At a threshold, and at the next numbers on both sides of it.
    threshold = np.where(random.random(elements) < 0.5, quantizer.positive_threshold[block_of],
                         quantizer.negative_threshold[block_of])
    beside = random.choice([-np.inf, 0, np.inf], elements).astype(np.float32)
    near = np.where(beside == 0, threshold, np.nextafter(threshold, beside)).astype(np.float32)
    residual[at], gradient[at] = 0, near[at]
    return gradient, residual, quantizer


def codes(random: np.random.Generator, ranks: int, elements: int, not_finite: float = 0.02) -> np.ndarray:
    """Packed codes of ranks, uint8[ranks, 4 * words]: about this share is 01, the others are equally often the rest."""
    drawn = random.choice(np.array([0b00, 0b10, 0b11, 0b01], np.uint8), (ranks, elements),
                          p=[*[(1 - not_finite) / 3] * 3, not_finite])
    padded = np.zeros((ranks, 4 * packed_nbytes(elements)), np.uint8)
    padded[:, :elements] = drawn
    quadruples = padded.reshape(ranks, packed_nbytes(elements), 4)
    return np.bitwise_or.reduce(quadruples << np.array([6, 4, 2, 0], np.uint8), axis=2)


def levels_of(random: np.random.Generator, ranks: int, elements: int, block_elements: int) -> Sequence[np.ndarray]:
    """Levels float32[ranks, blocks, 2]: symmetrical, not so, of each rank its own, and of special numbers."""
    blocks = block_count(elements, block_elements or whole_tensor(elements))
    same = random.uniform(0.25, 2, (1, blocks, 1)).astype(np.float32)
    symmetrical = np.repeat(np.concatenate([same, -same], axis=2), ranks, axis=0)
    asymmetrical = symmetrical * np.array([1, 0.3], np.float32)
    by_rank = (symmetrical * random.uniform(0.5, 2, (ranks, blocks, 1))).astype(np.float32)
    special = random.choice(np.append(SPECIAL, np.array([0.5, -0.5], np.float32)), (ranks, blocks, 2))
    return symmetrical, asymmetrical, by_rank, special

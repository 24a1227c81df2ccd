"""The kernel interface: a few functions, implemented once per backend, bit-equal to each other.

``load(name)`` returns the module of a backend. A backend is imported when it is asked for and not before: ``"numpy"``
is the definition (the oracle of the tests), ``"numba"`` the one that training uses for arrays, ``"triton"`` the one for
tensors of PyTorch on a GPU, for which Triton has to be installed. Each has::

    quantize_pack(gradient, residual, packed, quantizer) -> (selected_sum, selected_count)
    unpack_sum(packed, levels, block_elements, out, scale=1.0) -> None
    pack_counts(packed, bits, counts) -> None
    unpack_counts(counts, bits, levels, block_elements, out, scale=1.0) -> None
    pack_tallies(packed, tallies, words) -> bool
    unpack_tallies(words, tallies, contributors, bits, counts) -> None
    pack_digits(packed, digits, words) -> None
    unpack_digits(words, digits, divisor, levels, block_elements, out, scale=1.0) -> None

``pack_counts`` and ``unpack_counts`` are ``unpack_sum`` in two halves with bytes between them: how many ranks sent
which code, which is what one rank sums for all, and what that means. The last four bring codes into numbers that
Horovod's allreduce can add, and counts or levels out of what it made of them: 32-bit integers where it adds and no more
(``Tallies``), float64 where it also multiplies by factors that the sender does not know (``Digits``).

Arrays are C-contiguous NumPy arrays that the caller allocated, of any length (0 included); only the rows of ``packed``
and ``counts`` may lie apart, so that payloads are read where they were received.

``"triton"`` has torch tensors of one device instead, int32 where arrays are uint32, and a ``Quantizer`` of tensors. Its
functions return before the device is done, and return tensors: ``pack_tallies`` a bool[]. It has the first two and
``unpack_counts`` also for all runs of a payload at once: ``Runs``, ``quantize_pack_runs``, ``unpack_sum_runs`` and
``unpack_counts_runs``.

This file holds what the backends share: ``Quantizer``, ``Tallies`` and ``Digits``, the size of packed codes, the codes,
and the checks of arguments that all make before a loop runs without bounds checks.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import types
from typing import Any

import numpy as np

CODE_ZERO = 0b00
CODE_NOT_FINITE = 0b01
CODE_NEGATIVE = 0b10
CODE_POSITIVE = 0b11

ELEMENTS_PER_WORD = 16
"""Elements in one 32-bit word of packed codes; a tensor is padded to whole words."""

SUM_CHUNK_ELEMENTS = 1024
"""``selected_sum`` adds float32 lanes within chunks of this many elements, and chunks in float64."""

_SELECTED_IN_BYTE = np.array([bin(byte & 0b10101010).count("1") for byte in range(256)], np.uint8)

COUNT_BITS = (4, 8, 16)
"""Bits that a count may take. Its lowest value stands for NaN, so that b bits are enough for 2^(b-1) - 1 ranks."""

BACKENDS = {"numpy": "reference", "numba": "cpu", "triton": "triton"}
"""Name of each backend and of its module here. The first is the definition; CONTRIBUTING.md tells how to add one."""

DEFAULT_BACKEND = "numba"
"""What training uses."""


def load(name: str) -> types.ModuleType:
    """Return the backend module called ``name``, one of ``BACKENDS``, importing it if need be.

    Raises:
        KeyError: there is no backend of that name.
        ImportError: what it is written in is not installed.
    """
    if name not in BACKENDS:
        raise KeyError(f"no kernel backend is called {name!r}: choose one of {', '.join(sorted(BACKENDS))}")
    return importlib.import_module(f"{__name__}.{BACKENDS[name]}")


def packed_nbytes(elements: int) -> int:
    """Bytes of the packed codes of a tensor: four for every 16 elements or part of them."""
    return 4 * (-(-elements // ELEMENTS_PER_WORD))


def selected(packed: np.ndarray) -> int:
    """How many of some packed codes, uint8[4 * words], are 11 or 10."""
    return int(_SELECTED_IN_BYTE[packed].sum(dtype=np.int64))


def count_bits(ranks: int) -> int:
    """Bits of the counts of codes that so many ranks sent.

    Raises:
        ValueError: there are more ranks than the widest count can tell.
    """
    for bits in COUNT_BITS:
        if ranks < 1 << (bits - 1):
            return bits
    raise ValueError(f"{ranks} ranks are more than a count of {COUNT_BITS[-1]} bits can tell")


def counts_nbytes(words: int, bits: int) -> int:
    """Bytes of one plane of counts for so many words of packed codes."""
    return words * ELEMENTS_PER_WORD * bits // 8


def block_count(elements: int, block_elements: int) -> int:
    """Number of blocks of a tensor; an empty tensor has one block, so that its levels have a place."""
    return max(1, -(-elements // block_elements))


def whole_tensor(elements: int) -> int:
    """``block_elements`` of a tensor that is one block."""
    return max(ELEMENTS_PER_WORD, 4 * packed_nbytes(elements))


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """Where one tensor's elements are decided and what their codes stand for, per block.

    The four are arrays of the kind that the backend takes.

    Attributes:
        block_elements: elements of a block, a multiple of 16; the length of the tensor or more means one block.
        positive_threshold: float32[blocks], > 0; a residual at or above it gets code 11.
        negative_threshold: float32[blocks], < 0; a residual at or below it gets code 10.
        positive_level: float32[blocks], > 0; what code 11 takes out of the residual and means to the receiver.
        negative_level: float32[blocks], < 0; the same for code 10.
    """

    block_elements: int
    positive_threshold: Any
    negative_threshold: Any
    positive_level: Any
    negative_level: Any

    def __post_init__(self) -> None:
        check_block_elements(self.block_elements)

    @classmethod
    def fixed(cls, positive: float, negative: float, elements: int) -> Quantizer:
        """One block, decided at the levels themselves, as MXNet does."""
        up, down = np.full(1, positive, np.float32), np.full(1, negative, np.float32)
        return cls(whole_tensor(elements), up, down, up, down)


@dataclasses.dataclass(frozen=True)
class Tallies:
    """How codes become digits of 32-bit integers, so that a sum of the integers is the sum of every digit.

    An integer is ``sum(digit[k] * radix ** k)``, below 2^32 also when those of all ranks are added, so no digit carries
    into the next. With one plane the digits of codes 10, 00 and 11 are 0, 1 and 2: their sum, less one for every rank
    that contributed, is how many sent 11 less how many sent 10. With two planes one counts codes 11, the other codes
    10. Code 01 has the digit of 00: who sends it has to tell by other means.

    A *group* is ``per_integer`` consecutive words of 16 codes, in 16 integers: digit k of integer i is element i of
    word k. The last group is as long as the others; words that are not there are zero.

    Attributes:
        ranks: the most ranks that may contribute.
        planes: 1 or 2.
    """

    ranks: int
    planes: int

    @property
    def radix(self) -> int:
        """Number of different sums of digits."""
        return 2 * self.ranks + 1 if self.planes == 1 else self.ranks + 1

    @functools.cached_property
    def per_integer(self) -> int:
        """Digits of an integer, 1 or more: as many as fit and as ``multiplier`` can take apart."""
        digits = 1
        while self.radix ** (digits + 1) <= 2**32 and self._is_exact_below(self.radix ** (digits + 1)):
            digits += 1
        return digits

    @property
    def shift(self) -> int:
        """See ``multiplier``."""
        return 31 + (self.radix - 1).bit_length()

    @property
    def multiplier(self) -> int:
        """Below 2^32; ``x * multiplier >> shift`` is ``x // radix`` for every sum x of the ranks' integers.

        Source: T. Granlund, P. Montgomery, "Division by invariant integers using multiplication", 1994.
        """
        return 2**self.shift // self.radix + 1

    def _is_exact_below(self, limit: int) -> bool:
        error = self.multiplier * self.radix - 2**self.shift
        return (limit - 1) * error < 2**self.shift

    def integers(self, words: int) -> int:
        """Integers of one plane for so many words of codes."""
        return ELEMENTS_PER_WORD * (-(-words // self.per_integer))


@dataclasses.dataclass(frozen=True)
class Digits:
    """How codes become digits of float64 words, so that a sum of the words is the sum of every digit.

    A word is the number ``sum(digit[k] * radix ** k)``. The radix has room for every sum of digits that ``ranks`` ranks
    can make, so no digit ever carries into the next. Where levels are ``symmetric``, code 11 is the digit 1 and code 10
    the digit -1, and their sum is a difference of counts, -ranks to ranks; otherwise code 10 is the digit ranks + 1,
    and the sum tells both counts. Code 01 makes the word NaN, and with it all elements of the word.

    A *group* is ``16 * per_word`` consecutive elements, in 16 words: digit k of word i is element ``16 * k + i`` of the
    group. The last group is as long as the others; elements that are not there are zero.

    How many digits a word holds: Horovod multiplies before and after it adds, by factors that the sender does not know.
    With u = 2**-53 and every word at most B, the roundings of the first product (n * u * B), of the additions (at most
    u * B * (2 + 3 + ... + n)), of the second product, of the factor that the receiver finds and of its division (n * u
    * B each) are together less than ``u * B * n * (n + 9) / 2``. Where that is not above 1/2, the receiver's rounding
    to the nearest whole number gives exactly the sum.

    Attributes:
        ranks: the most ranks that may contribute.
        symmetric: whether negative levels are the positive ones but for the sign.
    """

    ranks: int
    symmetric: bool

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"digits are of one rank or more, not of {self.ranks}")

    @property
    def negative(self) -> int:
        """The digit of code 10; that of code 11 is 1."""
        return -1 if self.symmetric else self.ranks + 1

    @property
    def middle(self) -> int:
        """Half way between the lowest and the highest sum of digits."""
        return 0 if self.symmetric else self.ranks * (self.ranks + 1) // 2

    @property
    def radix(self) -> int:
        """Number of different sums of digits, which is odd."""
        return 2 * self.ranks + 1 if self.symmetric else 2 * self.middle + 1

    @functools.cached_property
    def per_word(self) -> int:
        """Digits of a word."""
        digits, largest = 1, abs(self.negative)
        while (largest * self.radix + abs(self.negative)) * self.ranks * (self.ranks + 9) <= 2**53:
            digits, largest = digits + 1, largest * self.radix + abs(self.negative)
        return digits

    def word_count(self, elements: int) -> int:
        """Words of a tensor of so many elements."""
        return ELEMENTS_PER_WORD * (-(-elements // (ELEMENTS_PER_WORD * self.per_word)))


def check_quantize_arguments(gradient: np.ndarray, residual: np.ndarray, packed: np.ndarray,
                             quantizer: Quantizer) -> None:
    """Raise ValueError unless the arrays of ``quantize_pack`` fit each other and the quantizer."""
    _check_array("gradient", gradient, np.float32, (gradient.size,))
    _check_array("residual", residual, np.float32, (gradient.size,))
    _check_array("packed", packed, np.uint8, (packed_nbytes(gradient.size),))
    blocks = block_count(gradient.size, quantizer.block_elements)
    for field in ("positive_threshold", "negative_threshold", "positive_level", "negative_level"):
        _check_array(field, getattr(quantizer, field), np.float32, (blocks,))


def check_unpack_arguments(packed: np.ndarray, levels: np.ndarray, block_elements: int, out: np.ndarray) -> None:
    """Raise ValueError unless the arrays of ``unpack_sum`` fit each other."""
    check_block_elements(block_elements)
    _check_array("out", out, np.float32, (out.size,))
    _check_rows("packed", packed, packed_nbytes(out.size))
    blocks = block_count(out.size, block_elements)
    _check_array("levels", levels, np.float32, (packed.shape[0], blocks, 2))


def check_pack_counts_arguments(packed: np.ndarray, bits: int, counts: np.ndarray) -> None:
    """Raise ValueError unless the arrays of ``pack_counts`` fit each other, and counts can tell of all ranks."""
    if bits not in COUNT_BITS or bits < count_bits(packed.shape[0]):
        raise ValueError(f"counts of {packed.shape[0]} ranks cannot have {bits} bits")
    _check_rows("packed", packed, 4 * (packed.shape[-1] // 4))
    _check_rows("counts", counts, counts_nbytes(packed.shape[1] // 4, bits))
    check_planes(len(counts))


def check_unpack_counts_arguments(counts: np.ndarray, bits: int, levels: np.ndarray, block_elements: int,
                                  out: np.ndarray) -> None:
    """Raise ValueError unless the arrays of ``unpack_counts`` fit each other."""
    if bits not in COUNT_BITS:
        raise ValueError(f"bits must be one of {COUNT_BITS}, not {bits}")
    check_block_elements(block_elements)
    _check_array("out", out, np.float32, (out.size,))
    _check_rows("counts", counts, counts_nbytes(packed_nbytes(out.size) // 4, bits))
    check_planes(len(counts))
    _check_array("levels", levels, np.float32, (block_count(out.size, block_elements), 2))


def check_tallies_arguments(packed: np.ndarray, tallies: Tallies, words: np.ndarray) -> None:
    """Raise ValueError unless the arrays of ``pack_tallies`` fit each other."""
    _check_array("packed", packed, np.uint8, (4 * (packed.size // 4),))
    _check_array("words", words, np.uint32, (tallies.planes, tallies.integers(packed.size // 4)))


def check_unpack_tallies_arguments(words: np.ndarray, tallies: Tallies, contributors: int, bits: int,
                                   counts: np.ndarray) -> None:
    """Raise ValueError unless the arrays of ``unpack_tallies`` fit each other, and counts can tell of all ranks."""
    check_tallied(tallies, contributors, bits, len(counts))
    codes = counts.shape[-1] // counts_nbytes(1, bits)
    _check_rows("counts", counts, counts_nbytes(codes, bits))
    _check_array("words", words, np.uint32, (tallies.planes, tallies.integers(codes)))


def check_tallied(tallies: Tallies, contributors: int, bits: int, planes: int) -> None:
    """Raise ValueError unless so many ranks can have added tallies up, and such counts tell of all ranks."""
    if bits not in COUNT_BITS or bits < count_bits(tallies.ranks):
        raise ValueError(f"counts of {tallies.ranks} ranks cannot have {bits} bits")
    if not 0 <= contributors <= tallies.ranks:
        raise ValueError(f"{contributors} of {tallies.ranks} ranks cannot have contributed")
    if planes != tallies.planes:
        raise ValueError(f"counts has {planes} planes, but tallies have {tallies.planes}")


def check_symmetry(levels: np.ndarray, digits: Digits) -> None:
    """Raise ValueError unless levels, float32[blocks, 2], are each other's negative where digits take them for that."""
    if digits.symmetric and not np.array_equal(levels[:, 1], -levels[:, 0], equal_nan=True):
        raise ValueError("levels are not symmetric, but the digits are")


def check_planes(planes: int) -> None:
    """Raise ValueError unless counts may have so many planes."""
    if planes not in (1, 2):
        raise ValueError(f"counts has {planes} planes, but must have one, of differences, or two")


def _check_rows(name: str, rows: np.ndarray, nbytes: int) -> None:
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != nbytes:
        raise ValueError(f"{name} is {rows.dtype}{list(rows.shape)}, but must be uint8[rows, {nbytes}]")
    if rows.size and (rows.strides[1] != 1 or rows.strides[0] < 0):
        raise ValueError(f"the rows of {name} must be contiguous and in order of their addresses")


def check_pack_digits_arguments(packed: np.ndarray, digits: Digits, words: np.ndarray) -> None:
    """Raise ValueError unless the arrays of ``pack_digits`` fit each other: words are for the same whole groups."""
    if packed.size % 4:
        raise ValueError(f"packed is of {packed.size} bytes, but codes fill whole words of 4 bytes")
    _check_array("packed", packed, np.uint8, (packed.size,))
    _check_array("words", words, np.float64, (digits.word_count(4 * packed.size),))


def check_unpack_digits_arguments(words: np.ndarray, digits: Digits, levels: np.ndarray, block_elements: int,
                                  out: np.ndarray) -> None:
    """Raise ValueError unless the arrays of ``unpack_digits`` fit each other."""
    check_block_elements(block_elements)
    _check_array("out", out, np.float32, (out.size,))
    _check_array("words", words, np.float64, (digits.word_count(out.size),))
    _check_array("levels", levels, np.float32, (block_count(out.size, block_elements), 2))
    check_symmetry(levels, digits)


def check_block_elements(block_elements: int) -> None:
    """Raise ValueError unless a block may have so many elements."""
    if block_elements <= 0 or block_elements % ELEMENTS_PER_WORD:
        raise ValueError(f"block_elements must be a positive multiple of {ELEMENTS_PER_WORD}, not {block_elements}")


def _check_array(name: str, array: np.ndarray, dtype: type, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, "
                         f"but must be contiguous {np.dtype(dtype)}{list(shape)}")

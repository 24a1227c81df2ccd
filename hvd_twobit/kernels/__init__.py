"""The kernel interface: four functions, implemented once per backend, bit-equal to each other.

``load(name)`` returns the module of a backend. A backend is imported when it is asked for and not before: ``"numpy"``
is the definition (the oracle of the tests), ``"numba"`` the one that training uses. Each has::

    quantize_pack(gradient, residual, packed, quantizer) -> (selected_sum, selected_count)
    unpack_sum(packed, levels, block_elements, out, scale=1.0) -> None
    pack_digits(packed, digits, words) -> None
    unpack_digits(words, digits, divisor, levels, block_elements, out, scale=1.0) -> None

The first two are a gradient's way through an allgather. The other two bring packed codes into float64 ``words`` that
Horovod's allreduce can add, and the levels' sums out of what it made of them: see ``Digits``.

Arrays are C-contiguous NumPy arrays that the caller allocated, of any length (0 included); only the rows of
``unpack_sum``'s ``packed`` may lie apart, so that payloads are decoded where they were received.

This file holds what the backends share: the ``Quantizer``, ``Digits``, the size of packed codes, the codes, and the
checks of arguments that both make before a loop runs without bounds checks.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import types

import numpy as np

CODE_ZERO = 0b00
CODE_NOT_FINITE = 0b01
CODE_NEGATIVE = 0b10
CODE_POSITIVE = 0b11

ELEMENTS_PER_WORD = 16
"""Elements in one 32-bit word of packed codes; a tensor is padded to whole words."""

SUM_CHUNK_ELEMENTS = 1024
"""``selected_sum`` adds float32 lanes within chunks of this many elements, and chunks in float64."""

_MODULES = {"numpy": "reference", "numba": "cpu"}


def load(name: str) -> types.ModuleType:
    """Return the backend module called ``name`` (``"numpy"`` or ``"numba"``), importing it if need be.

    Raises:
        KeyError: there is no backend of that name.
    """
    if name not in _MODULES:
        raise KeyError(f"no kernel backend is called {name!r}: choose one of {', '.join(sorted(_MODULES))}")
    return importlib.import_module(f"{__name__}.{_MODULES[name]}")


def packed_nbytes(elements: int) -> int:
    """Bytes of the packed codes of a tensor: four for every 16 elements or part of them."""
    return 4 * (-(-elements // ELEMENTS_PER_WORD))


def block_count(elements: int, block_elements: int) -> int:
    """Number of blocks of a tensor; an empty tensor has one block, so that its levels have a place."""
    return max(1, -(-elements // block_elements))


def whole_tensor(elements: int) -> int:
    """``block_elements`` of a tensor that is one block."""
    return max(ELEMENTS_PER_WORD, 4 * packed_nbytes(elements))


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """Where one tensor's elements are decided and what their codes stand for, per block.

    Attributes:
        block_elements: elements of a block, a multiple of 16; the length of the tensor or more means one block.
        positive_threshold: float32[blocks], > 0; a residual at or above it gets code 11.
        negative_threshold: float32[blocks], < 0; a residual at or below it gets code 10.
        positive_level: float32[blocks], > 0; what code 11 takes out of the residual and means to the receiver.
        negative_level: float32[blocks], < 0; the same for code 10.
    """

    block_elements: int
    positive_threshold: np.ndarray
    negative_threshold: np.ndarray
    positive_level: np.ndarray
    negative_level: np.ndarray

    def __post_init__(self) -> None:
        _check_block_elements(self.block_elements)

    @classmethod
    def fixed(cls, positive: float, negative: float, elements: int) -> Quantizer:
        """One block, decided at the levels themselves, as MXNet does."""
        up, down = np.full(1, positive, np.float32), np.full(1, negative, np.float32)
        return cls(whole_tensor(elements), up, down, up, down)


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
    _check_block_elements(block_elements)
    _check_array("out", out, np.float32, (out.size,))
    if packed.dtype != np.uint8 or packed.ndim != 2 or packed.shape[1] != packed_nbytes(out.size):
        raise ValueError(f"packed is {packed.dtype}{list(packed.shape)}, "
                         f"but {out.size} elements need uint8[k, {packed_nbytes(out.size)}]")
    if packed.size and (packed.strides[1] != 1 or packed.strides[0] < 0):
        raise ValueError("the rows of packed must be contiguous and in order of their addresses")
    blocks = block_count(out.size, block_elements)
    _check_array("levels", levels, np.float32, (packed.shape[0], blocks, 2))


def check_pack_digits_arguments(packed: np.ndarray, digits: Digits, words: np.ndarray) -> None:
    """Raise ValueError unless the arrays of ``pack_digits`` fit each other: words are for the same whole groups."""
    if packed.size % 4:
        raise ValueError(f"packed is of {packed.size} bytes, but codes fill whole words of 4 bytes")
    _check_array("packed", packed, np.uint8, (packed.size,))
    _check_array("words", words, np.float64, (digits.word_count(4 * packed.size),))


def check_unpack_digits_arguments(words: np.ndarray, digits: Digits, levels: np.ndarray, block_elements: int,
                                  out: np.ndarray) -> None:
    """Raise ValueError unless the arrays of ``unpack_digits`` fit each other."""
    _check_block_elements(block_elements)
    _check_array("out", out, np.float32, (out.size,))
    _check_array("words", words, np.float64, (digits.word_count(out.size),))
    _check_array("levels", levels, np.float32, (block_count(out.size, block_elements), 2))
    if digits.symmetric and not np.array_equal(levels[:, 1], -levels[:, 0], equal_nan=True):
        raise ValueError("levels are not symmetric, but the digits are")


def _check_block_elements(block_elements: int) -> None:
    if block_elements <= 0 or block_elements % ELEMENTS_PER_WORD:
        raise ValueError(f"block_elements must be a positive multiple of {ELEMENTS_PER_WORD}, not {block_elements}")


def _check_array(name: str, array: np.ndarray, dtype: type, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, "
                         f"but must be contiguous {np.dtype(dtype)}{list(shape)}")

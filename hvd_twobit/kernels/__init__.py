"""The kernel interface: a few functions, implemented once per backend, bit-equal to each other.

``load(name)`` returns the module of a backend. A backend is imported when it is asked for and not before: ``"numpy"``
is the definition (the oracle of the tests), ``"numba"`` the one that training uses. Each has::

    quantize_pack(gradient, residual, packed, quantizer) -> (selected_sum, selected_count)
    unpack_sum(packed, levels, block_elements, out, scale=1.0) -> None
    pack_counts(packed, bits, counts) -> None
    unpack_counts(counts, bits, levels, block_elements, out, scale=1.0) -> None

The last two are ``unpack_sum`` in two halves with bytes between them: how many ranks sent which code, which is what one
rank sums for all, and what that means. Arrays are C-contiguous NumPy arrays that the caller allocated, of any length
(0 included); only the rows of ``packed`` and ``counts`` may lie apart, so that payloads are read where they were
received.

This file holds what the backends share: the ``Quantizer``, the size of packed codes, the codes, and the checks of
arguments that both make before a loop runs without bounds checks.
"""

from __future__ import annotations

import dataclasses
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

COUNT_BITS = (4, 8, 16)
"""Bits that a count may take. Its lowest value stands for NaN, so that b bits are enough for 2^(b-1) - 1 ranks."""

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
        if self.block_elements <= 0 or self.block_elements % ELEMENTS_PER_WORD:
            raise ValueError(f"block_elements must be a positive multiple of {ELEMENTS_PER_WORD}, "
                             f"not {self.block_elements}")

    @classmethod
    def fixed(cls, positive: float, negative: float, elements: int) -> Quantizer:
        """One block, decided at the levels themselves, as MXNet does."""
        up, down = np.full(1, positive, np.float32), np.full(1, negative, np.float32)
        return cls(whole_tensor(elements), up, down, up, down)


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
    if block_elements <= 0 or block_elements % ELEMENTS_PER_WORD:
        raise ValueError(f"block_elements must be a positive multiple of {ELEMENTS_PER_WORD}, not {block_elements}")
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
    _check_planes(counts)


def check_unpack_counts_arguments(counts: np.ndarray, bits: int, levels: np.ndarray, block_elements: int,
                                  out: np.ndarray) -> None:
    """Raise ValueError unless the arrays of ``unpack_counts`` fit each other."""
    if bits not in COUNT_BITS:
        raise ValueError(f"bits must be one of {COUNT_BITS}, not {bits}")
    if block_elements <= 0 or block_elements % ELEMENTS_PER_WORD:
        raise ValueError(f"block_elements must be a positive multiple of {ELEMENTS_PER_WORD}, not {block_elements}")
    _check_array("out", out, np.float32, (out.size,))
    _check_rows("counts", counts, counts_nbytes(packed_nbytes(out.size) // 4, bits))
    _check_planes(counts)
    _check_array("levels", levels, np.float32, (block_count(out.size, block_elements), 2))


def _check_planes(counts: np.ndarray) -> None:
    if counts.shape[0] not in (1, 2):
        raise ValueError(f"counts has {counts.shape[0]} planes, but must have one, of differences, or two")


def _check_rows(name: str, rows: np.ndarray, nbytes: int) -> None:
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != nbytes:
        raise ValueError(f"{name} is {rows.dtype}{list(rows.shape)}, but must be uint8[rows, {nbytes}]")
    if rows.size and (rows.strides[1] != 1 or rows.strides[0] < 0):
        raise ValueError(f"the rows of {name} must be contiguous and in order of their addresses")


def _check_array(name: str, array: np.ndarray, dtype: type, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, "
                         f"but must be contiguous {np.dtype(dtype)}{list(shape)}")

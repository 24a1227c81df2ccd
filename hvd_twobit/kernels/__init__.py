"""The kernel interface: two functions, implemented once per backend, bit-equal to each other.

``load(name)`` returns the module of a backend. A backend is imported when it is asked for and not before: ``"numpy"``
is the definition (the oracle of the tests), ``"numba"`` the one that training uses. Each has::

    quantize_pack(gradient, residual, packed, quantizer) -> (selected_sum, selected_count)
    unpack_sum(packed, levels, block_elements, out, scale=1.0) -> None

Arrays are C-contiguous NumPy arrays that the caller allocated, of any length (0 included); only the rows of
``unpack_sum``'s ``packed`` may lie apart, so that payloads are decoded where they were received.

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
    if packed.dtype != np.uint8 or packed.ndim != 2 or packed.shape[1] != packed_nbytes(out.size):
        raise ValueError(f"packed is {packed.dtype}{list(packed.shape)}, "
                         f"but {out.size} elements need uint8[k, {packed_nbytes(out.size)}]")
    if packed.size and (packed.strides[1] != 1 or packed.strides[0] < 0):
        raise ValueError("the rows of packed must be contiguous and in order of their addresses")
    blocks = block_count(out.size, block_elements)
    _check_array("levels", levels, np.float32, (packed.shape[0], blocks, 2))


def _check_array(name: str, array: np.ndarray, dtype: type, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, "
                         f"but must be contiguous {np.dtype(dtype)}{list(shape)}")

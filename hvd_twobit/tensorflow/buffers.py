"""Memory that passes between NumPy functions and TensorFlow without a copy.

TensorFlow 2.15 takes an array that a NumPy function returns as it is, if it is aligned to 64 bytes, and keeps the array
alive as long as the tensor; else it copies it. New memory of a gradient's size costs about as much time as decoding
into it, as the system clears every page, so memory is used again when TensorFlow has let go of it.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np

_ALIGNMENT = 64


def aligned_empty(nbytes: int) -> np.ndarray:
    """New uint8[nbytes], aligned as TensorFlow wants it."""
    return _aligned(np.empty(nbytes + _ALIGNMENT, np.uint8))


def aligned_zeros(nbytes: int) -> np.ndarray:
    """New uint8[nbytes] of zeros, aligned as TensorFlow wants it."""
    return _aligned(np.zeros(nbytes + _ALIGNMENT, np.uint8))


def _aligned(memory: np.ndarray) -> np.ndarray:
    """All but ``_ALIGNMENT`` bytes of memory."""
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start:start + memory.size - _ALIGNMENT]


class _Lent(np.ndarray):
    """Kept memory, and what stands between it and arrays that were handed out: it lives as long as such an array.

    NumPy makes the owner of the memory the base of a view, and drops what lies between, unless types differ.
    """


class Recycled:
    """Memory for the decoded gradient of one tensor: at most two pieces are kept, which is what a training loop needs.

    A piece is handed out again only when no array and no tensor on it is left, so that a gradient that the user keeps
    is never overwritten; whoever keeps more gets new memory.
    """

    _KEPT = 2

    def __init__(self) -> None:
        self._pieces: list[tuple[np.ndarray, weakref.ref[Any]]] = []
        self._lock = threading.Lock()

    def empty(self, elements: int) -> np.ndarray:
        """float32[elements] of undefined content, aligned as TensorFlow wants it."""
        nbytes = 4 * elements
        with self._lock:
            unused = [memory for memory, lent in self._pieces if memory.size == nbytes and lent() is None]
            memory = unused[0] if unused else aligned_empty(nbytes).view(_Lent)
            lent = memory.view(_Lent)
            others = [piece for piece in self._pieces if piece[0] is not memory and piece[0].size == nbytes]
            if unused or len(others) < self._KEPT:
                self._pieces = [*others, (memory, weakref.ref(lent))]
            return lent.view(np.ndarray).view(np.float32)

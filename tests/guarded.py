"""Memory whose end, and beginning, cannot be overstepped: a touch of the byte beyond ends the process by a signal."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np

LARGEST_NBYTES = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)


class Guarded:
    """Memory of ``LARGEST_NBYTES`` between two pages without access."""

    def __init__(self) -> None:
        page = mmap.PAGESIZE
        self._map = mmap.mmap(-1, LARGEST_NBYTES + 2 * page)
        whole = np.frombuffer(self._map, np.uint8)
        self._memory = whole[page:-page]
        for start in (whole.ctypes.data, whole.ctypes.data + page + LARGEST_NBYTES):
            if _libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(page), 0):
                raise OSError(ctypes.get_errno(), "mprotect")

    def place(self, content: Any, at_end: bool) -> np.ndarray:
        """A copy of an array of at most so many bytes, at the end or the beginning of the memory."""
        content = np.asarray(content)
        start = LARGEST_NBYTES - content.nbytes if at_end else 0
        placed = self._memory[start:start + content.nbytes].view(content.dtype).reshape(content.shape)
        placed[...] = content
        return placed

    def beyond(self, at_end: bool) -> int:
        """Address of a byte that may not be touched."""
        return self._memory.ctypes.data + (LARGEST_NBYTES if at_end else -1)

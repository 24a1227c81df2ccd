"""Where a tensor becomes the words that an allreduce adds: on the host, or on the device of a front end's tensor.

``digit_codec`` decides with what a tensor is quantized and what reduced words mean; a ``WordBackend`` has memory and
kernels for it. ``HostWords`` is that of NumPy arrays; front ends have others for devices.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import numpy as np

from . import kernels
from .digits import DigitLayout
from .kernels import Quantizer, packed_nbytes
from .levels import AdaptiveLevels, block_totals, limited
from .memory import HOST, Memory


class WordBackend:
    """Memory and kernels for words. Arrays are flat, of the backend's own kind.

    Attributes:
        memory: where residuals lie.
    """

    memory: Memory

    def new(self, size: int) -> Any:
        """float64[size] with undefined contents."""
        raise NotImplementedError

    def take(self, values: np.ndarray) -> Any:
        """An array with these values, of any dtype and shape; perhaps ``values`` itself."""
        raise NotImplementedError

    def read(self, array: Any) -> np.ndarray:
        """The values of an array on the host; perhaps its own memory, not to be changed."""
        raise NotImplementedError

    def as_float32(self, values: Any) -> Any:
        """The values as contiguous float32, infinite where they overflow; perhaps ``values`` itself."""
        raise NotImplementedError

    def mean_magnitudes(self, policy: AdaptiveLevels, tensor: Any) -> Any:
        """What ``policy.mean_magnitudes`` says of float32[elements], which may be added up in another order."""
        raise NotImplementedError

    def quantize(self, tensor: Any, residual: Any, quantizer: Quantizer, layout: DigitLayout, words: Any) -> int:
        """Add a tensor to its residual, take out what two bits can say, and write it into words.

        Args:
            tensor: float32[elements], not changed.
            residual: float32[elements], updated; None for zeros that are not needed afterwards.
            quantizer: thresholds and levels, arrays of this backend.
            layout: of the words.
            words: float64[layout.size], of which digits and block table are written.

        Returns:
            How many elements were selected.
        """
        raise NotImplementedError

    def unpack(self, words: Any, layout: DigitLayout, factor: float, levels: np.ndarray, block_elements: int,
               out: Any) -> None:
        """Overwrite a tensor with the scaled sum that reduced words tell.

        Args:
            words: float64[layout.size], as the allreduce returned them.
            layout: of the words.
            factor: by what Horovod multiplied the sum.
            levels: float32[blocks, 2], the positive and the negative level, on the host.
            block_elements: elements of a block, a multiple of 16.
            out: float32[elements], overwritten.
        """
        raise NotImplementedError


class HostWords(WordBackend):
    """NumPy arrays, by the kernels of the default backend."""

    memory = HOST

    @functools.cached_property
    def _kernels(self) -> types.ModuleType:
        return kernels.load(kernels.DEFAULT_BACKEND)  # When it is first used: that takes a second.

    def new(self, size: int) -> np.ndarray:
        return np.empty(size)

    def take(self, values: np.ndarray) -> np.ndarray:
        return values

    def read(self, array: np.ndarray) -> np.ndarray:
        return array

    def as_float32(self, values: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(values, np.float32)

    def mean_magnitudes(self, policy: AdaptiveLevels, tensor: np.ndarray) -> np.ndarray:
        return policy.mean_magnitudes(tensor)

    def quantize(self, tensor: np.ndarray, residual: np.ndarray | None, quantizer: Quantizer, layout: DigitLayout,
                 words: np.ndarray) -> int:
        packed = np.empty(packed_nbytes(tensor.size), np.uint8)
        total, count = self._kernels.quantize_pack(tensor, np.zeros_like(tensor) if residual is None else residual,
                                                   packed, quantizer)
        self._kernels.pack_digits(packed, layout.digits, layout.content(words))
        if layout.blocks:
            layout.write_table(words, limited(total) if residual is None
                               else block_totals(total, count, residual, quantizer.block_elements), count)
        return int(count.sum())

    def unpack(self, words: np.ndarray, layout: DigitLayout, factor: float, levels: np.ndarray, block_elements: int,
               out: np.ndarray) -> None:
        self._kernels.unpack_digits(layout.content(words), layout.digits, factor, levels, block_elements, out, factor)

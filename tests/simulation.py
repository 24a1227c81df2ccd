"""All ranks in one process: what Horovod with TwoBit has to return, from the NumPy kernels alone.

Nothing of codec, payload or front ends is used, so that a mistake there cannot hide here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_twobit import kernels

reference = kernels.load("numpy")


class SimulatedTensor:
    """One compressed tensor on all ranks.

    Args:
        thresholds: positive and negative threshold of each rank.
        elements: elements of the tensor.
    """

    def __init__(self, thresholds: Sequence[tuple[float, float]], elements: int) -> None:
        self.residuals = [np.zeros(elements, np.float32) for _ in thresholds]
        self._quantizers = [kernels.Quantizer.fixed(*pair, elements) for pair in thresholds]
        self._levels = np.array([[pair] for pair in thresholds], np.float32)

    def step(self, gradients: Sequence[np.ndarray], scale: float) -> np.ndarray:
        """One exchange: float32 gradients of all ranks in, the scaled sum out, flat float32."""
        packed = np.zeros((len(gradients), kernels.packed_nbytes(gradients[0].size)), np.uint8)
        for rank, gradient in enumerate(gradients):
            flat = np.ascontiguousarray(gradient, np.float32).reshape(-1)
            reference.quantize_pack(flat, self.residuals[rank], packed[rank], self._quantizers[rank])
        out = np.empty(gradients[0].size, np.float32)
        reference.unpack_sum(packed, self._levels, self._quantizers[0].block_elements, out, scale)
        return out


def gradient(seed: int, rank: int, step: int, name: str, shape: Sequence[int], dyadic: bool = False) -> np.ndarray:
    """A reproducible float32 gradient with a heavy tail.

    ``dyadic`` ones are multiples of 1/8 up to 8: four ranks' add up and average exactly, in any order and in bfloat16.
    """
    generator = np.random.default_rng([seed, rank, step, *name.encode()])
    values = generator.standard_normal(tuple(shape)) * np.exp(generator.standard_normal(tuple(shape)))
    return np.asarray(np.clip(np.round(values * 8) / 8, -8, 8) + 0.0 if dyadic else values * 0.3, np.float32)


def assert_same_bits(found: np.ndarray, wanted: np.ndarray, what: str) -> None:
    """Equal dtype, shape and bits; NaNs equal one another."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), what
    same = (found.view(f"u{found.itemsize}") == wanted.view(f"u{wanted.itemsize}")) if found.ndim else found == wanted
    different = ~(same | (np.isnan(found) & np.isnan(wanted)))
    assert not different.any(), f"{what}: {np.count_nonzero(different)} of {found.size} elements differ, " \
                                f"first {found[different].flat[0]!r} instead of {wanted[different].flat[0]!r}"


def thresholds_of(compression: Any, rank: int) -> tuple[float, float]:
    """Positive and negative threshold of a rank whose TwoBit is made of these arguments (a list: one per rank)."""
    if isinstance(compression, list):
        compression = compression[rank % len(compression)]
    arguments = compression or {}
    symmetric = arguments.get("threshold", 0.5)
    return arguments.get("positive_threshold", symmetric), arguments.get("negative_threshold", -symmetric)

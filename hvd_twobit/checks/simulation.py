"""All ranks in one process: what Horovod with TwoBit has to return, from the NumPy kernels alone.

Nothing of codec, payload or front ends is used, so that a mistake there cannot hide here. The self-test of
``hvd-twobit check`` and the tests compare what ranks compute with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import kernels

reference = kernels.load("numpy")


class SimulatedAdaptiveTensor:
    """One compressed tensor on all ranks, with adaptive levels, as docs/design.md tells them.

    Args:
        ranks: number of ranks.
        elements: elements of the tensor.
        warmup_steps: uncompressed exchanges after the first one.
        block_elements: elements that share a level.
    """

    def __init__(self, ranks: int, elements: int, warmup_steps: int = 0, block_elements: int = 1024) -> None:
        self.residuals = [np.zeros(elements, np.float32) for _ in range(ranks)]
        self.levels: list[np.float32] = []
        self._uncompressed = 1 + warmup_steps
        self._block_elements = block_elements
        self._blocks = [slice(start, min(start + block_elements, elements))
                        for start in range(0, max(elements, 1), block_elements)]

    def step(self, gradients: Sequence[np.ndarray], scale: float, received: bool = True) -> np.ndarray:
        """One exchange: float32 gradients of all ranks in, or of the first few, the scaled sum out, flat float32.

        ``received`` tells whether ranks took what came back; what they did not learn from leaves levels as they are.
        """
        if self.is_uncompressed:
            summed = uncompressed(gradients, scale).reshape(-1)
            self.observe(summed, scale)
            return summed
        levels = np.array(self.levels, np.float32)
        threshold = levels * np.float32(0.6)
        quantizer = kernels.Quantizer(self._block_elements, threshold, -threshold, levels, -levels)
        pairs = np.array([np.stack([levels, -levels], axis=1)] * len(gradients))
        out, selected = exchange([quantizer] * len(gradients), pairs, self.residuals, gradients, scale)
        if received:
            self.levels = [self._next(number, selected) for number in range(len(self._blocks))]
        return out

    @property
    def is_uncompressed(self) -> bool:
        """Whether the next exchange is."""
        return self._uncompressed > 0

    def observe(self, summed: np.ndarray, scale: float) -> None:
        """Learn from an uncompressed exchange, whose result is given."""
        averaged = summed.astype(np.float64) / (scale * len(self.residuals))
        if np.isfinite(averaged).all():
            self.levels = [self._kept(2 * np.mean(np.abs(averaged[block])) if averaged[block].size else 0)
                           for block in self._blocks]
            self._uncompressed -= 1

    def _next(self, number: int, selected: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.float32:
        count = sum(int(counts[number]) for _, counts in selected)
        if count:
            return self._kept(sum(float(sums[number]) for sums, _ in selected) / count)
        taking_part = self.residuals[:len(selected)]
        silent = [np.abs(residual[self._blocks[number]]) for residual in taking_part]
        total = sum(float(reference.sum_in_lanes(magnitudes)) for magnitudes in silent)
        return self._kept(2 * total / sum(part.size for part in silent)) if total else self.levels[number]

    @staticmethod
    def _kept(level: float) -> np.float32:
        return np.float32(min(max(level, 2.0 ** -125), 2.0 ** 120))


def uncompressed(gradients: Sequence[np.ndarray], scale: float) -> np.ndarray:
    """What an allreduce returns for gradients whose sum is exact in float32."""
    return np.asarray(np.sum(gradients, axis=0, dtype=np.float32) * np.float32(scale))


def exchange(quantizers: Sequence[kernels.Quantizer], levels: np.ndarray, residuals: Sequence[np.ndarray],
              gradients: Sequence[np.ndarray], scale: float) -> tuple[np.ndarray, list[Any]]:
    """The scaled sum, and what each rank selected in each block."""
    packed = np.zeros((len(gradients), kernels.packed_nbytes(gradients[0].size)), np.uint8)
    selected = []
    for rank, gradient in enumerate(gradients):
        flat = np.ascontiguousarray(gradient, np.float32).reshape(-1)
        selected.append(reference.quantize_pack(flat, residuals[rank], packed[rank], quantizers[rank]))
    out = np.empty(gradients[0].size, np.float32)
    reference.unpack_sum(packed, levels, quantizers[0].block_elements, out, scale)
    return out, selected

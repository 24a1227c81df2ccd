"""Which thresholds and levels a tensor is quantized with, and which levels the received codes stand for.

Two policies, one interface. ``FixedLevels`` are the configured thresholds: one block per tensor, decided at the levels
themselves, as MXNet does. ``AdaptiveLevels`` follow the gradient, with a level per block of consecutive elements:

- A tensor travels uncompressed first. Then a block's level is twice the mean magnitude of its averaged gradient.
- An element is sent where its residual reaches ``DECISION`` of the level.
- Each rank tells, per block, sum and number of the magnitudes that it selected. The next level is their mean over all
  ranks: a step of Lloyd's algorithm, which moves a level to the centroid of what it stands for, one exchange late. A
  level that is far too low selects everything, so it is right after one exchange.
- Where no rank selected anything, the level is too high. Ranks then tell the sum of all magnitudes in the block, and
  the next level is twice their mean, as at first; where there is nothing at all, the level stays.

Every rank computes the next levels from the same numbers in the same order, so all have the same bits. Levels are kept
between ``LOWEST`` and ``HIGHEST``.

Sources: S. Lloyd, "Least squares quantization in PCM", 1982, for the centroid; docs/convergence.md for the choice.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from .config import TwoBitConfig
from .kernels import Quantizer, block_count
from .kernels.lanes import magnitude_sums
from .payload import Header, Layout, Received

DECISION = np.float32(0.6)
"""Where an element is sent, in relation to its level.

The nearest of level and zero would be 0.5; but what is not sent is not lost, and waiting a little longer makes losses
fall faster (docs/convergence.md).
"""

LOWEST = np.float32(2.0 ** -125)
"""The lowest adaptive level: ``DECISION`` of it is still a normal float32."""

HIGHEST = np.float32(2.0 ** 120)
"""The highest adaptive level: 128 ranks can add it up in float32."""

LEVEL_OF_MEAN = 2.0
"""An adaptive level in relation to the mean magnitude, where nothing else is known."""

_FLOAT32_MAX = np.finfo(np.float32).max
_FLOAT32_TINY = np.finfo(np.float32).smallest_subnormal
_BLOCKS_AT_ONCE = 256  # Keeps temporaries small.


class FixedLevels:
    """The configured thresholds, for every tensor and step, in the unit in which gradients are exchanged."""

    def __init__(self, positive: float, negative: float) -> None:
        self._positive, self._negative = positive, negative

    @property
    def block_elements(self) -> int:
        """Elements that share a level; 0: all have the same."""
        return 0

    def first(self, reduced: np.ndarray, factor: float) -> None:
        """The levels after an uncompressed exchange: none are kept, whatever the gradient was."""

    def quantizer(self, levels: np.ndarray | None, elements: int, loss_scale: float = 1.0) -> Quantizer:
        """The quantizer of a run of elements whose gradients are multiplied by ``loss_scale``."""
        return Quantizer.fixed(*self._scaled(loss_scale), elements)

    def header(self, elements: int, levels_checksum: int, loss_scale: float = 1.0) -> Header:
        """The header that tells receivers what codes stand for."""
        return Header(elements, *self._scaled(loss_scale))

    def _scaled(self, loss_scale: float) -> tuple[float, float]:
        """The thresholds, multiplied like the gradient; float32, finite and not zero."""
        positive, negative = (float(np.clip(threshold * loss_scale, _FLOAT32_TINY, _FLOAT32_MAX).astype(np.float32))
                              for threshold in np.array([self._positive, -self._negative]))
        return positive, -negative

    def pairs(self, levels: np.ndarray | None, headers: Collection[Header]) -> np.ndarray:
        """What codes stand for: float32[ranks, 1, 2], positive and negative level of each rank."""
        return np.array([[[header.positive_level, header.negative_level]] for header in headers], np.float32)

    def next(self, levels: np.ndarray | None, received: Received, layout: Layout) -> None:
        """The levels of the next exchange: none are kept."""

    def write_table(self, table: np.ndarray, selected_sum: np.ndarray, selected_count: np.ndarray,
                    residual: np.ndarray) -> None:
        """Nothing: the payload has no block table."""


class AdaptiveLevels:
    """Levels that follow the gradient, one per block of ``block_elements`` elements: float32[blocks]."""

    def __init__(self, block_elements: int) -> None:
        self._block_elements = block_elements

    @property
    def block_elements(self) -> int:
        """Elements that share a level."""
        return self._block_elements

    def first(self, reduced: np.ndarray, factor: float) -> np.ndarray | None:
        """The levels after an uncompressed exchange.

        Args:
            reduced: float32[elements], the gradient that all ranks received.
            factor: what makes it the average over ranks.

        Returns:
            None where an element is not finite: it says nothing about the next gradients.
        """
        sums = self._block_sums(reduced)
        if not np.isfinite(sums).all():
            return None
        return within_limits(LEVEL_OF_MEAN * factor * sums / self.block_sizes(reduced.size))

    def quantizer(self, levels: np.ndarray | None, elements: int, loss_scale: float = 1.0) -> Quantizer:
        """The quantizer of a run: decides at ``DECISION`` of the levels, which are of scaled gradients already."""
        assert levels is not None
        threshold = levels * DECISION
        return Quantizer(self._block_elements, threshold, -threshold, levels, -levels)

    def header(self, elements: int, levels_checksum: int, loss_scale: float = 1.0) -> Header:
        """The header, with the levels' checksum."""
        return Header(elements, block_elements=self._block_elements, levels_checksum=levels_checksum)

    def pairs(self, levels: np.ndarray | None, headers: Collection[Header]) -> np.ndarray:
        """What codes stand for: float32[ranks, blocks, 2], the same for all ranks."""
        assert levels is not None
        pairs = np.stack([levels, -levels], axis=-1)
        return np.broadcast_to(pairs, (len(headers), *pairs.shape))

    def next(self, levels: np.ndarray | None, received: Received, layout: Layout) -> np.ndarray:
        """The levels of the next exchange, float32[blocks], from the block tables of all ranks."""
        assert levels is not None
        sums, counts = received.table["selected_sum"].astype(np.float64), received.table["selected_count"]
        selected = counts > 0
        return self.following(levels, _added_in_rank_order(np.where(selected, sums, 0)),
                              counts.sum(axis=0, dtype=np.int64), _added_in_rank_order(np.where(selected, 0, sums)),
                              len(sums) * layout.block_sizes)

    def following(self, levels: np.ndarray | None, selected_sum: np.ndarray, selected_count: np.ndarray,
                  silent: np.ndarray, members: np.ndarray) -> np.ndarray:
        """The levels of the next exchange, from sums over the ranks, one per block.

        Args:
            levels: those of this exchange.
            selected_sum: float64, of the magnitudes that ranks selected.
            selected_count: their number, whole but for what scaling on the way left.
            silent: float64, of all magnitudes of the ranks that selected none in the block.
            members: elements of the block on all ranks whose sums these are.
        """
        assert levels is not None
        total = np.rint(selected_count)
        following = np.where(silent > 0, LEVEL_OF_MEAN * silent / np.maximum(members, 1), levels)
        return within_limits(np.divide(selected_sum, total, out=following, where=total > 0))

    def mean_magnitudes(self, tensor: np.ndarray) -> np.ndarray:
        """Mean magnitude of each block, float32[blocks], not below ``LOWEST``; elements not finite count as zeros."""
        finite = np.isfinite(tensor)
        if not finite.all():
            tensor = np.where(finite, tensor, np.float32(0))
        return within_limits(self._block_sums(tensor) / self.block_sizes(tensor.size))

    def write_table(self, table: np.ndarray, selected_sum: np.ndarray, selected_count: np.ndarray,
                    residual: np.ndarray) -> None:
        """Fill the block table of this rank's payload from what ``quantize_pack`` returned and left."""
        table["selected_sum"] = block_totals(selected_sum, selected_count, residual, self._block_elements)
        table["selected_count"] = selected_count

    def block_sizes(self, elements: int) -> np.ndarray:
        """Elements of each block of a tensor, at least 1: the last one may be shorter."""
        return np.maximum(Layout((elements,), self._block_elements).block_sizes, 1)

    def _block_sums(self, values: np.ndarray) -> np.ndarray:
        """Sum of magnitudes of every block, float64."""
        whole = values[:values.size // self._block_elements * self._block_elements].reshape(-1, self._block_elements)
        sums = np.zeros(block_count(values.size, self._block_elements))
        for start in range(0, len(whole), _BLOCKS_AT_ONCE):
            rows = whole[start:start + _BLOCKS_AT_ONCE]
            sums[start:start + len(rows)] = np.abs(rows).sum(axis=1, dtype=np.float64)
        if len(whole) < sums.size:  # The last block is shorter.
            sums[-1] = np.abs(values[whole.size:]).sum(dtype=np.float64)
        return sums


def levels_of(config: TwoBitConfig) -> FixedLevels | AdaptiveLevels:
    """The policy that a configuration asks for."""
    if config.adaptive:
        return AdaptiveLevels(config.block_elements)
    assert config.positive_threshold is not None and config.negative_threshold is not None
    return FixedLevels(config.positive_threshold, config.negative_threshold)


def block_totals(selected_sum: np.ndarray, selected_count: np.ndarray, residual: np.ndarray,
                 block_elements: int) -> np.ndarray:
    """What a rank tells of each block, from what ``quantize_pack`` returned and left: float32[blocks].

    The sum of the selected magnitudes, or of all in the residual where none was selected; finite.
    """
    totals = limited(selected_sum)
    silent = np.flatnonzero(selected_count == 0)
    if silent.size:
        totals[silent] = limited(magnitude_sums(residual, block_elements, silent))
    return totals


def limited(sums: np.ndarray) -> np.ndarray:
    """Sums of magnitudes, a copy; what overflowed is the largest float32."""
    return np.minimum(sums, _FLOAT32_MAX)


def within_limits(levels: np.ndarray) -> np.ndarray:
    """Levels as they are kept: float32, between ``LOWEST`` and ``HIGHEST``."""
    return np.minimum(np.maximum(levels, LOWEST), HIGHEST).astype(np.float32)


def _added_in_rank_order(rows: np.ndarray) -> np.ndarray:
    """Sum over the first axis, in an order that no library chooses: all ranks have to round alike."""
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total

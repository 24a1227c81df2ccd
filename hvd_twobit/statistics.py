"""How the compression of a tensor goes: numbers to plot, and a warning where a fixed threshold does not fit.

Cheap enough to be always on: the kernels count codes anyway, and norms, which cost a pass over gradient and residual,
are taken at the first compressed exchange and at every ``SAMPLE_EVERY``-th.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Any

from .levels import LEVEL_OF_MEAN

logger = logging.getLogger("hvd_twobit")

SAMPLE_EVERY = 100
"""Compressed exchanges from one sample of norms to the next, and from one look at a fixed threshold to the next."""

LEAST_SHARE = 1e-4
"""A fixed threshold that makes a smaller share of codes than this non-zero is too high."""

SATURATION = 100
"""A residual beyond so many thresholds grows faster than a fixed threshold can send it."""


@dataclasses.dataclass(frozen=True)
class TensorSummary:
    """The compression of one tensor on this rank.

    Attributes:
        compressed_exchanges: how often it was compressed so far.
        level: mean level over its blocks, in the unit of the gradient that was exchanged (with a loss scale, of the
            scaled one); with a fixed threshold, the positive one. None where the last exchange was uncompressed.
        nonzero_share: share of elements whose code said something in the last exchange, 0 to 1; 0 where that was
            uncompressed.
        gradient_norm: Euclidean norm of this rank's gradient, sampled at the first compressed exchange and at
            every 100th.
        residual_norm: Euclidean norm of what was not sent, sampled after the same exchange.
        nbytes: bytes of this rank's gradient in an exchange: of codes and block table, or uncompressed.
        ratio: bytes of a float32 gradient for each of these.
    """

    compressed_exchanges: int
    level: float | None
    nonzero_share: float
    gradient_norm: float
    residual_norm: float
    nbytes: int
    ratio: float

    @property
    def residual_ratio(self) -> float:
        """Norm of the residual in relation to the gradient's; 0 where the gradient is zero."""
        return self.residual_norm / self.gradient_norm if self.gradient_norm else 0.0

    def scalars(self) -> dict[str, float]:
        """All numbers by name, for TensorBoard and the like; without the level while there is none."""
        numbers = {**dataclasses.asdict(self), "residual_ratio": self.residual_ratio}
        return {name: float(number) for name, number in numbers.items() if number is not None}


class TensorStatistics:
    """Counts and samples of one tensor."""

    def __init__(self) -> None:
        self._exchanges = 0
        self._elements = 0
        self._level: float | None = None
        self._nonzero = 0
        self._nonzero_in_window = 0
        self._nbytes = 0
        self._encoded_nonzero = self._encoded_nbytes = 0
        self._gradient_norm: Any = 0.0
        self._residual_norm: Any = 0.0
        self._mean_magnitude: Any = 0.0
        self._warned = False

    def summary(self) -> TensorSummary | None:
        """What is known, or None before the first exchange."""
        if not self._nbytes:
            return None
        # Read from a device once, however often somebody asks.
        self._gradient_norm, self._residual_norm = float(self._gradient_norm), float(self._residual_norm)
        return TensorSummary(self._exchanges, self._level, self._nonzero / max(self._elements, 1),
                             self._gradient_norm, self._residual_norm, self._nbytes,
                             4 * self._elements / self._nbytes)

    def uncompressed(self, elements: int, nbytes: int) -> None:
        """The tensor travelled uncompressed."""
        self._elements, self._nbytes = elements, nbytes
        self._level, self._nonzero = None, 0

    @property
    def is_sampled(self) -> bool:
        """Whether norms of the coming exchange are wanted."""
        return self._exchanges == 0 or (self._exchanges + 1) % SAMPLE_EVERY == 0

    def begin(self) -> None:
        """A gradient is about to be compressed."""
        self._encoded_nonzero = self._encoded_nbytes = 0

    def sample(self, gradient_norm: Any, mean_magnitude: Any) -> None:
        """What a gradient is like before it is compressed; numbers, or what ``float`` makes some of."""
        self._gradient_norm, self._mean_magnitude = gradient_norm, mean_magnitude

    def add(self, nonzero: int, nbytes: int) -> None:
        """A part of it was compressed: so many codes are 11 or 10, and codes and block table take so many bytes."""
        self._encoded_nonzero += nonzero
        self._encoded_nbytes += nbytes

    def after(self, elements: int, level: float) -> None:
        """All of it was compressed.

        Args:
            elements: of the tensor.
            level: mean level, or the positive threshold.
        """
        self._elements, self._level = elements, level
        self._nonzero, self._nbytes = self._encoded_nonzero, self._encoded_nbytes
        self._nonzero_in_window += self._nonzero
        self._exchanges += 1

    def left(self, residual_norm: Any) -> None:
        """What was not sent of a gradient that was sampled: a number, or what ``float`` makes one of."""
        self._residual_norm = residual_norm

    def warn_of_fixed_threshold(self, name: str, threshold: float, largest: Callable[[], float]) -> None:
        """Log one line, once, where a fixed threshold sends almost nothing or is outrun. To be called after ``after``.

        Args:
            name: the tensor's name.
            threshold: the smaller magnitude of the two thresholds.
            largest: tells the largest magnitude of what was not sent.
        """
        if self._exchanges % SAMPLE_EVERY:
            return
        share = self._nonzero_in_window / (SAMPLE_EVERY * max(self._elements, 1))
        self._nonzero_in_window = 0
        mean_magnitude = float(self._mean_magnitude)
        if self._warned or not 0 < mean_magnitude < math.inf:
            return
        if share < LEAST_SHARE:
            problem = (f"has sent {share:.2g} of its codes in {SAMPLE_EVERY} steps: its fixed threshold of "
                       f"{threshold:.4g} is too high")
        elif largest() > SATURATION * threshold:
            problem = (f"holds back more than {SATURATION} times its fixed threshold of {threshold:.4g} in some "
                       "elements: it is too low")
        else:
            return
        self._warned = True
        logger.warning("hvd_twobit: tensor %r %s for gradients of this size; threshold=%.4g would fit them, and "
                       "threshold=\"auto\" finds and follows it for each tensor", name, problem,
                       LEVEL_OF_MEAN * mean_magnitude)

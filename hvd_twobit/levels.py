"""Which thresholds and levels a tensor is quantized with, and which levels the received codes stand for.

Fixed levels only: one block per tensor, decided at the levels themselves, as MXNet does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .config import TwoBitConfig
from .kernels import Quantizer
from .payload import Header


class FixedLevels:
    """The configured thresholds, for every tensor and step."""

    def __init__(self, config: TwoBitConfig) -> None:
        self._config = config

    def quantizer(self, elements: int) -> Quantizer:
        """The quantizer of a tensor of so many elements."""
        return Quantizer.fixed(self._config.positive_threshold, self._config.negative_threshold, elements)

    def header(self, elements: int) -> Header:
        """The header that tells receivers what the codes of such a tensor stand for."""
        return Header(elements, self._config.positive_threshold, self._config.negative_threshold)

    @staticmethod
    def of_senders(headers: Sequence[Header]) -> np.ndarray:
        """Levels of the ranks that sent ``headers``: float32[ranks, 1, 2], positive and negative."""
        return np.array([[[header.positive_level, header.negative_level]] for header in headers], np.float32)

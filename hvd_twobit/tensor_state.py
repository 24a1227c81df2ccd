"""What one tensor carries from step to step on this rank, and how a step of it is taken back.

``residuals`` keeps one state per tensor and brings it into and out of checkpoints; ``codec`` changes it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from .statistics import TensorStatistics


class TensorState:
    """What one tensor carries from step to step.

    Attributes:
        shape: the tensor's shape.
        levels: adaptive levels, float32[blocks], never changed in place; None where they are fixed or not known yet.
        uncompressed_steps: exchanges in which the tensor travelled uncompressed before it was compressed.
        statistics: see ``ResidualRegistry.stats``.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.levels: np.ndarray | None = None
        self.uncompressed_steps = 0
        self.statistics = TensorStatistics()
        self._residual: np.ndarray | None = None
        self._copy: np.ndarray | None = None
        self._previous: _Previous | None = None

    @property
    def residual(self) -> np.ndarray:
        """The residual, flat: float32[elements], the state's own memory, which is taken, as zeros, when first used."""
        if self._residual is None:
            self._residual = np.zeros(int(np.prod(self.shape, dtype=np.int64)), np.float32)
        return self._residual

    @property
    def has_residual(self) -> bool:
        """Whether memory was taken for the residual."""
        return self._residual is not None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the residual, its copy and the levels take."""
        return sum(array.nbytes for array in (self._residual, self._copy, self.levels) if array is not None)

    def replace(self, residual: np.ndarray | None, levels: np.ndarray | None, uncompressed_steps: int) -> None:
        """Take over a state; ``residual`` is flat, float32[elements], or None for zeros that take no memory yet."""
        self._residual, self.levels, self.uncompressed_steps = residual, levels, uncompressed_steps
        self._copy = self._previous = None

    def remember(self, with_residual: bool) -> None:
        """Keep what ``undo`` brings back; a copy of the residual only where asked for: it costs memory and time."""
        copied = self._residual is not None and with_residual
        if copied:
            if self._copy is None:
                self._copy = np.empty_like(self._residual)
            np.copyto(self._copy, self.residual)
        self._previous = _Previous(self.levels, self.uncompressed_steps, self._residual is None, copied)

    def settle(self) -> None:
        """Forget what ``undo`` would bring back: the step counts. The memory for the residual's copy stays."""
        self._previous = None

    def undo(self) -> None:
        """Go back to the last ``remember``, unless it was settled since. A residual that was not copied stays."""
        previous, self._previous = self._previous, None
        if previous is None:
            return
        self.levels, self.uncompressed_steps = previous.levels, previous.uncompressed_steps
        if previous.had_no_residual:
            self._residual = None
        elif previous.copied:
            self._residual, self._copy = self._copy, self._residual


@dataclasses.dataclass(frozen=True)
class _Previous:
    levels: np.ndarray | None
    uncompressed_steps: int
    had_no_residual: bool
    copied: bool

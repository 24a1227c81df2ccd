"""What one tensor carries from step to step on this rank, and how a step of it is taken back.

``residuals`` keeps one state per tensor and brings it into and out of checkpoints; ``codec`` changes it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from .memory import HOST, Memory
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
        self._memory: Memory = HOST
        self._residual: Any = None
        self._copy: Any = None
        self._copy_memory: Memory = HOST
        self._previous: _Previous | None = None

    @property
    def elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def residual(self) -> np.ndarray:
        """The residual, flat: float32[elements], the state's own memory on the host, to which it moves if need be.

        Taken, as zeros, when first used.
        """
        return self.residual_in(HOST)

    def residual_in(self, memory: Memory) -> Any:
        """The residual as a flat array of a memory, the state's own; it moves there if need be."""
        if self._residual is None:
            self._residual = memory.zeros(self.elements)
        elif memory != self._memory:
            self._residual = memory.take(self._memory.read(self._residual))
        self._memory = memory
        return self._residual

    @property
    def has_residual(self) -> bool:
        """Whether memory was taken for the residual."""
        return self._residual is not None

    @property
    def array(self) -> Any:
        """The residual where it is, in the tensor's shape. There has to be one."""
        return self._memory.shaped(self._residual, self.shape)

    @property
    def values(self) -> np.ndarray:
        """The residual's values on the host, float32[elements], not to be changed. There has to be one."""
        return self._memory.read(self._residual)

    @property
    def norm(self) -> Any:
        """Euclidean norm of the residual, something that ``float`` takes. There has to be one."""
        return self._memory.norm(self._residual)

    @property
    def largest(self) -> float:
        """The largest magnitude in the residual. There has to be one."""
        return float(self._memory.largest(self._residual))

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the residual, its copy and the levels take."""
        arrays = (self._residual is not None) + (self._copy is not None)
        return arrays * 4 * self.elements + (0 if self.levels is None else self.levels.nbytes)

    def scale(self, factor: float) -> None:
        """Multiply the residual, if there is one."""
        if self._residual is not None:
            self._memory.scale(self._residual, factor)

    def replace(self, residual: np.ndarray | None, levels: np.ndarray | None, uncompressed_steps: int) -> None:
        """Take over a state; ``residual`` is flat, float32[elements], or None for zeros that take no memory yet."""
        self._memory, self._residual = HOST, residual
        self.relearn(levels, uncompressed_steps)

    def relearn(self, levels: np.ndarray | None, uncompressed_steps: int) -> None:
        """Take over levels and counter, and keep the residual; what ``undo`` would bring back is forgotten."""
        self.levels, self.uncompressed_steps = levels, uncompressed_steps
        self._copy = self._previous = None

    def remember(self, with_residual: bool) -> None:
        """Keep what ``undo`` brings back; a copy of the residual only where asked for: it costs memory and time."""
        copied = self._residual is not None and with_residual
        if copied:
            self._copy = self._memory.duplicate(self._residual, self._copy if self._copy_memory == self._memory
                                                else None)
            self._copy_memory = self._memory
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
        elif previous.copied and self._copy_memory == self._memory:
            self._memory.restore(self._residual, self._copy)
        elif previous.copied:  # It has moved since.
            self._residual = self._memory.take(self._copy_memory.read(self._copy).copy())


@dataclasses.dataclass(frozen=True)
class _Previous:
    levels: np.ndarray | None
    uncompressed_steps: int
    had_no_residual: bool
    copied: bool

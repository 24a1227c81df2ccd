"""What is known of gradients before any step, and what is decided about them at the beginning of each.

``describe`` says of one gradient how it may travel; a ``Plan`` says, in a step, which of those that may be compressed
are, and states that to the other ranks. How they travel then is ``exchange``'s business.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.common.util import split_list

from ..agreement import Exchanged, Statement
from ..config import TwoBitConfig
from ..reduction import refuse_dtype
from .variables import VariableResiduals, unique


class Travel(enum.Enum):
    """How a gradient reaches the other ranks."""

    COMPRESSED = "two bits per element"
    PLAIN = "as it is, in an allreduce"
    SPARSE = "as slices, in allgathers"
    BY_SIZE = "compressed or plain, known when its size is"


@dataclasses.dataclass(frozen=True)
class Unit:
    """Gradients that one collective can carry.

    Attributes:
        positions: their places among all that are exchanged.
        travel: how they reach the other ranks.
    """

    positions: tuple[int, ...]
    travel: Travel


@dataclasses.dataclass(frozen=True)
class Tensor:
    """What is known of one gradient before any step.

    Attributes:
        label: the variable's name, unique among those exchanged together; the same on every rank.
        residuals: where the residual is kept; None for a source that is no variable.
        name: the residual's name there.
        shape: the gradient's shape, None where it may change.
        dtype: the gradient's dtype.
        travel: how it is sent.
        group: number of Horovod's group that it belongs to.
    """

    label: str
    residuals: VariableResiduals | None
    name: str
    shape: tuple[int, ...] | None
    dtype: tf.DType
    travel: Travel
    group: int

    @property
    def elements(self) -> int:
        """Number of elements; only where the shape is known."""
        assert self.shape is not None
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def is_alive(self) -> bool:
        """Whether the variable still exists, as far as is known."""
        return self.residuals is None or self.name in self.residuals


class Plan:
    """What a step begins with, on this rank.

    Args:
        config: checked parameters of the compression.
        tensors: what is known of the gradients.
        units: which of them travel together.
    """

    def __init__(self, config: TwoBitConfig, tensors: Sequence[Tensor], units: Sequence[Unit]) -> None:
        self._config = config
        self._tensors = tensors
        self._units = units
        self._first_of: dict[int, str] = {}
        for tensor in tensors:
            self._first_of.setdefault(tensor.group, tensor.label)
        self._homes = list(dict.fromkeys(tensor.residuals for tensor in tensors if tensor.residuals is not None))
        self._last: tuple[Any, tuple[Statement, np.ndarray]] | None = None

    def begin_step(self, loss_scale: float) -> None:
        """The steps before count; residuals follow the loss scale, unless it is 0: then nothing is known of one."""
        for home in self._homes:
            home.residuals.begin_step()
            if loss_scale:
                home.residuals.can_undo = True
                home.residuals.follow_loss_scale(loss_scale)

    def undo_step(self) -> None:
        """The gradients of this step will not be used."""
        for home in self._homes:
            home.residuals.undo_step()

    def of_step(self, shapes: Sequence[np.ndarray]) -> tuple[Statement, np.ndarray]:
        """This rank's statement, and which units are compressed, bool[units].

        Args:
            shapes: of the units of the kind ``BY_SIZE``, in their order.
        """
        remaining = iter(shapes)
        known = [tuple(next(remaining).tolist()) if unit.travel is Travel.BY_SIZE else None for unit in self._units]
        compressed = [self._is_compressed(unit, shape) for unit, shape in zip(self._units, known)]
        key = (known, compressed)
        if self._last is None or self._last[0] != key:
            exchanged = [one for unit, shape, yes in zip(self._units, known, compressed)
                         for one in self._exchanged(unit, shape, yes)]
            self._last = key, (Statement.of(self._config, exchanged), np.array(compressed))
        return self._last[1]

    def _is_compressed(self, unit: Unit, shape: tuple[int, ...] | None) -> bool:
        """Whether all tensors of a unit are ready; ``shape`` is given where it is known in the step only."""
        if unit.travel is Travel.COMPRESSED:
            return all(self._ready(self._tensors[position], self._tensors[position].shape)
                       for position in unit.positions)
        return unit.travel is Travel.BY_SIZE and self._compresses(
            self._tensors[unit.positions[0]], shape) and self._ready(self._tensors[unit.positions[0]], shape)

    def _ready(self, tensor: Tensor, shape: tuple[int, ...] | None) -> bool:
        assert tensor.residuals is not None and shape is not None
        return tensor.residuals.codec(self._config).ready(tensor.name, shape)

    def _compresses(self, tensor: Tensor, shape: tuple[int, ...] | None) -> bool:
        assert tensor.residuals is not None and shape is not None
        return tensor.residuals.codec(self._config).compresses(int(np.prod(shape, dtype=np.int64)))

    def _exchanged(self, unit: Unit, shape: tuple[int, ...] | None, compressed: bool) -> list[Exchanged]:
        stated = []
        for position in unit.positions:
            tensor = self._tensors[position]
            found = tensor.shape if shape is None else shape
            elements = -1 if found is None else int(np.prod(found, dtype=np.int64))
            compressible = unit.travel is Travel.COMPRESSED or (
                unit.travel is Travel.BY_SIZE and self._compresses(tensor, shape))
            stated.append(Exchanged(tensor.label, elements, compressible, compressed, self._first_of[tensor.group]))
        return stated


def describe(config: TwoBitConfig, gradient: Any, variable: Any, label: str, residuals: VariableResiduals | None,
             group: int) -> Tensor:
    """What can be said of a gradient before any step.

    Args:
        config: checked parameters, for ``min_elements``.
        gradient: a ``tf.Tensor`` or ``tf.IndexedSlices``.
        variable: what it is the gradient of.
        label: see ``Tensor``.
        residuals: where the variable's residual is kept, or None where it has no lasting identity.
        group: see ``Tensor``.

    Raises:
        UnsupportedOperationError: the gradient is not of real floating point numbers.
    """
    if not gradient.dtype.is_floating:
        refuse_dtype(label, gradient.dtype.name)
    sparse = isinstance(gradient, tf.IndexedSlices)
    static = variable.shape if sparse or not gradient.shape.is_fully_defined() else gradient.shape
    shape = tuple(static.as_list()) if static.is_fully_defined() else None
    if sparse:
        travel = Travel.SPARSE
    elif residuals is None:
        travel = Travel.PLAIN
    elif shape is None:
        travel = Travel.BY_SIZE
    else:
        elements = int(np.prod(shape, dtype=np.int64))
        travel = Travel.COMPRESSED if residuals.codec(config).compresses(elements) else Travel.PLAIN
    return Tensor(label=label, residuals=residuals, name="" if residuals is None else residuals.name_of(variable),
                  shape=shape, dtype=gradient.dtype, travel=travel, group=group)


def labels_of(variables: Sequence[Any], generic: bool) -> list[str]:
    """Names for what ranks say of the variables to each other: unique, and the same on every rank.

    Args:
        variables: the variables, in the same order on every rank.
        generic: number them, as Horovod's ``use_generic_names`` asks, where ranks call their variables differently.
    """
    labels: dict[str, None] = {}
    for position, variable in enumerate(variables):
        name = variable.name if isinstance(variable, tf.Variable) and not generic else f"grad_{position}"
        labels[unique(name, labels)] = None
    return list(labels)


def groups_of(groups: int | Sequence[Sequence[tf.Variable]] | None, variables: Sequence[Any]) -> list[int]:
    """The number of the group of each variable that has a gradient, as Horovod forms them."""
    alone = list(range(len(variables)))
    if groups is None:
        return alone
    if isinstance(groups, int):
        numbers = {}
        for number, members in enumerate(split_list(alone, groups)):
            numbers.update(dict.fromkeys(members, number))
        return [numbers[position] for position in alone]
    listed = {variable.ref(): -1 - number for number, members in enumerate(groups) for variable in members}
    return [listed.get(variable.ref(), position) for position, variable in enumerate(variables)]

"""What is known of gradients before any step, and what is decided about them at the beginning of each.

``describe`` says of one gradient how it may travel; a ``Plan`` puts those that may be compressed into buckets, says in
a step which of them are, and states that to the other ranks. How they travel then is ``exchange``'s business.

A bucket holds variables of one ``VariableResiduals`` only: one codec, one loss scale. There are several of these only
where a tape is asked for variables that first appeared in different tapes. As a program asks tapes for gradients in the
same order on every rank, they are the same on all; where they are not, the agreement tells. In buckets, variables go by
their labels, which are what ranks have in common.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.util import split_list

from ..agreement import Exchanged, Statement
from ..buckets import Bucket
from ..config import TwoBitConfig
from ..machines import Levels
from ..reduction import Reduction, refuse_dtype
from ..sharding import ShardedResiduals
from ..transports import Planned, plan_buckets, restricted, transport_of
from .devices import device_of
from .variables import VariableResiduals, unique

_ELASTIC_RANKS = 128
"""The number of ranks for which an elastic job, whose graph outlives its worlds, limits the size of buckets.

It leaves the default size as it is. The limit allows for 2 bytes per element, of which a payload takes about 1/4 where
tensors are not tiny: it serves nearly 8 times as many ranks. Among so many, ``"auto"`` allgathers no large bucket.
"""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the user chose, apart from the variables, and what follows from it in this job.

    Attributes:
        config: checked parameters of the compression.
        reduction: sum or average.
        process_set: the ranks that exchange.
        device_dense: Horovod's ``device_dense``, for what travels uncompressed.
        device_sparse: Horovod's ``device_sparse``.
        levels: the process sets of an exchange of two levels; None where there is one.
    """

    config: TwoBitConfig
    reduction: Reduction
    process_set: hvd.ProcessSet
    device_dense: str
    device_sparse: str
    levels: Levels | None = None

    @property
    def ranks_per_machine(self) -> int:
        """Ranks that divide a bucket before its exchange; 1 where there is one level."""
        return 1 if self.levels is None else self.levels.machines.local_size

    @property
    def exchanging(self) -> hvd.ProcessSet:
        """The ranks whose codes are added up; of two levels, those of equal number on all machines."""
        return self.process_set if self.levels is None else self.levels.across

    @property
    def scale(self) -> float:
        """The factor of that sum."""
        return self.reduction.scale(self.exchanging.size())  # Read anew: an elastic job changes the number of ranks.

    def shares(self, residuals: VariableResiduals) -> ShardedResiduals:
        """What this rank keeps of the variables."""
        return residuals.shares(self.config, self.reduction.averages,
                                0 if self.levels is None else self.levels.within.rank(), self.ranks_per_machine)

    def planned(self, bucket: Bucket) -> Planned:
        """How a bucket travels in this step."""
        ranks = self.exchanging.size()
        return Planned(bucket, transport_of(self.config, bucket.elements, ranks, self.ranks_per_machine), ranks,
                       self.ranks_per_machine)


class Travel(enum.Enum):
    """How a gradient reaches the other ranks."""

    COMPRESSED = "two bits per element"
    PLAIN = "as it is, in an allreduce"
    SPARSE = "as slices, in allgathers"
    BY_SIZE = "compressed or plain, known when its size is"


@dataclasses.dataclass(frozen=True)
class Unit:
    """Gradients whose kind of travel is decided together, and which one collective can carry uncompressed.

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
        key: the first label of the variable, by which the ranks of a machine divide it.
        shape: the gradient's shape, None where it may change.
        dtype: the gradient's dtype.
        travel: how it is sent.
        group: number of Horovod's group that it belongs to.
        device: where it is compressed; None for the host.
    """

    label: str
    residuals: VariableResiduals | None
    name: str
    key: str
    shape: tuple[int, ...] | None
    dtype: tf.DType
    travel: Travel
    group: int
    device: str | None = None

    @property
    def elements(self) -> int:
        """Number of elements; only where the shape is known."""
        assert self.shape is not None
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def is_alive(self) -> bool:
        """Whether the variable still exists, as far as is known."""
        return self.residuals is None or self.name in self.residuals


@dataclasses.dataclass(frozen=True)
class Load:
    """Gradients that are decoded at once: those of one bucket, or one that is cut into several buckets, from all.

    Attributes:
        positions: their places among all that are exchanged, in the order in which they lie in the bucket.
        buckets: what they travel in, parts being named by labels; none where the size of the gradient, the only one, is
            known in the step only.
    """

    positions: tuple[int, ...]
    buckets: tuple[Bucket, ...]


class Plan:
    """Which buckets there may be, and what a step begins with on this rank.

    Args:
        settings: the user's choices.
        tensors: what is known of the gradients.
        units: which of them are decided on together.
        elastic: whether the number of ranks may change.

    Attributes:
        steady: the loads of all units of the kind ``COMPRESSED``, where none is in its uncompressed steps any more.

    Raises:
        ResidualError: a variable had another shape before.
    """

    def __init__(self, settings: Settings, tensors: Sequence[Tensor], units: Sequence[Unit], elastic: bool) -> None:
        self._settings = settings
        self._tensors = tensors
        self._units = units
        self._most_ranks = _ELASTIC_RANKS if elastic else settings.process_set.size()
        self._homes = list(dict.fromkeys(tensor.residuals for tensor in tensors if tensor.residuals is not None))
        self._position_of = {tensor.label: position for position, tensor in enumerate(tensors)}
        self._buckets = self._planned()
        self._include(self._buckets)
        self.steady = self._loads(position for unit in units if unit.travel is Travel.COMPRESSED
                                  for position in unit.positions)
        self._loads_of: dict[Unit, list[Load]] = {}
        self._first_of: dict[int, str] = {}
        for tensor in tensors:
            self._first_of.setdefault(tensor.group, tensor.label)
        self._last: tuple[Any, tuple[Statement, np.ndarray]] | None = None

    def loads_of(self, unit: Unit) -> list[Load]:
        """The loads of a unit that is compressed while another one is not yet, or that is ``BY_SIZE``."""
        if unit not in self._loads_of:
            self._loads_of[unit] = ([Load(unit.positions, ())] if unit.travel is Travel.BY_SIZE
                                    else self._loads(unit.positions))
        return self._loads_of[unit]

    def _planned(self) -> list[Planned]:
        """The buckets of all gradients that may be compressed and whose size is known, by labels.

        Backward computes the last gradient first, so buckets are filled from there.
        """
        homes: dict[VariableResiduals | None, list[Tensor]] = {}
        for tensor in reversed(self._tensors):
            if tensor.travel is Travel.COMPRESSED:
                homes.setdefault(tensor.residuals, []).append(tensor)
        return [planned for members in homes.values()
                for planned in plan_buckets(self._settings.config, [(tensor.label, tensor.shape or ())
                                                                    for tensor in members],
                                            self._most_ranks, self._settings.ranks_per_machine)]

    def _loads(self, positions: Iterable[int]) -> list[Load]:
        """Those of some gradients, whose buckets are cut as where all are compressed."""
        labels = {self._tensors[position].label for position in positions}
        loads: list[Load] = []
        for planned in restricted(self._buckets, labels.__contains__):
            parts = planned.bucket.parts
            if parts[0].start:
                loads[-1] = Load(loads[-1].positions, (*loads[-1].buckets, planned.bucket))
            else:
                loads.append(Load(tuple(self._position_of[part.name] for part in parts), (planned.bucket,)))
        return loads

    def _include(self, buckets: Iterable[Planned]) -> None:
        """Have shares determined of what lies in buckets, unless they are already."""
        found = [planned.bucket for planned in buckets]
        shapes = {part.name: part.shape for bucket in found for part in bucket.parts}
        for home in self._homes:
            tensors = [tensor for tensor in self._tensors if tensor.residuals is home and tensor.label in shapes]
            names = {tensor.label: tensor.name for tensor in tensors}
            self._settings.shares(home).include(
                {tensor.name: shapes[tensor.label] for tensor in tensors},
                [named(bucket, names) for bucket in found if bucket.parts[0].name in names],
                {tensor.name: tensor.key for tensor in tensors})

    def begin_step(self, loss_scale: float, shapes: Sequence[np.ndarray]) -> None:
        """The steps before count; residuals follow the loss scale, unless it is 0: then nothing is known of one.

        Args:
            loss_scale: by what gradients are multiplied.
            shapes: of the units of the kind ``BY_SIZE``, in their order.

        Raises:
            ResidualError: a variable had another shape before.
        """
        for home in self._homes:
            home.residuals.begin_step()
            self._settings.shares(home).settle()
            if loss_scale:
                home.residuals.can_undo = True
                home.residuals.follow_loss_scale(loss_scale)
        by_size = (self._tensors[unit.positions[0]] for unit in self._units if unit.travel is Travel.BY_SIZE)
        known = [(tensor, tuple(shape.tolist())) for tensor, shape in zip(by_size, shapes)]
        # Others again: since the graph was built, a variable may have ended and another one have taken its name.
        self._include([*self._buckets, *(self._settings.planned(Bucket.of(tensor.label, shape))
                                         for tensor, shape in known if self._compresses(tensor, shape))])
        for home in self._homes:
            self._settings.shares(home).adopt()

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
        settings = self._settings
        ranks = settings.process_set.size()
        key = (known, compressed, ranks)
        if self._last is None or self._last[0] != key:
            exchanged = [one for unit, shape, yes in zip(self._units, known, compressed)
                         for one in self._exchanged(unit, shape, yes)]
            buckets = [settings.planned(bucket) for bucket in self._chosen(known, compressed)]
            self._last = key, (Statement.of(settings.config, exchanged, buckets, ranks, settings.ranks_per_machine),
                               np.array(compressed))
        return self._last[1]

    def _chosen(self, known: Sequence[tuple[int, ...] | None], compressed: Sequence[bool]) -> Iterator[Bucket]:
        """The buckets of a step in which these units are compressed, as the graph chooses them."""
        steady = all(yes for unit, yes in zip(self._units, compressed) if unit.travel is Travel.COMPRESSED)
        for unit, shape, yes in zip(self._units, known, compressed):
            if yes and shape is not None:
                yield Bucket.of(self._tensors[unit.positions[0]].label, shape)
            elif yes and not steady:
                for load in self.loads_of(unit):
                    yield from load.buckets
        for load in self.steady if steady else ():
            yield from load.buckets

    def _is_compressed(self, unit: Unit, shape: tuple[int, ...] | None) -> bool:
        """Whether all tensors of a unit are ready; ``shape`` is given where it is known in the step only."""
        if unit.travel is Travel.COMPRESSED:
            return all(self._ready(self._tensors[position]) for position in unit.positions)
        return unit.travel is Travel.BY_SIZE and self._compresses(
            self._tensors[unit.positions[0]], shape) and self._ready(self._tensors[unit.positions[0]])

    def _ready(self, tensor: Tensor) -> bool:
        assert tensor.residuals is not None
        return self._settings.shares(tensor.residuals).ready(tensor.name)

    def _compresses(self, tensor: Tensor, shape: tuple[int, ...] | None) -> bool:
        assert tensor.residuals is not None and shape is not None
        return self._settings.config.compresses(int(np.prod(shape, dtype=np.int64)))

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


def named(bucket: Bucket, names: Mapping[str, str]) -> Bucket:
    """A bucket whose parts bear other names."""
    return Bucket(tuple(dataclasses.replace(part, name=names[part.name]) for part in bucket.parts))


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
        ConfigError: see ``device_of``.
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
    name = "" if residuals is None else residuals.name_of(variable)
    return Tensor(label=label, residuals=residuals, name=name,
                  key=label if residuals is None else residuals.key(name, label), shape=shape, dtype=gradient.dtype,
                  travel=travel, group=group, device=None if sparse else device_of(variable))


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

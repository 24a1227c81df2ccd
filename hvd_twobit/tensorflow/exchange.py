"""The exchange of gradients as a piece of TensorFlow graph: NumPy functions around Horovod's public collectives.

For each gradient: ``numpy_function`` (encode) -> allgather -> ``numpy_function`` (decode). Python builds this once per
trace; all that changes from step to step lies behind the NumPy functions, which TensorFlow's threads call. So this file
must hold nothing of a step in Python, not even when Keras runs eagerly: then the graph is built once as well.

Only ``encode`` is declared stateful, as it changes the residual: TensorFlow runs stateful functions one after the
other, and so would wait for a tensor's collective before it encoded the next. The others are given inputs that are
known in the step only, as TensorFlow would call a stateless function of constants, and the collective of its result,
beforehand.

Every exchange begins with the ranks' agreement (see ``agreement``). It depends on no gradient, so it is under way while
the model computes, and every collective waits for it: ranks that would send different collectives are told so instead
of waiting for each other.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.util import split_list

from ..agreement import NBYTES, Statement, disagreement
from ..config import TwoBitConfig
from ..errors import UnsupportedOperationError
from ..payload import payload_nbytes
from ..reduction import Reduction, refuse_dtype
from .buffers import Recycled, aligned_copy
from .graphs import building_with_xla, collective_name, count_exchange, exchanges_before, held_until
from .variables import VariableResiduals, unique

# Horovod 0.28.1 has no bfloat16; what is not listed travels as float32.
_HOROVOD_DTYPES = (tf.float16, tf.float32, tf.float64)


class Travel(enum.Enum):
    """How a gradient reaches the other ranks."""

    COMPRESSED = "two bits per element"
    PLAIN = "as it is, in an allreduce"
    SPARSE = "as slices, in allgathers"
    BY_SIZE = "compressed or plain, known when its size is"


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


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the user chose, apart from the variables.

    Attributes:
        config: checked parameters of the compression.
        reduction: sum or average.
        process_set: the ranks that exchange.
        device_dense: Horovod's ``device_dense``, for what travels uncompressed.
        device_sparse: Horovod's ``device_sparse``.
    """

    config: TwoBitConfig
    reduction: Reduction
    process_set: hvd.ProcessSet
    device_dense: str
    device_sparse: str


def exchange(settings: Settings, tensors: Sequence[Tensor], gradients: Sequence[Any]) -> list[Any]:
    """Exchange gradients with the other ranks of the process set.

    Args:
        settings: the user's choices.
        tensors: what is known of the gradients.
        gradients: as many ``tf.Tensor`` or ``tf.IndexedSlices``; called eagerly or while a graph is built.

    Returns:
        The reduced gradients. Without other ranks, the gradients themselves, as Horovod has it.

    Raises:
        UnsupportedOperationError: a graph is built that XLA is to compile.
    """
    if not tensors:
        return []
    elastic = bool(int(os.environ.get("HOROVOD_ELASTIC", 0)))
    if not elastic and not (settings.process_set.included() and settings.process_set.size() > 1):
        return list(gradients)
    if not tf.executing_eagerly():
        if building_with_xla():
            raise UnsupportedOperationError("jit_compile=True compiles the training step with XLA, and Horovod's "
                                            "collectives cannot be part of that, with TwoBit or without: leave "
                                            "jit_compile out")
        return _Builder(settings, tensors, elastic).build(gradients)
    return _traced(settings, tensors, gradients, elastic)(*gradients)


def _traced(settings: Settings, tensors: Sequence[Tensor], gradients: Sequence[Any], elastic: bool) -> Any:
    """The exchange as a function to call eagerly; traced once, however many tapes are made."""
    home = next((tensor.residuals for tensor in tensors if tensor.residuals is not None), None)
    functions = {} if home is None else home.functions
    specs = [_spec(gradient) for gradient in gradients]
    key = (settings, tuple(tensors), tuple(specs))
    if key not in functions:
        builder = _Builder(settings, tensors, elastic)
        function = tf.function(lambda *parts: builder.build(parts), autograph=False)
        # A concrete function is a graph even where tf.config.run_functions_eagerly(True) makes others run eagerly.
        functions[key] = function.get_concrete_function(*specs)
    return functions[key]


def _spec(gradient: Any) -> tf.TypeSpec:
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.TensorSpec(gradient.shape, gradient.dtype)
    # The number of slices may be another one at every step.
    shape = None if gradient.dense_shape is None else tf.TensorShape([None] * gradient.dense_shape.shape[0])
    return tf.IndexedSlicesSpec(shape, gradient.dtype, gradient.indices.dtype,
                                None if gradient.dense_shape is None else gradient.dense_shape.dtype, [None])


class _Builder:
    """Builds the graph of one exchange."""

    def __init__(self, settings: Settings, tensors: Sequence[Tensor], elastic: bool) -> None:
        self._settings = settings
        self._tensors = list(tensors)
        self._elastic = elastic
        self._last_stated: tuple[list[int], Statement] | None = None

    def build(self, gradients: Sequence[Any]) -> list[Any]:
        """The reduced gradients, symbolically."""
        if not self._elastic:
            return self._among_ranks(gradients)
        process_set_id = self._settings.process_set.process_set_id
        others = tf.logical_and(tf.equal(hvd.process_set_included_op(process_set_id), 1),
                                tf.greater(hvd.size_op(process_set_id), 1))
        return list(tf.nest.flatten(tf.cond(others, lambda: self._among_ranks(gradients), lambda: list(gradients)),
                                    expand_composites=False))

    def _among_ranks(self, gradients: Sequence[Any]) -> list[Any]:
        agreed = self._agree(gradients)
        reduced: list[Any] = [None] * len(gradients)
        # TensorFlow encodes in the order in which this is built: as gradients are computed, the last one first.
        for positions in reversed(self._alike()):
            tensors, parts = [self._tensors[i] for i in positions], [gradients[i] for i in positions]
            travel = tensors[0].travel
            if travel is Travel.COMPRESSED:
                results = self._compressed(tensors, parts, agreed)
            elif travel is Travel.PLAIN:
                results = self._plain(tensors, parts, agreed)
            elif travel is Travel.SPARSE:
                results = [self._sparse(tensor, part, agreed) for tensor, part in zip(tensors, parts)]
            else:
                results = [self._by_size(tensor, part, agreed) for tensor, part in zip(tensors, parts)]
            for position, result in zip(positions, results):
                reduced[position] = result
        count_exchange(reduced)
        return reduced

    def _alike(self) -> list[list[int]]:
        """Positions of the tensors that one collective can carry, in order of first appearance."""
        alike: dict[Any, list[int]] = {}
        for position, tensor in enumerate(self._tensors):
            wire = tensor.dtype if tensor.travel is Travel.PLAIN else None
            alike.setdefault((tensor.group, tensor.travel, wire), []).append(position)
        return list(alike.values())

    # The agreement.

    def _agree(self, gradients: Sequence[Any]) -> tf.Tensor:
        """Zero, once all ranks have stated to send the same; a step in which they do not fails."""
        sizes = [tf.size(gradient) for tensor, gradient in zip(self._tensors, gradients)
                 if tensor.travel is Travel.BY_SIZE]
        process_set = self._settings.process_set
        with tf.device("/cpu:0"):
            mine = tf.numpy_function(lambda _, *sizes: np.frombuffer(self._statement(sizes).digest, np.uint8).copy(),
                                     [exchanges_before(), *sizes], tf.uint8)
            mine.set_shape([NBYTES])
            digests = hvd.allgather(mine, name=collective_name("HorovodAllgather", "agreement"), ignore_name_scope=True,
                                    process_set=process_set)
            equal = tf.numpy_function(
                lambda digests, *sizes: digests.tobytes() == self._statement(sizes).digest * process_set.size(),
                [digests, *sizes], tf.bool, stateful=False)
            equal.set_shape([])
            return tf.cond(equal, lambda: tf.constant(0), lambda: self._tell_difference(digests, sizes))

    def _tell_difference(self, digests: tf.Tensor, sizes: Sequence[tf.Tensor]) -> tf.Tensor:
        line = tf.numpy_function(
            lambda digests, *sizes: np.frombuffer(self._statement(sizes).to_json(), np.uint8).copy(),
            [digests, *sizes], tf.uint8, stateful=False)
        line.set_shape([None])
        lines = hvd.allgather(line, name=collective_name("HorovodAllgather", "agreement.details"),
                              ignore_name_scope=True, process_set=self._settings.process_set)

        def fail(lines: np.ndarray) -> np.ndarray:
            raise disagreement(lines.tobytes(), hvd.rank())

        never = tf.numpy_function(fail, [lines], tf.int32, stateful=False)
        never.set_shape([])
        return never

    def _statement(self, sizes: Sequence[Any]) -> Statement:
        """What this rank exchanges; made anew only where a size that is known in the step has changed."""
        elements, last = [int(size) for size in sizes], self._last_stated
        if last is None or last[0] != elements:
            last = self._last_stated = (elements, self._stated(elements))
        return last[1]

    def _stated(self, sizes: Sequence[int]) -> Statement:
        min_elements = self._settings.config.min_elements
        remaining = iter(sizes)
        stated = []
        for tensor in self._tensors:
            if tensor.travel is Travel.BY_SIZE:
                elements = next(remaining)
                stated.append((tensor.label, elements, elements >= min_elements))
            else:
                elements = -1 if tensor.shape is None else tensor.elements
                stated.append((tensor.label, elements, tensor.travel is Travel.COMPRESSED))
        return Statement(min_elements, tuple(sorted(stated)))

    # The four ways to travel.

    def _compressed(self, tensors: Sequence[Tensor], gradients: Sequence[tf.Tensor],
                    agreed: tf.Tensor) -> list[tf.Tensor]:
        with tf.device("/cpu:0"):
            sent = [held_until(agreed, self._encode(tensor, gradient)) for tensor, gradient in zip(tensors, gradients)]
            options = dict(name=collective_name("HorovodAllgather", tensors[0].label), ignore_name_scope=True,
                           process_set=self._settings.process_set)
            gathered = [hvd.allgather(sent[0], **options)] if len(sent) == 1 else hvd.grouped_allgather(sent, **options)
            return [self._decode(*parts) for parts in zip(tensors, gradients, gathered)]

    def _encode(self, tensor: Tensor, gradient: tf.Tensor) -> tf.Tensor:
        assert tensor.residuals is not None
        codec, lock = tensor.residuals.codec(self._settings.config), tensor.residuals.lock(tensor.name)

        known = tensor.shape or ()

        def encode(flat: np.ndarray, shape: np.ndarray | None = None) -> np.ndarray:
            with lock:
                payload = codec.encode(tensor.name, known if shape is None else tuple(shape.tolist()), flat)
                # The codec overwrites its memory; Horovod may still be reading that of an exchange before.
                return aligned_copy(payload)

        inputs = [tf.reshape(tf.cast(gradient, tf.float32), [-1])]
        payload = tf.numpy_function(encode, inputs if tensor.shape is not None else [*inputs, tf.shape(gradient)],
                                    tf.uint8)
        payload.set_shape([None if tensor.shape is None else payload_nbytes(tensor.elements)])
        return payload

    def _decode(self, tensor: Tensor, gradient: tf.Tensor, gathered: tf.Tensor) -> tf.Tensor:
        assert tensor.residuals is not None
        codec, settings, memory = tensor.residuals.codec(self._settings.config), self._settings, Recycled()

        def decode(gathered: np.ndarray, size: np.ndarray | None = None) -> np.ndarray:
            # Read anew at every step: an elastic job changes the number of ranks.
            ranks = settings.process_set.size()
            out = memory.empty(tensor.elements if size is None else int(size))
            codec.decode(tensor.name, gathered, ranks, out, settings.reduction.scale(ranks))
            return out

        out = tf.numpy_function(decode, [gathered] if tensor.shape is not None else [gathered, tf.size(gradient)],
                                tf.float32, stateful=False)
        return tf.cast(tf.reshape(out, tf.shape(gradient) if tensor.shape is None else tensor.shape), tensor.dtype)

    def _plain(self, tensors: Sequence[Tensor], gradients: Sequence[tf.Tensor], agreed: tf.Tensor) -> list[tf.Tensor]:
        wire = tensors[0].dtype if tensors[0].dtype in _HOROVOD_DTYPES else tf.float32
        sent = [held_until(agreed, tf.cast(gradient, wire)) for gradient in gradients]
        reduction = self._settings.reduction
        options = dict(op=reduction.op, prescale_factor=reduction.prescale, postscale_factor=reduction.postscale,
                       device_dense=self._settings.device_dense, process_set=self._settings.process_set,
                       name=collective_name("HorovodAllreduce", tensors[0].label), ignore_name_scope=True)
        received = [hvd.allreduce(sent[0], **options)] if len(sent) == 1 else hvd.grouped_allreduce(sent, **options)
        return [tf.cast(part, tensor.dtype) for tensor, part in zip(tensors, received)]

    def _sparse(self, tensor: Tensor, slices: tf.IndexedSlices, agreed: tf.Tensor) -> tf.IndexedSlices:
        """As Horovod reduces ``tf.IndexedSlices``: the slices of all ranks, one after the other."""
        wire = tensor.dtype if tensor.dtype in _HOROVOD_DTYPES else tf.float32
        settings = self._settings
        with tf.device(settings.device_sparse):
            values, indices = (
                hvd.allgather(held_until(agreed, part), name=collective_name("HorovodAllgather", name),
                              ignore_name_scope=True, process_set=settings.process_set)
                for name, part in ((f"{tensor.label}.values", tf.cast(slices.values, wire)),
                                   (f"{tensor.label}.indices", slices.indices)))
            if settings.reduction.averages:
                values /= tf.cast(hvd.size_op(settings.process_set.process_set_id), wire)
        return tf.IndexedSlices(tf.cast(values, tensor.dtype), indices, slices.dense_shape)

    def _by_size(self, tensor: Tensor, gradient: tf.Tensor, agreed: tf.Tensor) -> tf.Tensor:
        reduced = tf.cond(tf.size(gradient) >= self._settings.config.min_elements,
                          lambda: self._compressed([tensor], [gradient], agreed)[0],
                          lambda: self._plain([tensor], [gradient], agreed)[0])
        reduced.set_shape(gradient.shape)
        return reduced


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

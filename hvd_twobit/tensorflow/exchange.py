"""The exchange of gradients as a piece of TensorFlow graph: NumPy functions around Horovod's public collectives.

Compressed gradients travel in buckets (see ``transfer``), others in Horovod's allreduce. Python builds this once per
trace; all that changes from step to step lies behind NumPy functions, which TensorFlow's threads call. So nothing of a
step may be held in Python elsewhere, not even when Keras runs eagerly: then the graph is built once as well.

Every exchange begins with the ranks' agreement (see ``agreement``). It depends on no gradient, so it is under way while
the model computes, and every collective waits for it: ranks that would send different collectives are told so instead
of waiting for each other. What is decided in the step (is a tensor's warm-up over? by how much is the loss scaled?) is
decided there, and the graph has both ways.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..agreement import are_equal, disagreement
from .devices import HOST_DEVICE
from .graphs import collective_name, count_exchange, exchanges_before, held_until, meeting_name, refuse_xla
from .hierarchy import TwoLevel, is_elastic, levels_of
from .on_devices import OnDevices
from .plan import Load, Plan, Settings, Tensor, Travel, Unit
from .transfer import OneLevel

# Horovod 0.28.1 has no bfloat16; what is not listed travels as float32.
HOROVOD_DTYPES = (tf.float16, tf.float32, tf.float64)


def exchange(settings: Settings, tensors: Sequence[Tensor], gradients: Sequence[Any],
             loss_scale: tf.Tensor | None = None) -> list[Any]:
    """Exchange gradients with the other ranks of the process set.

    Args:
        settings: the user's choices.
        tensors: what is known of the gradients.
        gradients: as many ``tf.Tensor`` or ``tf.IndexedSlices``; called eagerly or while a graph is built.
        loss_scale: by what the gradients are multiplied, a scalar; None where nothing says so.

    Returns:
        The reduced gradients. Without other ranks, the gradients themselves, as Horovod has it.

    Raises:
        UnsupportedOperationError: a graph is built that XLA is to compile; or see ``levels_of``,
        ConfigError: likewise,
        DisagreementError: likewise.
        ResidualError: a variable had another shape before.
    """
    if not tensors:
        return []
    elastic = is_elastic()
    if not elastic and not (settings.process_set.included() and settings.process_set.size() > 1):
        return list(gradients)
    if not tf.executing_eagerly():
        refuse_xla()
    settings = dataclasses.replace(settings, levels=levels_of(settings))
    if not tf.executing_eagerly():
        return _Builder(settings, tensors, elastic).build(gradients, loss_scale)
    return _traced(settings, tensors, gradients, loss_scale, elastic)(*gradients, loss_scale)


def _traced(settings: Settings, tensors: Sequence[Tensor], gradients: Sequence[Any], loss_scale: tf.Tensor | None,
            elastic: bool) -> Any:
    """The exchange as a function to call eagerly; traced once, however many tapes are made."""
    home = next((tensor.residuals for tensor in tensors if tensor.residuals is not None), None)
    functions = {} if home is None else home.functions
    specs = [_spec(gradient) for gradient in gradients]
    scale_spec = None if loss_scale is None else _spec(loss_scale)
    key = (settings, tuple(tensors), tuple(specs), scale_spec)
    if key not in functions:
        for ended in [other for other in functions if not all(tensor.is_alive for tensor in other[1])]:
            del functions[ended]
        builder = _Builder(settings, tensors, elastic)
        function = tf.function(lambda *parts: builder.build(parts[:-1], parts[-1]), autograph=False)
        # A concrete function is a graph even where tf.config.run_functions_eagerly(True) makes others run eagerly.
        functions[key] = function.get_concrete_function(*specs, scale_spec)
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
        self._units = self._alike()
        self._plan = Plan(settings, self._tensors, self._units, elastic)

    def build(self, gradients: Sequence[Any], loss_scale: tf.Tensor | None = None) -> list[Any]:
        """The reduced gradients, symbolically."""
        if not self._elastic:
            return self._among_ranks(gradients, loss_scale)
        process_set_id = self._settings.process_set.process_set_id
        others = tf.logical_and(tf.equal(hvd.process_set_included_op(process_set_id), 1),
                                tf.greater(hvd.size_op(process_set_id), 1))
        return list(tf.nest.flatten(self._either(others, lambda: self._among_ranks(gradients, loss_scale),
                                                 lambda: list(gradients), range(len(gradients))),
                                    expand_composites=False))

    def _among_ranks(self, gradients: Sequence[Any], loss_scale: tf.Tensor | None) -> list[Any]:
        agreed, compressed = self._agree(gradients, loss_scale)
        reduced: list[Any] = [None] * len(gradients)
        # TensorFlow encodes in the order in which this is built: as gradients are computed, the last one first.
        for number, unit in reversed(list(enumerate(self._units))):
            if unit.travel is not Travel.COMPRESSED:
                self._put(reduced, unit, self._one_unit(unit, gradients, agreed, compressed[number]))
        warming = [(number, unit) for number, unit in reversed(list(enumerate(self._units)))
                   if unit.travel is Travel.COMPRESSED]

        def steady() -> list[list[Any]]:
            by_position = self._compressed(self._plan.steady, gradients, agreed)
            return [[by_position[position] for position in unit.positions] for _, unit in warming]

        def warming_up() -> list[list[Any]]:
            return [self._one_unit(unit, gradients, agreed, compressed[number]) for number, unit in warming]

        if warming and self._settings.config.uncompressed_steps:
            # One decision for all: TensorFlow would run one after the other the branches that change residuals, each
            # with its collective, as it does during warm-up.
            all_ready = tf.reduce_all(tf.gather(compressed, [number for number, _ in warming]))
            results = self._either(all_ready, steady, warming_up, [position for _, unit in warming
                                                                   for position in unit.positions])
        else:
            results = steady()
        for (_, unit), result in zip(warming, results):
            self._put(reduced, unit, result)
        count_exchange(reduced if loss_scale is None else [*reduced, self._undone_where_not_finite(reduced)])
        return reduced

    def _one_unit(self, unit: Unit, gradients: Sequence[Any], agreed: tf.Tensor, compressed: tf.Tensor) -> list[Any]:
        """The reduced gradients of a unit; ``compressed`` tells of one that is not always so whether it is now."""
        tensors, parts = self._of(unit, gradients)
        if unit.travel is Travel.PLAIN:
            return self._plain(tensors, parts, agreed)
        if unit.travel is Travel.SPARSE:
            return [self._sparse(tensor, part, agreed) for tensor, part in zip(tensors, parts)]

        def in_buckets() -> list[tf.Tensor]:
            by_position = self._compressed(self._plan.loads_of(unit), gradients, agreed)
            return [by_position[position] for position in unit.positions]

        return list(self._either(compressed, in_buckets, lambda: self._warming_up(tensors, parts, agreed),
                                 unit.positions))

    def _either(self, predicate: tf.Tensor, yes: Callable[[], Any], no: Callable[[], Any],
                positions: Iterable[int]) -> Any:
        """``tf.cond``, whose results are gradients of these tensors: they stay on the device that all of them share.

        TensorFlow would choose a device for them, and copy them there.
        """
        devices = {self._tensors[position].device for position in positions}
        device = devices.pop() if len(devices) == 1 else None
        if device is None:
            return tf.cond(predicate, yes, no)

        def anywhere(build: Callable[[], Any]) -> Callable[[], Any]:
            def branch() -> Any:
                with tf.device(None):
                    return build()

            return branch

        with tf.device(device):
            return tf.cond(predicate, anywhere(yes), anywhere(no))

    def _of(self, unit: Unit, gradients: Sequence[Any]) -> tuple[list[Tensor], list[Any]]:
        return ([self._tensors[position] for position in unit.positions],
                [gradients[position] for position in unit.positions])

    @staticmethod
    def _put(reduced: list[Any], unit: Unit, results: Sequence[Any]) -> None:
        for position, result in zip(unit.positions, results):
            reduced[position] = result

    def _alike(self) -> list[Unit]:
        """What one allreduce can carry, in order of first appearance."""
        alike: dict[Any, list[int]] = {}
        for position, tensor in enumerate(self._tensors):
            wire = tensor.dtype if tensor.travel is Travel.PLAIN else None
            alone = position if tensor.travel is Travel.BY_SIZE else None
            alike.setdefault((tensor.group, tensor.travel, wire, alone), []).append(position)
        return [Unit(tuple(positions), self._tensors[positions[0]].travel) for positions in alike.values()]

    # The beginning and the end of a step.

    def _agree(self, gradients: Sequence[Any], loss_scale: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        """Zero, once all ranks have stated to send the same, and which units are compressed in this step.

        A step in which ranks do not state the same fails.
        """
        plan, adds = self._plan, self._settings.config.transport == "allreduce"
        shapes = [tf.shape(gradients[unit.positions[0]]) for unit in self._units if unit.travel is Travel.BY_SIZE]

        def begin(_: np.ndarray, loss_scale: np.ndarray, *shapes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            plan.begin_step(float(loss_scale), shapes)
            statement, compressed = plan.of_step(shapes)
            return statement.addends if adds else np.frombuffer(statement.digest, np.uint8).copy(), compressed

        with tf.device(HOST_DEVICE):
            scale = tf.constant(0.0) if loss_scale is None else tf.cast(loss_scale, tf.float32)
            mine, compressed = tf.numpy_function(begin, [exchanges_before(), scale, *shapes],
                                                 [tf.int64 if adds else tf.uint8, tf.bool])
            mine.set_shape([None])
            compressed.set_shape([len(self._units)])
            stated, equal = self._added_up(mine) if adds else self._gathered(mine)
            equal.set_shape([])
            agreed = tf.cond(equal, lambda: tf.constant(0), lambda: self._tell_difference(stated, shapes))
            return agreed, compressed

    def _gathered(self, digest: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """What all ranks state, and whether it is the same."""
        process_set = self._settings.process_set
        digests = hvd.allgather(digest, name=meeting_name("HorovodAllgather", "agreement"), ignore_name_scope=True,
                                process_set=process_set)
        return digests, tf.numpy_function(
            lambda digests, mine: digests.tobytes() == mine.tobytes() * process_set.size(),
            [digests, digest], tf.bool, stateful=False)

    def _added_up(self, addends: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The same by an allreduce, in which a rank that has joined (``hvd.join``) states nothing."""
        total = hvd.allreduce(addends, op=hvd.Sum, name=meeting_name("HorovodAllreduce", "agreement"),
                              ignore_name_scope=True, process_set=self._settings.process_set)
        return total, tf.numpy_function(are_equal, [total, addends], tf.bool, stateful=False)

    def _tell_difference(self, stated: tf.Tensor, shapes: Sequence[tf.Tensor]) -> tf.Tensor:
        line = tf.numpy_function(
            lambda stated, *shapes: np.frombuffer(self._plan.of_step(shapes)[0].to_json(), np.uint8).copy(),
            [stated, *shapes], tf.uint8, stateful=False)
        line.set_shape([None])
        lines = hvd.allgather(line, name=meeting_name("HorovodAllgather", "agreement.details"),
                              ignore_name_scope=True, process_set=self._settings.process_set)

        def fail(lines: np.ndarray) -> np.ndarray:
            raise disagreement(lines.tobytes(), hvd.rank())

        never = tf.numpy_function(fail, [lines], tf.int32, stateful=False)
        never.set_shape([])
        return never

    def _undone_where_not_finite(self, reduced: Sequence[Any]) -> tf.Tensor:
        """Done when residuals and levels are what they were, if a gradient is not finite.

        A LossScaleOptimizer skips the step then.
        """
        def all_finite(tensor: Tensor, part: Any) -> tf.Tensor:
            with tf.device(tensor.device or HOST_DEVICE):
                return tf.reduce_all(tf.math.is_finite(part.values if isinstance(part, tf.IndexedSlices) else part))

        def undo(finite: np.ndarray) -> np.ndarray:
            if not finite:
                self._plan.undo_step()
            return np.zeros((), np.int32)

        found = [all_finite(*pair) for pair in zip(self._tensors, reduced)]
        with tf.device(HOST_DEVICE):
            return tf.numpy_function(undo, [tf.reduce_all(found)], tf.int32)

    # The ways to travel.

    def _compressed(self, loads: Sequence[Load], gradients: Sequence[Any], agreed: tf.Tensor) -> dict[int, tf.Tensor]:
        """The reduced gradients by position."""
        reduced: dict[int, tf.Tensor] = {}
        for load in loads:
            tensors = [self._tensors[position] for position in load.positions]
            on_devices = any(tensor.device is not None for tensor in tensors)
            kind = TwoLevel if self._settings.levels is not None else OnDevices if on_devices else OneLevel
            transfer = kind(self._settings, tensors, load.buckets, self._elastic)
            reduced.update(zip(load.positions,
                               transfer.build([gradients[position] for position in load.positions], agreed)))
        return reduced

    def _plain(self, tensors: Sequence[Tensor], gradients: Sequence[tf.Tensor], agreed: tf.Tensor) -> list[tf.Tensor]:
        return [tf.cast(part, tensor.dtype) for tensor, part in zip(tensors, self._summed(tensors, gradients, agreed))]

    def _summed(self, tensors: Sequence[Tensor], gradients: Sequence[tf.Tensor], agreed: tf.Tensor) -> list[tf.Tensor]:
        """What an allreduce returns for gradients of one dtype, in the dtype in which it travels."""
        wire = tensors[0].dtype if tensors[0].dtype in HOROVOD_DTYPES else tf.float32
        sent = [held_until(agreed, tf.cast(gradient, wire)) for gradient in gradients]
        reduction = self._settings.reduction
        options = dict(op=reduction.op, prescale_factor=reduction.prescale, postscale_factor=reduction.postscale,
                       device_dense=self._settings.device_dense, process_set=self._settings.process_set,
                       name=collective_name("HorovodAllreduce", tensors[0].label), ignore_name_scope=True)
        return [hvd.allreduce(sent[0], **options)] if len(sent) == 1 else hvd.grouped_allreduce(sent, **options)

    def _warming_up(self, tensors: Sequence[Tensor], gradients: Sequence[tf.Tensor],
                    agreed: tf.Tensor) -> list[tf.Tensor]:
        """Plain, one allreduce per dtype, and levels are learnt from what comes back."""
        results: dict[int, tf.Tensor] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            members = [number for number, tensor in enumerate(tensors) if tensor.dtype == dtype]
            summed = self._summed([tensors[number] for number in members], [gradients[number] for number in members],
                                  agreed)
            for number, part in zip(members, summed):
                with tf.control_dependencies([self._observe(tensors[number], part)]):
                    results[number] = tf.cast(tf.identity(part), dtype)
        return [results[number] for number in range(len(tensors))]

    def _observe(self, tensor: Tensor, summed: tf.Tensor) -> tf.Tensor:
        """Done when levels have learnt from an uncompressed exchange."""
        assert tensor.residuals is not None
        shares, settings = self._settings.shares(tensor.residuals), self._settings

        def observe(flat: np.ndarray) -> np.ndarray:
            if settings.config.compresses(flat.size):
                shares.observe(tensor.name, flat, settings.exchanging.size(), settings.scale)
            return np.zeros((), np.int32)

        with tf.device(HOST_DEVICE):
            flat = tf.reshape(tf.cast(summed, tf.float32), [-1])
            # Declared stateful, as TensorFlow would drop a function whose result nobody needs.
            return tf.numpy_function(observe, [flat], tf.int32)

    def _sparse(self, tensor: Tensor, slices: tf.IndexedSlices, agreed: tf.Tensor) -> tf.IndexedSlices:
        """As Horovod reduces ``tf.IndexedSlices``: the slices of all ranks, one after the other."""
        wire = tensor.dtype if tensor.dtype in HOROVOD_DTYPES else tf.float32
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

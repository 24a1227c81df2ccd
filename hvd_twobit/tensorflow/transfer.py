"""Compressed gradients on their way, as a piece of graph: what is decoded at once, and the buckets that carry it.

For each bucket: ``numpy_function`` (encode) -> allgather, or -> allreduce; or, by ``sra``, ``numpy_function`` (encode)
-> alltoall -> ``numpy_function`` (sum) -> allgather. Then one ``numpy_function`` (decode) for all that came back, with
an output per gradient: a gradient that was cut into several buckets is put together there. ``hierarchy`` has the same
for exchanges of two levels, in which these buckets hold shares.

Only ``encode`` is declared stateful, as it changes residuals: TensorFlow runs stateful functions one after the other,
and so would wait for a bucket's collectives before it encoded the next. The others are given inputs that are known in
the step only, as TensorFlow would call a stateless function of constants, and the collective of its result, beforehand.

``encode`` also tells the bytes of each payload into which it has cut the bucket: one for an allgather, one per rank for
``sra``, none for an allreduce, which adds integers. The other functions go by that, so that a step is of one mind,
although the number of ranks is a fact of the step and, with ``transport="auto"``, how a bucket travels depends on it.
Where the graph outlives that decision, it has all ways; bytes are what all of them can carry, and integers are cast,
which copies nothing, where they meet their collective.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from .. import errors
from ..buckets import Bucket
from ..codec import BucketLayout, Contents
from ..tallies import TallyLayout
from .buffers import aligned_empty, aligned_zeros
from .devices import HOST_DEVICE
from .graphs import collective_name, held_until
from .plan import Settings, Tensor, named
from .variables import VariableResiduals

GATHER = "HorovodAllgather"
"""What alltoalls are called too: ``hvd.elastic.run`` of Horovod 0.28.1 takes an alltoall that failed for a mistake."""

Shapes = Sequence[np.ndarray]
"""Of the gradients whose shapes are known in the step only: of one, where it is exchanged alone, or of none."""


class CodedBucket:
    """A bucket that travels as codes.

    Args:
        settings: the user's choices.
        residuals: of what the bucket holds.
        prefix: see ``collective_name``.
        label: what the bucket's collectives are named after; the same on every rank.
        transport: how it travels, where that is known before the step; else ``"auto"``. An attribute, too.
        bucket: what it holds in a step with such shapes.
        transport_in_step: how it travels in that step.
    """

    def __init__(self, settings: Settings, residuals: VariableResiduals, prefix: str, label: str, transport: str,
                 bucket: Callable[[Shapes], Bucket], transport_in_step: Callable[[Shapes], str]) -> None:
        self._process_set = settings.exchanging
        self._codec = residuals.codec(settings.config)
        self._lock = residuals.lock
        self._prefix = prefix
        self._label = label
        self.transport = transport
        self._bucket = bucket
        self._transport_in_step = transport_in_step
        self._last_layout: tuple[Any, BucketLayout] | None = None
        self._last_tallies: TallyLayout | None = None

    def encode(self, gradients: Iterable[tuple[str, np.ndarray]], shapes: Shapes) -> tuple[np.ndarray, np.ndarray]:
        """The payloads of all chunks and how many bytes each of these has, or integers and nothing.

        Args:
            gradients: name and float32[elements] of every tensor of the bucket.
            shapes: see ``Shapes``.
        """
        def write(layout: BucketLayout, payloads: np.ndarray) -> None:
            for name, gradient in gradients:
                self._codec.encode(layout, payloads, name, gradient)

        return self.written(write, shapes)

    def written(self, write: Callable[[BucketLayout, np.ndarray], None],
                shapes: Shapes) -> tuple[np.ndarray, np.ndarray]:
        """As ``encode``, where ``write`` writes codes and block tables, by ``Codec.encode`` or ``Codec.place``."""
        # Read anew at every step: an elastic job changes the number of ranks.
        transport = self._transport_in_step(shapes)
        layout = self._layout(self._process_set.size() if transport == "sra" else 1, shapes)
        payloads = aligned_zeros(layout.nbytes)  # New in each step: Horovod may still be reading the one before.
        with self._lock:
            write(layout, payloads)
            self._codec.seal(layout, payloads)
        if transport == "allreduce":
            return self._integers(layout, payloads), np.empty(0, np.int32)
        return payloads, np.array(layout.chunk_nbytes, np.int32)

    def _integers(self, layout: BucketLayout, payloads: np.ndarray) -> np.ndarray:
        """A sealed payload as integers that can be added, uint8."""
        tallies = self._tallies(layout)
        integers = aligned_empty(4 * tallies.size)
        self._codec.tally(layout, payloads, self._process_set.rank(), tallies, integers.view(np.uint32))
        return integers

    def carried(self, payloads: tf.Tensor, splits: tf.Tensor, shapes: Sequence[tf.Tensor],
                agreed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """What all ranks sent, or the sums of it, uint8; and why this rank could not sum, see ``told``.

        Payloads are held until ranks have agreed right before the collective: of two reshapes TensorFlow drops the
        first.
        """
        def by_allgather() -> tuple[tf.Tensor, tf.Tensor]:
            return hvd.allgather(held_until(agreed, payloads), name=self._name(GATHER), ignore_name_scope=True,
                                 process_set=self._process_set), _nothing()

        def by_allreduce() -> tuple[tf.Tensor, tf.Tensor]:
            integers = tf.bitcast(tf.reshape(payloads, [-1, 4]), tf.int32)
            added = hvd.allreduce(held_until(agreed, integers), op=hvd.Sum, name=self._name("HorovodAllreduce"),
                                  ignore_name_scope=True, process_set=self._process_set)
            return tf.reshape(tf.bitcast(added, tf.uint8), [-1]), _nothing()

        def by_sra() -> tuple[tf.Tensor, tf.Tensor]:
            received, _ = hvd.alltoall(held_until(agreed, payloads), splits, name=self._name(GATHER),
                                       ignore_name_scope=True, process_set=self._process_set)
            sums, failure = tf.numpy_function(self._sum, [received, splits, *shapes], [tf.uint8, tf.uint8],
                                              stateful=False)
            sums.set_shape([None])
            failure.set_shape([None])
            return hvd.allgather(sums, name=self._name(GATHER, "sums."), ignore_name_scope=True,
                                 process_set=self._process_set), failure

        if self.transport == "auto":
            return tf.switch_case(tf.minimum(tf.size(splits), 2), [by_allreduce, by_allgather, by_sra])
        return {"allgather": by_allgather, "sra": by_sra, "allreduce": by_allreduce}[self.transport]()

    def _name(self, kind: str, of: str = "") -> str:
        return collective_name(kind, f"{of}{self._label}", self._prefix)

    def _sum(self, received: np.ndarray, splits: np.ndarray, *shapes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The sums of this rank's chunk; or nothing, which is an error on all ranks, and why."""
        try:
            return self._codec.sum(self._layout(splits.size, shapes), self._process_set.rank(), received,
                                   splits.size), told()
        except errors.TwoBitError as error:
            return np.empty(0, np.uint8), told(error)

    def receive(self, arrived: np.ndarray, payloads: int, failure: np.ndarray, shapes: Shapes) -> Contents:
        """What came back, checked.

        Args:
            arrived: what ``carried`` returned,
            payloads: in how many payloads this rank's bucket was sent, or 0 for integers,
            failure: as ``carried`` returned it.
            shapes: see ``Shapes``.

        Raises:
            PayloadError: a rank sent something else than what this rank expects.
        """
        raise_told(failure)
        layout = self._layout(max(1, payloads), shapes)
        if payloads == 0:
            return self._codec.receive_tallies(layout, self._tallies(layout), arrived.view(np.uint32))
        if payloads > 1 or self.transport == "sra":  # By which one rank alone, of the only machine, sends one.
            return self._codec.receive_sums(layout, arrived)
        return self._codec.receive(layout, arrived, self._process_set.size())

    def _layout(self, chunks: int, shapes: Shapes) -> BucketLayout:
        """The layout in so many payloads; the last one is kept, as what it depends on changes seldom."""
        key = chunks, known(shapes)
        if self._last_layout is None or self._last_layout[0] != key:
            self._last_layout = key, self._codec.layout(self._bucket(shapes), chunks)
        return self._last_layout[1]

    def _tallies(self, layout: BucketLayout) -> TallyLayout:
        """How a bucket that is one chunk lies in integers; the last one is kept as well."""
        ranks, last = self._process_set.size(), self._last_tallies
        if last is None or last.tallies.ranks != ranks or last.layout is not layout.chunks[0].layout:
            last = self._last_tallies = self._codec.tally_layout(layout, ranks)
        return last


class Transfer:
    """The exchange of gradients that are decoded at once. Subclasses say how.

    Args:
        settings: the user's choices.
        tensors: what is known of the gradients, in the order in which they lie in the bucket.
        buckets: what they travel in, parts being named by labels; none where the size of the gradient, the only one, is
            known in the step only.
        elastic: whether the number of ranks may change.
    """

    _PREFIX = "twobit"

    def __init__(self, settings: Settings, tensors: Sequence[Tensor], buckets: Sequence[Bucket],
                 elastic: bool) -> None:
        home = tensors[0].residuals
        assert home is not None
        self._settings = settings
        self._home = home
        self._codec = home.codec(settings.config)
        self._memory = [home.memory(tensor.name) for tensor in tensors]  # Not of this trace: there may be many.
        self._tensors = tensors
        self._by_size = not buckets
        self._labels = [bucket.name for bucket in buckets] or [tensors[0].label]
        self._buckets = [named(bucket, {tensor.label: tensor.name for tensor in tensors}) for bucket in buckets]
        transports = ([settings.config.transport] * len(self._labels) if elastic or self._by_size
                      else [settings.planned(bucket).transport for bucket in self._buckets])
        self._coded = [CodedBucket(settings, home, self._PREFIX, label, transport,
                                   functools.partial(self._of_codes, number),
                                   functools.partial(self._transport, number))
                       for number, (label, transport) in enumerate(zip(self._labels, transports))]

    def build(self, gradients: Sequence[tf.Tensor], agreed: tf.Tensor) -> list[tf.Tensor]:
        """The reduced gradients, symbolically; collectives wait for ``agreed``."""
        flat = [self._flat(*pair) for pair in zip(self._tensors, gradients)]
        with tf.device(HOST_DEVICE):
            shapes = [tf.shape(gradients[0])] if self._by_size else []
            reduced = self._exchanged(flat, shapes, agreed)
        return [self._shaped(*triple) for triple in zip(self._tensors, gradients, reduced)]

    def _flat(self, tensor: Tensor, gradient: tf.Tensor) -> tf.Tensor:
        with tf.device(self._device(tensor)):
            return tf.reshape(tf.cast(gradient, tf.float32), [-1])

    def _shaped(self, tensor: Tensor, gradient: tf.Tensor, reduced: tf.Tensor) -> tf.Tensor:
        with tf.device(self._device(tensor)):
            return tf.cast(tf.reshape(reduced, tf.shape(gradient) if self._by_size else tensor.shape), tensor.dtype)

    def _bucket(self, number: int, shapes: Shapes) -> Bucket:
        return Bucket.of(self._tensors[0].name, known(shapes)[0]) if self._by_size else self._buckets[number]

    def _transport(self, number: int, shapes: Shapes) -> str:
        return self._settings.planned(self._bucket(number, shapes)).transport

    def _outs(self, shapes: Shapes) -> list[np.ndarray]:
        """Memory for the reduced gradients, flat."""
        return [memory.empty(math.prod(part.shape))
                for memory, part in zip(self._memory, self._bucket(0, shapes).parts)]

    # What subclasses do.

    def _device(self, tensor: Tensor) -> str:
        """Where a tensor's gradient is compressed and the reduced one made."""
        return HOST_DEVICE

    def _of_codes(self, number: int, shapes: Shapes) -> Bucket:
        """What travels of a bucket as codes."""
        raise NotImplementedError

    def _exchanged(self, flat: Sequence[tf.Tensor], shapes: Sequence[tf.Tensor], agreed: tf.Tensor) -> list[tf.Tensor]:
        """The reduced gradients, flat."""
        raise NotImplementedError


class OneLevel(Transfer):
    """An exchange among all ranks, in which every rank encodes its own gradients."""

    def _of_codes(self, number: int, shapes: Shapes) -> Bucket:
        return self._bucket(number, shapes)

    def _exchanged(self, flat: Sequence[tf.Tensor], shapes: Sequence[tf.Tensor], agreed: tf.Tensor) -> list[tf.Tensor]:
        encoded: list[tuple[tf.Tensor, tf.Tensor]] = []
        for coded in self._coded:
            # In a graph of tf.compat.v1 nothing else keeps the buckets of one gradient in order.
            with tf.control_dependencies([payload for payload, _ in encoded[-1:]]):
                encoded.append(payloads_of(self._encode(coded), [*flat, *shapes]))
        carried = [coded.carried(*sent, shapes, agreed) for coded, sent in zip(self._coded, encoded)]
        return tf.numpy_function(self._decode, [*(arrived for arrived, _ in carried), *(split for _, split in encoded),
                                                *(failure for _, failure in carried), *shapes],
                                 [tf.float32] * len(self._tensors), stateful=False)

    def _encode(self, coded: CodedBucket) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
        def encode(*inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            count = len(self._tensors)
            return coded.encode(((tensor.name, gradient) for tensor, gradient in zip(self._tensors, inputs[:count])),
                                inputs[count:])

        return encode

    def _decode(self, *inputs: np.ndarray) -> list[np.ndarray]:
        count = len(self._coded)
        shapes = inputs[3 * count:]
        outs = self._outs(shapes)
        for coded, arrived, splits, failure in zip(self._coded, inputs, inputs[count:], inputs[2 * count:]):
            contents = coded.receive(arrived, splits.size, failure, shapes)
            for tensor, out in zip(self._tensors, outs):
                self._codec.decode(contents, tensor.name, out, self._settings.scale)
        return outs


def payloads_of(encode: Callable[..., Any], inputs: Sequence[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """What a function that encodes returns, symbolically."""
    payloads, splits = tf.numpy_function(encode, inputs, [tf.uint8, tf.int32])
    payloads.set_shape([None])
    splits.set_shape([None])
    return payloads, splits


def known(shapes: Shapes) -> list[tuple[int, ...]]:
    """Shapes as tuples."""
    return [tuple(shape.tolist()) for shape in shapes]


def told(error: errors.TwoBitError | None = None) -> np.ndarray:
    """An error as uint8, to be raised by a later function of the graph; nothing for None.

    What a rank's ``numpy_function`` raises ends that rank's step, while others may wait for what it sends next.
    """
    return np.frombuffer(json.dumps([type(error).__name__, str(error)]).encode() if error else b"", np.uint8).copy()


def raise_told(failure: np.ndarray) -> None:
    """Raise the error that ``told`` was given, if any."""
    if failure.size:
        kind, text = json.loads(failure.tobytes())
        raise getattr(errors, kind)(text)


def _nothing() -> tf.Tensor:
    return tf.zeros([0], tf.uint8)

"""Compressed gradients on their way, as a piece of graph: what is decoded at once, and the buckets that carry it.

For each bucket: ``numpy_function`` (encode) -> allgather, or -> allreduce; or, by ``sra``, ``numpy_function`` (encode)
-> alltoall -> ``numpy_function`` (sum) -> allgather. Then one ``numpy_function`` (decode) for all that came back, with
an output per gradient: a gradient that was cut into several buckets is put together there.

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

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..buckets import Bucket
from ..codec import BucketLayout
from ..tallies import TallyLayout
from ..transports import transport_of
from .buffers import aligned_empty, aligned_zeros
from .graphs import collective_name, held_until
from .plan import Settings, Tensor

_KIND = "HorovodAllgather"
"""What alltoalls are called too: ``hvd.elastic.run`` of Horovod 0.28.1 takes an alltoall that failed for a mistake."""


class Transfer:
    """The exchange of gradients that are decoded at once.

    Args:
        settings: the user's choices.
        tensors: what is known of the gradients, in the order in which they lie in the bucket.
        buckets: what they travel in, parts being named by labels; none where the size of the gradient, the only one, is
            known in the step only.
        elastic: whether the number of ranks may change.
    """

    def __init__(self, settings: Settings, tensors: Sequence[Tensor], buckets: Sequence[Bucket],
                 elastic: bool) -> None:
        home = tensors[0].residuals
        assert home is not None
        self._config = settings.config
        self._process_set = settings.process_set
        self._reduction = settings.reduction
        self._lock = home.lock
        self._codec = home.codec(settings.config)
        self._memory = [home.memory(tensor.name) for tensor in tensors]  # Not of this trace: there may be many.
        self._tensors = tensors
        self._by_size = not buckets
        self._names = [bucket.name for bucket in buckets] or [tensors[0].label]
        residual_names = {tensor.label: tensor.name for tensor in tensors}
        self._buckets = [Bucket(tuple(dataclasses.replace(part, name=residual_names[part.name])
                                      for part in bucket.parts)) for bucket in buckets]
        self._transports = ([settings.config.transport] * len(self._names) if elastic or self._by_size
                            else [self._transport_of(bucket) for bucket in self._buckets])
        self._last_layouts: dict[int, tuple[Any, BucketLayout]] = {}
        self._last_tallies: dict[int, TallyLayout] = {}

    def build(self, gradients: Sequence[tf.Tensor], agreed: tf.Tensor) -> list[tf.Tensor]:
        """The reduced gradients, symbolically; collectives wait for ``agreed``."""
        with tf.device("/cpu:0"):
            flat = [tf.reshape(tf.cast(gradient, tf.float32), [-1]) for gradient in gradients]
            shapes = [tf.shape(gradients[0])] if self._by_size else []
            payloads, splits = self._encoded(flat, shapes)
            gathered = [self._carried(number, payload, splits[number], shapes, agreed)
                        for number, payload in enumerate(payloads)]
            return [tf.cast(tf.reshape(out, tf.shape(gradient) if self._by_size else tensor.shape), tensor.dtype)
                    for tensor, gradient, out in zip(self._tensors, gradients,
                                                     self._decoded(gathered, splits, shapes))]

    def _encoded(self, flat: Sequence[tf.Tensor],
                 shapes: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Of each bucket, the payloads of all chunks and how many bytes each of these has, or integers and nothing."""
        payloads: list[tf.Tensor] = []
        splits: list[tf.Tensor] = []
        for number in range(len(self._names)):
            # In a graph of tf.compat.v1 nothing else keeps the buckets of one gradient in order.
            with tf.control_dependencies(payloads[-1:]):
                payload, split = tf.numpy_function(self._encode(number), [*flat, *shapes], [tf.uint8, tf.int32])
            payload.set_shape([None])
            split.set_shape([None])
            payloads.append(payload)
            splits.append(split)
        return payloads, splits

    def _encode(self, number: int) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
        def encode(*inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            flat, shapes = inputs[:len(self._tensors)], inputs[len(self._tensors):]
            # Read anew at every step: an elastic job changes the number of ranks.
            transport = self._transport_of(self._bucket(number, shapes))
            layout = self._layout(number, self._process_set.size() if transport == "sra" else 1, shapes)
            payloads = aligned_zeros(layout.nbytes)  # New in each step: Horovod may still be reading the one before.
            with self._lock:
                for tensor, gradient in zip(self._tensors, flat):
                    self._codec.encode(layout, payloads, tensor.name, gradient)
                self._codec.seal(layout, payloads)
            if transport == "allreduce":
                return self._integers(number, layout, payloads), np.empty(0, np.int32)
            return payloads, np.array(layout.chunk_nbytes, np.int32)

        return encode

    def _integers(self, number: int, layout: BucketLayout, payloads: np.ndarray) -> np.ndarray:
        """A sealed payload as integers that can be added, uint8."""
        tallies = self._tallies(number, layout)
        integers = aligned_empty(4 * tallies.size)
        self._codec.tally(layout, payloads, self._process_set.rank(), tallies, integers.view(np.uint32))
        return integers

    def _carried(self, number: int, payloads: tf.Tensor, splits: tf.Tensor, shapes: Sequence[tf.Tensor],
                 agreed: tf.Tensor) -> tf.Tensor:
        """What all ranks sent of a bucket, or the sums of it; uint8.

        Payloads are held until ranks have agreed right before the collective: of two reshapes TensorFlow drops the
        first.
        """
        label = self._names[number]

        def by_allgather() -> tf.Tensor:
            return hvd.allgather(held_until(agreed, payloads), name=collective_name(_KIND, label),
                                 ignore_name_scope=True, process_set=self._process_set)

        def by_allreduce() -> tf.Tensor:
            integers = tf.bitcast(tf.reshape(payloads, [-1, 4]), tf.int32)
            added = hvd.allreduce(held_until(agreed, integers), op=hvd.Sum, ignore_name_scope=True,
                                  name=collective_name("HorovodAllreduce", label), process_set=self._process_set)
            return tf.reshape(tf.bitcast(added, tf.uint8), [-1])

        def by_sra() -> tf.Tensor:
            received, _ = hvd.alltoall(held_until(agreed, payloads), splits, name=collective_name(_KIND, label),
                                       ignore_name_scope=True, process_set=self._process_set)
            sums = tf.numpy_function(self._sum(number), [received, splits, *shapes], tf.uint8, stateful=False)
            sums.set_shape([None])
            return hvd.allgather(sums, name=collective_name(_KIND, f"sums.{label}"), ignore_name_scope=True,
                                 process_set=self._process_set)

        if self._transports[number] == "auto":
            return tf.switch_case(tf.minimum(tf.size(splits), 2), [by_allreduce, by_allgather, by_sra])
        return {"allgather": by_allgather, "sra": by_sra, "allreduce": by_allreduce}[self._transports[number]]()

    def _sum(self, number: int) -> Callable[..., np.ndarray]:
        def summed(received: np.ndarray, splits: np.ndarray, *shapes: np.ndarray) -> np.ndarray:
            layout = self._layout(number, splits.size, shapes)
            return self._codec.sum(layout, self._process_set.rank(), received, splits.size)

        return summed

    def _decoded(self, gathered: Sequence[tf.Tensor], splits: Sequence[tf.Tensor],
                 shapes: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The reduced gradients, flat."""
        count = len(gathered)

        def decode(*inputs: np.ndarray) -> list[np.ndarray]:
            ranks = self._process_set.size()
            payloads = [split.size for split in inputs[count:2 * count]]
            layouts = [self._layout(number, max(1, sent), inputs[2 * count:]) for number, sent in enumerate(payloads)]
            outs = [memory.empty(math.prod(part.shape))
                    for memory, part in zip(self._memory, layouts[0].bucket.parts)]
            for number, (layout, sent, arrived) in enumerate(zip(layouts, payloads, inputs)):
                if sent == 0:
                    contents = self._codec.receive_tallies(layout, self._tallies(number, layout),
                                                           arrived.view(np.uint32))
                else:
                    contents = (self._codec.receive(layout, arrived, ranks) if sent == 1
                                else self._codec.receive_sums(layout, arrived))
                for tensor, out in zip(self._tensors, outs):
                    self._codec.decode(contents, tensor.name, out, self._reduction.scale(ranks))
            return outs

        return tf.numpy_function(decode, [*gathered, *splits, *shapes], [tf.float32] * len(self._tensors),
                                 stateful=False)

    def _transport_of(self, bucket: Bucket) -> str:
        return transport_of(self._config, bucket.elements, self._process_set.size())

    def _bucket(self, number: int, shapes: Sequence[np.ndarray]) -> Bucket:
        return Bucket.of(self._tensors[0].name, shapes[0].tolist()) if self._by_size else self._buckets[number]

    def _layout(self, number: int, chunks: int, shapes: Sequence[np.ndarray]) -> BucketLayout:
        """The layout of a bucket; the last one is kept, as what it depends on changes seldom."""
        key = chunks, [tuple(shape.tolist()) for shape in shapes]
        last = self._last_layouts.get(number)
        if last is None or last[0] != key:
            last = self._last_layouts[number] = key, self._codec.layout(self._bucket(number, shapes), chunks)
        return last[1]

    def _tallies(self, number: int, layout: BucketLayout) -> TallyLayout:
        """How a bucket that is one chunk lies in integers; the last one is kept as well."""
        ranks = self._process_set.size()
        last = self._last_tallies.get(number)
        if last is None or last.tallies.ranks != ranks or last.layout is not layout.chunks[0].layout:
            last = self._last_tallies[number] = self._codec.tally_layout(layout, ranks)
        return last

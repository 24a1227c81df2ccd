"""Exchanges of two levels, as a piece of graph: within the machine in full precision, two bits between machines.

For each bucket of a transfer (see ``transfer``, whose ``CodedBucket`` is the way between machines): an alltoall of
float32 within the machine, after which this rank has the machine's gradient in its shares -> ``numpy_function`` (add up
and encode) -> the transport between machines -> ``numpy_function`` (decode into the shares) -> an allgather of float32
within the machine. Then one ``numpy_function`` puts together the gradients of all buckets.

Horovod's operations have process sets as attributes, so which ranks share a machine has to be known when a graph is
built. Ranks ask each other when they build their first one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..agreement import Statement, disagreement
from ..buckets import Bucket
from ..config import TwoBitConfig
from ..errors import TwoBitError, UnsupportedOperationError
from ..hierarchy import FAILED, TwoLevelLayout
from ..machines import Levels, Place, asks_for_levels
from .graphs import collective_name, held_until, meeting_name, run_now
from .plan import Settings, Tensor
from .transfer import GATHER, CodedBucket, Shapes, Transfer, known, payloads_of, raise_told, told

_found: dict[Any, Levels | None] = {}


def is_elastic() -> bool:
    """Whether this is an elastic job, whose graphs outlive worlds and process sets."""
    return bool(int(os.environ.get("HOROVOD_ELASTIC", 0)))


def check(settings: Settings) -> None:
    """Raise UnsupportedOperationError where ``hierarchical=True`` is asked for and cannot be."""
    asks_for_levels(settings.config.hierarchical, settings.process_set.ranks, hvd.global_process_set.ranks)
    if settings.config.hierarchical is True and is_elastic():
        raise UnsupportedOperationError(
            "hierarchical=True cannot be used with TensorFlow in an elastic job: process sets are part of its graphs, "
            "which outlive them; leave it out, or give TwoBit hierarchical=\"auto\", which then exchanges on one level")


def levels_of(settings: Settings) -> Levels | None:
    """The levels of all ranks; None where one level is enough. Asked of all of them at the first call in a world.

    Raises:
        DisagreementError: ``hierarchical`` differs between ranks; raised on every rank.
        UnsupportedOperationError: machines have different numbers of ranks, and ``hierarchical`` is not ``"auto"``.
        ConfigError: a process set is missing and cannot be added.
    """
    config = settings.config
    if is_elastic() or not asks_for_levels(config.hierarchical, settings.process_set.ranks,
                                           hvd.global_process_set.ranks):
        return None
    place = Place.of(hvd)
    world = config.hierarchical, hvd.rank(), hvd.size(), place
    levels = _found.get(world)
    if world not in _found or not (levels is None or levels.are_current):
        _agree_to_ask(config)  # Or a rank that was told another setting would wait for ever.
        lines = _gathered(place.to_json(), "machines").tobytes()
        levels = _found[world] = Levels.decided(config.hierarchical, [Place.from_json(line) for line
                                                                      in lines.splitlines()], hvd.rank(),
                                                hvd.add_process_set)
    return levels


def _agree_to_ask(config: TwoBitConfig) -> None:
    """Raise DisagreementError unless all ranks ask for levels now; others are in an exchange's agreement."""
    statement = Statement.of(config, (), (), hvd.size(), 0)
    if config.transport == "allreduce":
        agree = statement.agrees(run_now(lambda: hvd.allreduce(
            _constant(statement.addends), op=hvd.Sum, name=meeting_name("HorovodAllreduce", "agreement"),
            ignore_name_scope=True)))
    else:
        agree = _gathered(statement.digest, "agreement").tobytes() == statement.digest * hvd.size()
    if not agree:
        raise disagreement(_gathered(statement.to_json(), "agreement.details").tobytes(), hvd.rank())


def _gathered(content: bytes, label: str) -> np.ndarray:
    """The bytes of all ranks, uint8."""
    return run_now(lambda: hvd.allgather(_constant(np.frombuffer(content, np.uint8)), ignore_name_scope=True,
                                         name=meeting_name(GATHER, label)))


def _constant(values: np.ndarray) -> tf.Tensor:
    """Values that TensorFlow does not take for constant, or it would call a collective of them beforehand as well."""
    tensor = tf.numpy_function(lambda: values.copy(), [], tf.as_dtype(values.dtype))
    tensor.set_shape(values.shape)
    return tensor


class TwoLevel(Transfer):
    """An exchange in which the ranks of a machine divide each bucket, and encode their shares of its gradient."""

    _PREFIX = "twobit-across"  # A rank whose shares of a bucket are empty has no such collective of it.

    def __init__(self, settings: Settings, tensors: Sequence[Tensor], buckets: Sequence[Bucket],
                 elastic: bool) -> None:
        super().__init__(settings, tensors, buckets, elastic)
        assert settings.levels is not None
        self._within = settings.levels.within
        self._layouts: dict[int, tuple[Any, TwoLevelLayout]] = {}

    def _exchanged(self, flat: Sequence[tf.Tensor], shapes: Sequence[tf.Tensor], agreed: tf.Tensor) -> list[tf.Tensor]:
        count = len(self._coded)
        # Stateless, though it may take over what lies beside shares: a bucket would wait for the codes of the one
        # before. Held until ranks have agreed, so that it is called in the step, and once.
        scattered = tf.numpy_function(self._scatter, [*(held_until(agreed, gradient) for gradient in flat), *shapes],
                                      [tf.float32] * count + [tf.int32] * count, stateful=False)
        gathered, failures = [], []
        for number, (label, coded) in enumerate(zip(self._labels, self._coded)):
            sent, splits = scattered[number], scattered[count + number]
            sent.set_shape([None])
            splits.set_shape([self._within.size()])
            received, _ = hvd.alltoall(sent, splits, name=collective_name(GATHER, f"within.{label}"),
                                       ignore_name_scope=True, process_set=self._within)
            reduced, failure = self._crossed(number, coded, received, shapes, agreed)
            gathered.append(hvd.allgather(reduced, name=collective_name(GATHER, f"machine.{label}"),
                                          ignore_name_scope=True, process_set=self._within))
            failures.append(failure)
        return tf.numpy_function(self._put_together, [*gathered, *failures, *shapes],
                                 [tf.float32] * len(self._tensors), stateful=False)

    def _crossed(self, number: int, coded: CodedBucket, received: tf.Tensor, shapes: Sequence[tf.Tensor],
                 agreed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """This rank's shares, reduced over machines, with a verdict behind; and why that failed, see ``told``."""
        if self._by_size or self._layout(number, ()).own is not None:
            payloads, splits = payloads_of(self._encode(number, coded), [received, *shapes])
            arrived, failure = coded.carried(payloads, splits, shapes, agreed)
            inputs = [arrived, splits, failure, *shapes]
            reduced, failure = tf.numpy_function(self._receive(number, coded), inputs, [tf.float32, tf.uint8],
                                                 stateful=False)
        else:
            reduced, failure = tf.numpy_function(lambda _: (self._layout(number, ()).result(), told()), [received],
                                                 [tf.float32, tf.uint8], stateful=False)
        reduced.set_shape([None])
        failure.set_shape([None])
        return reduced, failure

    def _of_codes(self, number: int, shapes: Shapes) -> Bucket:
        own = self._layout(number, shapes).own
        assert own is not None
        return own

    def _layout(self, number: int, shapes: Shapes) -> TwoLevelLayout:
        """Where the shares of a bucket lie; the last layout is kept."""
        key = known(shapes)
        last = self._layouts.get(number)
        if last is None or last[0] != key:
            keys = {tensor.name: tensor.key for tensor in self._tensors}
            # Of a gradient whose size is known in the step, so is whether there is something to exchange.
            last = self._layouts[number] = key, TwoLevelLayout(
                self._bucket(number, shapes), self._within.rank(), self._settings.ranks_per_machine,
                self._settings.config.block_elements, keys, with_empty=self._by_size)
        return last[1]

    def _scatter(self, *inputs: np.ndarray) -> list[np.ndarray]:
        """What this rank sends of each bucket to the ranks of its machine, and how many elements each of them gets."""
        flat, shapes = inputs[:len(self._tensors)], inputs[len(self._tensors):]
        shares = self._settings.shares(self._home)
        with self._home.lock:
            gradients = {tensor.name: shares.take_over(tensor.name, gradient)
                         for tensor, gradient in zip(self._tensors, flat)}
        layouts = [self._layout(number, shapes) for number in range(len(self._coded))]
        sent = []
        for number, layout in enumerate(layouts):
            sent.append(self._home.memory(self._tensors[0].name, f"sent {number}").empty(layout.elements))
            for name, gradient in gradients.items():
                layout.put(name, gradient, sent[number])
        return [*sent, *(layout.splits for layout in layouts)]

    def _encode(self, number: int, coded: CodedBucket) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
        def encode(received: np.ndarray, *shapes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            layout = self._layout(number, shapes)
            gradient = layout.machine_gradient(received, self._settings.reduction.averages)
            return coded.encode(((share.name, values) for _, share, values in layout.of_own(gradient)), shapes)

        return encode

    def _receive(self, number: int, coded: CodedBucket) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
        def receive(arrived: np.ndarray, splits: np.ndarray, failure: np.ndarray,
                    *shapes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            layout = self._layout(number, shapes)
            reduced = self._home.memory(self._tensors[0].name, f"reduced {number}").empty(layout.result_elements)
            try:
                contents = coded.receive(arrived, splits.size, failure, shapes)
                for _, share, out in layout.of_own(reduced):
                    self._codec.decode(contents, share.name, out, self._settings.scale)
            except TwoBitError as error:  # The machine's other ranks wait for this one.
                reduced[:] = 0
                reduced[-1] = FAILED
                return reduced, told(error)
            reduced[-1] = 0
            return reduced, told()

        return receive

    def _put_together(self, *inputs: np.ndarray) -> list[np.ndarray]:
        """The reduced gradients, flat, from what the ranks of this machine have reduced of each bucket."""
        count = len(self._coded)
        shapes = inputs[2 * count:]
        for failure in inputs[count:2 * count]:
            raise_told(failure)
        outs = self._outs(shapes)
        for number, arrived in enumerate(inputs[:count]):
            layout = self._layout(number, shapes)
            layout.check(arrived)
            for tensor, out in zip(self._tensors, outs):
                layout.take(tensor.name, arrived, out)
        return outs

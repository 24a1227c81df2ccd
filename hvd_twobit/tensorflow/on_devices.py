"""Compressed gradients that lie on a GPU, as a piece of graph: what leaves and reaches it are codes.

For each load (see ``transfer``): ``numpy_function`` (begin: thresholds and levels; brings residuals to their devices)
-> on the device: ``kernels.quantized`` -> codes and block table, 1/16 of the gradient's bytes, to the host ->
``numpy_function`` per bucket (write payloads) -> collectives as for gradients on the host -> ``numpy_function`` (check,
and hand out what arrived of each gradient) -> on the device: ``kernels.unpack_sum`` or ``unpack_counts`` -> the reduced
gradient. A gradient is quantized as a whole, also where it is cut into several buckets or chunks, as all cuts are made
between blocks. Gradients on the host that share a bucket with these are encoded and decoded there, as in ``OneLevel``.

A residual lies in a variable on the device (``DeviceMemory``). Behind TensorFlow's back it is read and assigned to by
``begin``, when a state was loaded, at a change of the loss scale and by ``undo``; so the graph reads it after ``begin``
and writes a payload after it was assigned to.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from .. import kernels as interface
from ..buckets import Bucket, Part
from ..codec import BucketLayout, Piece
from ..payload import BLOCK_TABLE
from . import kernels
from .buffers import aligned_empty
from .devices import HOST_DEVICE, DeviceMemory, on_device
from .plan import Settings, Tensor
from .transfer import CodedBucket, OneLevel, Shapes, payloads_of

_ONE_BLOCK = 2**31 - interface.ELEMENTS_PER_WORD
"""``block_elements`` of fixed levels, which all elements of a tensor share."""


@dataclasses.dataclass(frozen=True)
class Form:
    """What a gradient arrives as.

    Attributes:
        kind: ``"codes"`` of ranks with the same levels, ``"codes of other levels"``, ``"counts"`` or ``"sums"``.
        bits: of a count, else 0.
    """

    kind: str
    bits: int = 0


class OnDevices(OneLevel):
    """An exchange among all ranks of gradients of which some lie on devices that compress."""

    def __init__(self, settings: Settings, tensors: Sequence[Tensor], buckets: Sequence[Bucket],
                 elastic: bool) -> None:
        super().__init__(settings, tensors, buckets, elastic)
        self._places = [None if tensor.device is None else self._home.on_device(
            tensor.name, tensor.device, None if self._by_size else tensor.elements) for tensor in tensors]
        self._adaptive = settings.config.adaptive
        self._block_elements = settings.config.block_elements if self._adaptive else _ONE_BLOCK
        self._forms = self._possible_forms(elastic)

    def _device(self, tensor: Tensor) -> str:
        return tensor.device or HOST_DEVICE

    def _possible_forms(self, elastic: bool) -> list[Form]:
        transports = {coded.transport for coded in self._coded}
        if "auto" in transports:
            transports = {"allgather", "sra", "allreduce"}
        forms = []
        if "allgather" in transports:
            forms += [Form("codes")] if self._adaptive else [Form("codes"), Form("codes of other levels")]
        if transports - {"allgather"}:
            ranks = self._settings.exchanging.size()
            forms += [Form("counts", bits) for bits in (interface.COUNT_BITS if elastic
                                                        else [interface.count_bits(ranks)])]
        if "sra" in transports and not self._adaptive:
            forms.append(Form("sums"))
        return forms

    def _on_devices(self) -> Iterator[tuple[int, Tensor, DeviceMemory]]:
        for number, (tensor, place) in enumerate(zip(self._tensors, self._places)):
            if place is not None:
                yield number, tensor, place

    def _exchanged(self, flat: Sequence[tf.Tensor], shapes: Sequence[tf.Tensor], agreed: tf.Tensor) -> list[tf.Tensor]:
        sent, assigned, samples = self._quantized(flat, shapes, agreed)
        encoded: list[tuple[tf.Tensor, tf.Tensor]] = []
        for coded in self._coded:
            with tf.control_dependencies(assigned):
                encoded.append(payloads_of(self._encode(coded), [*sent, samples, *shapes]))
        carried = [coded.carried(*pair, shapes, agreed) for coded, pair in zip(self._coded, encoded)]
        return self._unpacked([*(arrived for arrived, _ in carried), *(split for _, split in encoded),
                               *(failure for _, failure in carried), *shapes], flat)

    # From gradients to payloads.

    def _quantized(self, flat: Sequence[tf.Tensor], shapes: Sequence[tf.Tensor],
                   agreed: tf.Tensor) -> tuple[list[tf.Tensor], list[tf.Operation], tf.Tensor]:
        """Gradients on the host, and what is sent of the others; when residuals are there; and samples."""
        members = list(self._on_devices())
        # Stateless, or it would wait for the codes of the load before. What ranks have agreed on is known in the step
        # only, so it is called in the step, and once.
        *tables, sampled = tf.numpy_function(self._begin, [agreed, *shapes],
                                             [tf.float32] * (2 * len(members)) + [tf.bool], stateful=False)
        sampled.set_shape([])
        sent, assigned = list(flat), []
        for (number, tensor, place), thresholds, levels in zip(members, tables[::2], tables[1::2]):
            thresholds.set_shape([None, 2])
            levels.set_shape([None, 2])
            with tf.device(self._device(tensor)), tf.control_dependencies([sampled]):
                quantize = on_device(kernels.quantized, self._device(tensor), block_elements=self._block_elements,
                                     with_table=self._adaptive)
                sent[number], left = quantize(flat[number], place.variable.read_value(), thresholds, levels)
                assigned.append(place.variable.assign(left, read_value=False))
        return sent, assigned, tf.cond(sampled, lambda: self._samples(flat),
                                       lambda: tf.zeros([len(members), 2], tf.float64))

    def _samples(self, flat: Sequence[tf.Tensor]) -> tf.Tensor:
        """Norm and mean magnitude of each gradient on a device, for statistics."""
        found = []
        for number, tensor, _ in self._on_devices():
            with tf.device(self._device(tensor)):
                found.append(on_device(kernels.norm_and_mean, self._device(tensor))(flat[number]))
        with tf.device(HOST_DEVICE):
            return tf.stack(found)

    def _begin(self, _: np.ndarray, *shapes: np.ndarray) -> list[np.ndarray]:
        """Thresholds and levels of each gradient on a device, float32[blocks, 2], and whether samples are wanted."""
        tables: list[np.ndarray] = []
        sampled = False
        with self._home.lock:
            for part, place in self._wholes(shapes):
                quantizer, _ = self._codec.begin(part, None, place)
                tables += [np.stack([quantizer.positive_threshold, quantizer.negative_threshold], axis=1),
                           np.stack([quantizer.positive_level, quantizer.negative_level], axis=1)]
                sampled |= self._home.residuals.tensor(part.name, part.shape).statistics.is_sampled
        return [*tables, np.array(sampled)]

    def _wholes(self, shapes: Shapes) -> Iterator[tuple[Part, DeviceMemory]]:
        """Each tensor on a device, as a whole."""
        by_name = {part.name: part.shape for part in self._bucket(0, shapes).parts}
        for _, tensor, place in self._on_devices():
            yield Part(tensor.name, by_name[tensor.name], 0, math.prod(by_name[tensor.name])), place

    def _encode(self, coded: CodedBucket) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
        def encode(*inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            count = len(self._tensors)
            samples, shapes = inputs[count], inputs[count + 1:]

            def write(layout: BucketLayout, payloads: np.ndarray) -> None:
                for (part, _), sample in zip(self._wholes(shapes), samples):
                    statistics = self._home.residuals.tensor(part.name, part.shape).statistics
                    if statistics.is_sampled:
                        statistics.sample(*sample)
                for tensor, place, content in zip(self._tensors, self._places, inputs):
                    if place is None:
                        self._codec.encode(layout, payloads, tensor.name, content)
                    else:
                        self._codec.place(layout, payloads, tensor.name, self._cut(layout, tensor.name, content))

            return coded.written(write, shapes)

        return encode

    def _cut(self, layout: BucketLayout, name: str, content: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Codes and block table of each of a tensor's parts in a bucket, from those of the whole tensor."""
        found = []
        for _, _, part in layout.places(name):
            nbytes = interface.packed_nbytes(math.prod(part.shape))
            codes, table = content[:nbytes], content[nbytes:].view(BLOCK_TABLE)
            word, block = part.start // interface.ELEMENTS_PER_WORD, part.start // self._block_elements
            found.append((codes[4 * word:4 * word + interface.packed_nbytes(part.elements)],
                          table[block:block + interface.block_count(part.elements, self._block_elements)]))
        return found

    # From what arrived to reduced gradients.

    def _unpacked(self, arrived: Sequence[tf.Tensor], flat: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The reduced gradients, flat, from what came back of all buckets."""
        members = list(self._on_devices())
        types = [tf.float32] * (len(flat) - len(members)) + [tf.uint8, tf.float32] * len(members)
        *handed_out, form, scale = tf.numpy_function(self._hand_out, arrived, [*types, tf.int32, tf.float64],
                                                     stateful=False)
        form.set_shape([])
        scale.set_shape([])
        decoded, contents = handed_out[:len(flat) - len(members)], handed_out[len(flat) - len(members):]
        for content, levels in zip(contents[::2], contents[1::2]):
            content.set_shape([None, None])
            levels.set_shape([None, None, 2])

        values: dict[int, tf.Tensor] = {}
        for device in dict.fromkeys(self._device(tensor) for _, tensor, _ in members):
            here = [(number, tensor, content, levels) for (number, tensor, _), content, levels
                    in zip(members, contents[::2], contents[1::2]) if self._device(tensor) == device]

            def unpack(form: Form, here: Any = here) -> list[tf.Tensor]:
                return [self._values(form, tensor, content, levels, tf.size(flat[number]) if self._by_size
                                     else tf.constant(tensor.elements), scale)
                        for number, tensor, content, levels in here]

            with tf.device(device):  # Or TensorFlow would copy what a switch returns to the host.
                found = unpack(self._forms[0]) if len(self._forms) == 1 else tf.switch_case(
                    form, [functools.partial(unpack, one) for one in self._forms])
            values.update(zip((number for number, *_ in here), found))
        reduced = iter(decoded)
        return [next(reduced) if place is None else values[number] for number, place in enumerate(self._places)]

    def _values(self, form: Form, tensor: Tensor, content: tf.Tensor, levels: tf.Tensor, elements: Any,
                scale: tf.Tensor) -> tf.Tensor:
        """What arrived of a gradient as its values, on the device of the context."""
        device = self._device(tensor)
        if form.kind == "sums":
            return on_device(kernels.scaled, device)(
                tf.bitcast(tf.reshape(content, [-1, 4]), tf.float32)[:elements], scale)
        if form.kind == "counts":
            return on_device(kernels.unpack_counts, device, bits=form.bits, block_elements=self._block_elements)(
                content, levels[0], elements, scale)
        return on_device(kernels.unpack_sum, device, block_elements=self._block_elements,
                         levels_of_all=form.kind == "codes")(content, levels, elements, scale)

    def _hand_out(self, *inputs: np.ndarray) -> list[np.ndarray]:
        """Reduced gradients on the host; what arrived of each other, with levels; the form of these; and the factor."""
        count = len(self._coded)
        shapes = inputs[3 * count:]
        scale = self._settings.scale
        outs = {part.name: memory.empty(math.prod(part.shape)) for memory, part, place in
                zip(self._memory, self._bucket(0, shapes).parts, self._places) if place is None}
        pieces: dict[str, list[Piece]] = {tensor.name: [] for _, tensor, _ in self._on_devices()}
        for coded, arrived, splits, failure in zip(self._coded, inputs, inputs[count:], inputs[2 * count:]):
            contents = coded.receive(arrived, splits.size, failure, shapes)
            for name, out in outs.items():
                self._codec.decode(contents, name, out, scale)
            for name, found in pieces.items():
                found += self._codec.pieces(contents, name)
                self._codec.advance(contents, name)
        joined = [self._joined(found) for found in pieces.values()]
        return [*outs.values(), *(array for _, content, levels in joined for array in (content, levels)),
                np.array(self._forms.index(joined[0][0]), np.int32), np.array(scale)]

    def _joined(self, pieces: Sequence[Piece]) -> tuple[Form, np.ndarray, np.ndarray]:
        """What arrived of a gradient in one piece, uint8[rows, bytes], and its levels, float32[rows, blocks, 2]."""
        pieces = self._codec.alike(pieces)
        first = pieces[0]
        levels = np.concatenate([piece.levels for piece in pieces], axis=1) if self._adaptive else first.levels
        if first.sums is not None:
            sums = np.concatenate([piece.sums for piece in pieces if piece.sums is not None])
            return Form("sums"), sums.view(np.uint8)[None], levels
        if first.counts is not None:
            return Form("counts", first.bits), _side_by_side(piece.counts for piece in pieces), levels
        is_common = (levels.view(np.uint32) == levels[:1].view(np.uint32)).all()
        return (Form("codes") if is_common else Form("codes of other levels"),
                _side_by_side(piece.codes for piece in pieces), levels[:1] if is_common else levels)


def _side_by_side(parts: Iterable[np.ndarray | None]) -> np.ndarray:
    """uint8[rows, ..] arrays as one, in memory that TensorFlow takes as it is."""
    found = [part for part in parts if part is not None]
    rows, nbytes = len(found[0]), sum(part.shape[1] for part in found)
    return np.concatenate(found, axis=1, out=aligned_empty(rows * nbytes).reshape(rows, nbytes))

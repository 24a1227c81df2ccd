"""From a gradient to the bytes that are sent, and from what all ranks sent to the gradient's sum.

The codec joins configuration, levels, residuals, kernels and payload. It keeps one payload buffer per tensor, so that
a step allocates nothing of a gradient's size, and never calls a collective: a front end does, and must not encode a
tensor again before the collective that reads its payload has ended.

A tensor's exchange is one of two: while ``ready`` says no, its gradient travels uncompressed and ``observe`` is told
what came back; afterwards ``encode`` and ``decode`` stand around an allgather. All ranks get the same answers from
``ready``, as it depends on what all received.
"""

from __future__ import annotations

import dataclasses
import threading

import numpy as np

from . import kernels, payload
from .config import TwoBitConfig
from .errors import PayloadError, ResidualError
from .levels import levels_of
from .residuals import ResidualRegistry


@dataclasses.dataclass(frozen=True)
class _Buffer:
    """What is kept of a tensor between steps beside its state: its payload, and where the parts of it lie."""

    shape: tuple[int, ...]
    layout: payload.Layout
    payload: np.ndarray
    codes: np.ndarray
    table: np.ndarray


class Codec:
    """Encodes and decodes the gradients of one optimizer on this rank.

    Args:
        config: checked parameters.
        residuals: what the optimizer has not sent yet; updated by ``encode``. It also keeps levels and counters.
        backend: name of the kernel backend, see ``kernels.load``.
        warns: whether to log when a fixed threshold does not fit; one rank is enough.
    """

    def __init__(self, config: TwoBitConfig, residuals: ResidualRegistry, backend: str = "numba",
                 warns: bool = True) -> None:
        self._config = config
        self._warns = warns
        self._residuals = residuals
        self._levels = levels_of(config)
        self._kernels = kernels.load(backend)
        self._buffers: dict[str, _Buffer] = {}
        self._lock = threading.Lock()

    def compresses(self, elements: int) -> bool:
        """Whether a tensor of so many elements is compressed once it is ready, or always travels as it is."""
        return elements >= self._config.min_elements

    def payload_nbytes(self, elements: int) -> int:
        """Bytes of the payload of a tensor of so many elements."""
        return self._levels.layout(elements).nbytes

    def ready(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the next exchange of a tensor is compressed: its uncompressed ones are over.

        Raises:
            ResidualError: the tensor had another shape, or its levels other blocks (in a loaded state).
        """
        state = self._residuals.tensor(name, shape)
        if not self._config.adaptive:
            return state.uncompressed_steps >= self._config.uncompressed_steps
        if state.levels is None:
            return False
        blocks = self._levels.layout(_elements(shape)).blocks
        if state.levels.size != blocks:
            raise ResidualError(f"tensor {name!r} has {state.levels.size} levels, but {_elements(shape)} elements in "
                                f"blocks of {self._config.block_elements} take {blocks}: keep block_elements as it "
                                "was, or call forget_levels()")
        return state.uncompressed_steps >= self._config.uncompressed_steps

    def observe(self, name: str, shape: tuple[int, ...], reduced: np.ndarray, ranks: int, scale: float) -> None:
        """Learn from an uncompressed exchange of a tensor that is not ready.

        Args:
            name: the tensor's name.
            shape: the tensor's shape.
            reduced: float32[elements], what all ranks received: the scaled sum of their gradients.
            ranks: number of ranks that took part.
            scale: factor of the sum, as for ``decode``.
        """
        state = self._residuals.tensor(name, shape)
        state.remember(with_residual=False)
        state.statistics.uncompressed(reduced.size, reduced.nbytes)
        if self._config.adaptive:
            levels = self._levels.first(reduced, 1 / (ranks * scale))
            if levels is None:
                return
            state.levels = levels
        state.uncompressed_steps += 1

    def encode(self, name: str, shape: tuple[int, ...], gradient: np.ndarray) -> np.ndarray:
        """Add a gradient to its tensor's residual and take out what two bits can say.

        Args:
            name: the tensor's name, under which its residual is kept.
            shape: the tensor's shape.
            gradient: float32[elements], contiguous; not changed.

        Returns:
            The payload, uint8[payload_nbytes(elements)]: the codec's own memory, overwritten by the next ``encode``
            of this tensor.

        Raises:
            ResidualError: the tensor had another shape before.
        """
        state = self._residuals.tensor(name, shape)
        buffer = self._buffer(name, shape, gradient.size)
        loss_scale = self._residuals.loss_scale or 1.0
        quantizer = self._levels.quantizer(state.levels, gradient.size, loss_scale)
        state.remember(with_residual=self._residuals.can_undo)
        state.statistics.before(gradient)
        residual = state.residual
        selected_sum, selected_count = self._kernels.quantize_pack(gradient, residual, buffer.codes, quantizer)
        buffer.layout.write_header(buffer.payload, self._levels.header(state.levels, gradient.size, loss_scale))
        self._levels.write_table(buffer.table, selected_sum, selected_count, residual)
        state.statistics.after(residual, int(selected_count.sum()), float(quantizer.positive_level.mean()),
                               buffer.payload.size)
        if self._warns and not self._config.adaptive:
            threshold = min(float(quantizer.positive_threshold[0]), -float(quantizer.negative_threshold[0]))
            state.statistics.warn_of_fixed_threshold(name, threshold, residual)
        return buffer.payload

    def decode(self, name: str, shape: tuple[int, ...], gathered: np.ndarray, ranks: int, out: np.ndarray,
               scale: float) -> None:
        """Overwrite ``out`` with the scaled sum of what ``ranks`` ranks sent of a tensor; levels move on.

        Args:
            name: the tensor's name.
            shape: the tensor's shape.
            gathered: uint8, the payloads of all ranks in rank order.
            ranks: number of ranks that sent one.
            out: float32[elements], contiguous.
            scale: factor of the sum, for example ``1 / ranks`` for an average.

        Raises:
            PayloadError: a rank sent something else than a payload of this tensor, or has other levels.
        """
        layout = self._levels.layout(out.size)
        received = payload.split(gathered, ranks, layout, name)
        state = self._residuals.tensor(name, shape)
        own = self._levels.header(state.levels, out.size).levels_checksum
        for rank, header in enumerate(received.headers):
            if header.levels_checksum != own:
                known = self._residuals.loss_scale
                scaled = "" if known is None else (f"; this rank's loss scale is {known:g}, and has to be the same on "
                                                   "every rank")
                raise PayloadError(f"tensor {name!r}: the payload of rank {rank} has a levels_checksum of "
                                   f"{header.levels_checksum:#x}, this rank's levels have {own:#x}: load states of the "
                                   f"same step on every rank, or call forget_levels() on every rank{scaled}")
        senders = self._levels.of_senders(state.levels, received)
        block_elements = layout.block_elements or kernels.whole_tensor(out.size)
        self._kernels.unpack_sum(received.codes, senders, block_elements, out, scale)
        state.levels = self._levels.next(state.levels, received, out.size)

    def discard(self, name: str) -> None:
        """Free what is kept of a tensor, but for its residual; nothing where the name is unknown."""
        with self._lock:
            self._buffers.pop(name, None)

    def _buffer(self, name: str, shape: tuple[int, ...], elements: int) -> _Buffer:
        with self._lock:
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != shape:
                layout = self._levels.layout(elements)
                memory = layout.new()
                buffer = _Buffer(shape, layout, memory, layout.codes(memory), layout.table(memory))
                self._buffers[name] = buffer
            return buffer


def _elements(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))

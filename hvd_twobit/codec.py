"""From a gradient to the bytes that are sent, and from what all ranks sent to the gradient's sum.

The codec joins configuration, levels, residuals, kernels and payload. It keeps one payload buffer per tensor, so that
a step allocates nothing of a gradient's size, and never calls a collective: a front end does, and must not encode a
tensor again before the collective that reads its payload has ended.
"""

from __future__ import annotations

import dataclasses
import threading

import numpy as np

from . import kernels, payload
from .config import TwoBitConfig
from .levels import FixedLevels
from .residuals import ResidualRegistry


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """What is kept of a tensor between steps: its payload, the view of the codes in it, and how it is quantized."""

    shape: tuple[int, ...]
    payload: np.ndarray
    codes: np.ndarray
    quantizer: kernels.Quantizer


class Codec:
    """Encodes and decodes the gradients of one optimizer on this rank.

    Args:
        config: checked parameters.
        residuals: what the optimizer has not sent yet; updated by ``encode``.
        backend: name of the kernel backend, see ``kernels.load``.
    """

    def __init__(self, config: TwoBitConfig, residuals: ResidualRegistry, backend: str = "numba") -> None:
        self._config = config
        self._residuals = residuals
        self._levels = FixedLevels(config)
        self._kernels = kernels.load(backend)
        self._tensors: dict[str, _Tensor] = {}
        self._lock = threading.Lock()

    def compresses(self, elements: int) -> bool:
        """Whether a tensor of so many elements is compressed, or travels as it is."""
        return elements >= self._config.min_elements

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
        residual = self._residuals.residual(name, shape)
        tensor = self._tensor(name, shape, gradient.size)
        self._kernels.quantize_pack(gradient, residual, tensor.codes, tensor.quantizer)
        return tensor.payload

    def decode(self, name: str, gathered: np.ndarray, ranks: int, out: np.ndarray, scale: float) -> None:
        """Overwrite ``out`` with the scaled sum of what ``ranks`` ranks sent of a tensor.

        Args:
            name: the tensor's name, for messages.
            gathered: uint8, the payloads of all ranks in rank order.
            ranks: number of ranks that sent one.
            out: float32[elements], contiguous.
            scale: factor of the sum, for example ``1 / ranks`` for an average.

        Raises:
            PayloadError: a rank sent something else than a payload of this tensor.
        """
        codes, headers = payload.split(gathered, ranks, out.size, name)
        self._kernels.unpack_sum(codes, self._levels.of_senders(headers), kernels.whole_tensor(out.size), out, scale)

    def discard(self, name: str) -> None:
        """Free what is kept of a tensor, but for its residual; nothing where the name is unknown."""
        with self._lock:
            self._tensors.pop(name, None)

    def _tensor(self, name: str, shape: tuple[int, ...], elements: int) -> _Tensor:
        with self._lock:
            tensor = self._tensors.get(name)
            if tensor is None or tensor.shape != shape:
                buffer = np.empty(payload.payload_nbytes(elements), np.uint8)
                payload.write_header(buffer, self._levels.header(elements))
                tensor = _Tensor(shape, buffer, payload.codes_of(buffer, elements), self._levels.quantizer(elements))
                self._tensors[name] = tensor
            return tensor

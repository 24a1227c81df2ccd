"""Residuals on the device of their gradients, and copies between host and device that nobody waits for.

On CUDA devices, host memory is pinned and copies are asynchronous; PyTorch does not hand pinned memory out again while
a copy uses it. On others (the CPU, where the device's kernels run under Triton's interpreter) copies are made at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from ..memory import Memory

_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class DeviceMemory(Memory):
    """float32 tensors of one device; numbers are tensors, too, which ``float`` waits for.

    Attributes:
        device: where they lie.
    """

    device: torch.device

    def zeros(self, elements: int) -> torch.Tensor:
        return torch.zeros(elements, dtype=torch.float32, device=self.device)

    def take(self, values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values, device=self.device)

    def read(self, array: torch.Tensor) -> np.ndarray:
        return array.cpu().numpy()

    def duplicate(self, array: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        return array.clone() if into is None else into.copy_(array)

    def restore(self, array: torch.Tensor, duplicate: torch.Tensor) -> None:
        array.copy_(duplicate)

    def shaped(self, array: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return array.view(shape)

    def scale(self, array: torch.Tensor, factor: float) -> None:
        array.mul_(factor).clamp_(-_FLOAT32_MAX, _FLOAT32_MAX)

    def norm(self, array: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(array, dtype=torch.float64)

    def mean_magnitude(self, array: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(array, ord=1, dtype=torch.float64) / max(array.numel(), 1)

    def largest(self, array: torch.Tensor) -> torch.Tensor | float:
        return torch.linalg.vector_norm(array, ord=float("inf")) if array.numel() else 0.0


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of an array on a device, ordered with what runs on the current stream; ``values`` may change at once."""
    if device.type != "cuda":
        return torch.tensor(values, device=device)
    host = torch.from_numpy(np.empty(0, values.dtype)).new_empty(values.shape, pin_memory=True)
    host.numpy()[...] = values
    return host.to(device, non_blocking=True)


class Download:
    """A copy of a tensor to the host that was begun on the current stream.

    Args:
        source: contiguous or not, of any device.
        into: host memory of an earlier copy of as many elements of this dtype, which is over, to be used again.
    """

    def __init__(self, source: torch.Tensor, into: torch.Tensor | None = None) -> None:
        self.host = host_memory(source.shape, source.dtype, source.device) if into is None else into
        """The copy, complete when ``is_done`` says so."""
        self.host.copy_(source, non_blocking=True)
        self._event = _recorded(source.device)

    def is_done(self, wait: bool) -> bool:
        """Whether the copy is complete; with ``wait``, wait until it is."""
        if self._event is not None and wait:
            self._event.synchronize()
        return self._event is None or self._event.query()

    def numpy(self) -> np.ndarray:
        """The copy, waited for."""
        self.is_done(wait=True)
        return self.host.numpy()


class Streams:
    """The streams on which tensors were made that one kernel is going to read."""

    def __init__(self) -> None:
        self._seen: dict[torch.cuda.Stream, list[torch.Tensor]] = {}

    def made(self, tensor: torch.Tensor) -> None:
        """A tensor was made on the current stream."""
        if tensor.is_cuda:
            self._seen.setdefault(torch.cuda.current_stream(tensor.device), []).append(tensor)

    def join(self) -> None:
        """Let the current stream wait for all of them."""
        for stream, tensors in self._seen.items():
            current = torch.cuda.current_stream(stream.device)
            if stream != current:
                current.wait_stream(stream)
                for tensor in tensors:
                    tensor.record_stream(current)
        self._seen.clear()


def host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory with undefined contents to and from which a device copies."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def _recorded(device: torch.device) -> torch.cuda.Event | None:
    """An event behind all that was launched on a device's current stream; None where nothing is asynchronous."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)  # Who waits for it leaves the processor to others.
    event.record(torch.cuda.current_stream(device))
    return event

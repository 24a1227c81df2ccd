"""Where a tensor becomes words for ``hvd.allreduce(compression=TwoBit)``: on the host, or on its own device.

Words are sent from the host, wherever they were made, as they are few. For nothing is agreed on before a single tensor:
ranks need not have it, or be able to compress it, on devices of the same kind, and those that have joined contribute
zeros of the host.
"""

from __future__ import annotations

import functools
from typing import Any, Union

import numpy as np
import torch

from .. import kernels, payload
from ..digits import DigitLayout
from ..kernels import Quantizer
from ..levels import HIGHEST, LOWEST, AdaptiveLevels
from ..words import HostWords, WordBackend
from .exchange import as_flat_float32, flat_float32_on
from .memory import DeviceMemory, Download, upload
from .placement import Placement, is_interpreted


class HostTensors(HostWords):
    """Tensors that are compressed on the host, to which those of a device are copied.

    Attributes:
        device: the host, as PyTorch has it.
    """

    device = torch.device("cpu")

    def values(self, tensor: torch.Tensor, exact: bool) -> np.ndarray:
        """The elements of a tensor, flat, float32 or, if ``exact``, float64; valid until this thread asks again."""
        found = tensor.detach().reshape(-1).to("cpu", torch.float64) if exact else as_flat_float32(tensor)
        return found.numpy()

    def array(self, tensor: torch.Tensor) -> np.ndarray:
        """A tensor of the host's as this backend takes it."""
        return tensor.numpy()

    def wire(self, words: np.ndarray) -> torch.Tensor:
        """Words as Horovod takes them, on the host."""
        return torch.from_numpy(words)


class DeviceTensors(WordBackend):
    """Tensors of a device, which are compressed there.

    Args:
        device: where they lie.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = DeviceMemory(device)
        self._kernels = kernels.load("triton")

    def values(self, tensor: torch.Tensor, exact: bool) -> torch.Tensor:
        """The elements of a tensor, flat, float32 or, if ``exact``, float64."""
        return tensor.detach().reshape(-1).double() if exact else flat_float32_on(self.device, tensor)

    def array(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the device's as this backend takes it."""
        return tensor

    def wire(self, words: torch.Tensor) -> torch.Tensor:
        """Words as Horovod takes them, on the host."""
        copy = Download(words)
        copy.is_done(wait=True)
        return copy.host

    def new(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.float64, device=self.device)

    def take(self, values: np.ndarray) -> torch.Tensor:
        return upload(values, self.device)

    def read(self, array: torch.Tensor) -> np.ndarray:
        return array.cpu().numpy()

    def as_float32(self, values: torch.Tensor) -> torch.Tensor:
        return values.float().contiguous()

    def mean_magnitudes(self, policy: AdaptiveLevels, tensor: torch.Tensor) -> torch.Tensor:
        sizes = policy.block_sizes(len(tensor))
        padded = tensor.new_zeros((len(sizes), policy.block_elements))
        padded.view(-1)[:len(tensor)] = tensor
        padded.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).abs_()  # In place: the tensor may be large.
        means = padded.sum(dim=1, dtype=torch.float64) / upload(sizes, self.device)
        return means.clamp(float(LOWEST), float(HIGHEST)).float()

    def quantize(self, tensor: torch.Tensor, residual: torch.Tensor | None, quantizer: Quantizer, layout: DigitLayout,
                 words: torch.Tensor) -> int:
        runs = _runs(len(tensor), quantizer.block_elements if layout.blocks else 0, self.device, self._kernels.Runs)
        packed = torch.empty(4 * runs.words, dtype=torch.uint8, device=self.device)
        table = None
        if layout.blocks:
            table = torch.empty(payload.BLOCK_TABLE.itemsize * layout.blocks, dtype=torch.uint8, device=self.device)
        left = torch.zeros_like(tensor) if residual is None else residual
        selected = self._kernels.quantize_pack_runs(runs, [tensor], [left], packed, quantizer, table)
        self._kernels.pack_digits(packed, layout.digits, layout.content(words))
        if table is not None:
            totals = table.view(torch.float32).view(layout.blocks, 2)
            layout.write_table(words, totals[:, 0], totals.view(torch.int32)[:, 1])
        return int(selected[0])

    def unpack(self, words: torch.Tensor, layout: DigitLayout, factor: float, levels: np.ndarray, block_elements: int,
               out: torch.Tensor) -> None:
        self._kernels.unpack_digits(layout.content(words), layout.digits, factor, upload(levels, self.device),
                                    block_elements, out, factor)


TensorWords = Union[HostTensors, DeviceTensors]

_HOST = HostTensors()


def words_of(device: torch.device) -> TensorWords:
    """Where a tensor of a device is compressed; one object for each answer.

    A tensor on the CPU is compressed there also where Triton was asked for: that is meant for gradients on a GPU.
    """
    if device.type == "cpu" and not is_interpreted():
        return _HOST
    placed = Placement.of([device])
    return _HOST if placed.device is None else _on_device(placed.device)


_on_device = functools.lru_cache(maxsize=None)(DeviceTensors)


@functools.lru_cache(maxsize=256)
def _runs(elements: int, block_elements: int, device: torch.device, kind: Any) -> Any:
    """How a tensor lies in its words, worked out once for all of its exchanges."""
    return kind([elements], block_elements, device)

"""Calls of a kernel with the same arguments by the reference in NumPy and on a device, and how what they make differs.

Arguments lie in larger memory, *arranged*: at addresses that are aligned or not, rows side by side or apart, and with
margins. All of that memory is compared afterwards, so that what is written beside a result, or into an argument that is
only read, is found as well.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from hvd_twobit import kernels
from hvd_twobit.kernels import Quantizer

from .checking import differences

REFERENCE = kernels.load("numpy")

_MARGIN_BYTES = 256
_FILLING = 0x5D5D5D5D5D5D5D5D
_FIELDS = ("positive_threshold", "negative_threshold", "positive_level", "negative_level")


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """Where arguments lie.

    Attributes:
        elements: by which arrays of numbers begin behind an address that is a multiple of 256 bytes.
        nbytes: by which arrays of bytes do so.
        gap: bytes between two rows of bytes.
    """

    elements: int = 0
    nbytes: int = 0
    gap: int = 0

    def __str__(self) -> str:
        if self == ALIGNED:
            return "aligned"
        return f"shifted by {self.elements} elements or {self.nbytes} bytes, rows {self.gap} bytes apart"


ALIGNED = Arrangement()
ARRANGEMENTS = (ALIGNED, Arrangement(1, 4, 4), Arrangement(3, 1, 3))
"""Nothing is aligned to 16 bytes in the second, nor words of codes to 4 in the third."""


class Arranged:
    """An array, and the same on a device, both within filled memory.

    Args:
        values: what is in it.
        arrangement: where it lies.
        device: where the other one is.
    """

    def __init__(self, values: np.ndarray, arrangement: Arrangement, device: torch.device) -> None:
        item, is_bytes = values.dtype.itemsize, values.dtype == np.uint8
        strides = list(np.empty(values.shape, values.dtype).strides)
        gap = arrangement.gap if is_bytes and values.ndim == 2 else 0
        if gap:
            strides[0] = values.shape[1] + gap
        begin = _MARGIN_BYTES + (arrangement.nbytes if is_bytes else arrangement.elements * item)
        nbytes = begin + values.nbytes + gap * len(values) + _MARGIN_BYTES
        self._on_host = np.full(-(-nbytes // 8), _FILLING, np.int64).view(values.dtype)
        self.array: np.ndarray = np.ndarray(values.shape, values.dtype, self._on_host, begin, strides)
        self.array[...] = values
        memory = self._on_host.view(np.int32) if values.dtype == np.uint32 else self._on_host
        self._on_device = torch.from_numpy(memory).to(device, copy=True)
        self.tensor = self._on_device.as_strided(values.shape, [stride // item for stride in strides], begin // item)

    def compared(self, name: str) -> tuple[str, np.ndarray, np.ndarray]:
        """A name, all of the memory on the device and that on the host, for ``differences``."""
        return name, self._on_device.cpu().numpy().view(self.array.dtype), self._on_host


def compared(backend: Any, device: torch.device, arrangement: Arrangement, kernel: str, *arguments: Any) -> str:
    """Call a kernel by both, and tell how what they make differs; nothing where it does not.

    Args:
        backend: of the device.
        device: where it is called.
        arrangement: where arrays lie.
        kernel: name of the function.
        arguments: arrays, quantizers of arrays and whatever else it takes; left as they are.
    """
    arranged = {position: Arranged(argument, arrangement, device)
                for position, argument in enumerate(arguments) if isinstance(argument, np.ndarray)}

    def given(on_device: bool) -> list[Any]:
        values = []
        for position, argument in enumerate(arguments):
            if position in arranged:
                argument = arranged[position].tensor if on_device else arranged[position].array
            elif isinstance(argument, Quantizer) and on_device:
                argument = Quantizer(argument.block_elements, *(
                    torch.from_numpy(getattr(argument, field)).to(device) for field in _FIELDS))
            values.append(argument)
        return values

    returned = _arrays_of(getattr(backend, kernel)(*given(on_device=True)))
    wanted = _arrays_of(getattr(REFERENCE, kernel)(*given(on_device=False)))
    assert len(returned) == len(wanted)
    found = [(f"returned {number}", one.view(other.dtype), other)
             for number, (one, other) in enumerate(zip(returned, wanted))]
    found += [one.compared(f"argument {position}") for position, one in arranged.items()]
    text = differences(found)
    sizes = ", ".join(f"{one.array.dtype}{list(one.array.shape)}" for one in arranged.values())
    return f"{kernel} of {sizes}, {arrangement}: {text}" if text else ""


def _arrays_of(returned: Any) -> list[np.ndarray]:
    """What a kernel returned: nothing, a truth value, or several arrays."""
    values = returned if isinstance(returned, tuple) else () if returned is None else (returned,)
    return [value.cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value) for value in values]

"""Where an optimizer's gradients are compressed, and from where Horovod sends what comes of it.

Gradients on a CUDA device are compressed there, by Triton's kernels; all others on the host, to which they are copied
if need be. What is sent stays on the device where Horovod was built with NCCL; otherwise it is sent from pinned host
memory. Ranks need not do the same: what they send has the same bits.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable

import horovod.torch as hvd
import numpy as np
import torch

from .. import kernels
from ..codec import Codec
from ..config import KERNELS_VARIABLE, kernels_asked_for
from ..errors import ConfigError
from ..transports import Planned
from .coder import Coder, DeviceCoder, HostCoder, StagedCoder
from .memory import DeviceMemory

logger = logging.getLogger("hvd_twobit")

_unusable: dict[torch.device, str] = {}


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where gradients are compressed.

    Attributes:
        device: on which they lie and are compressed; None for the host.
        sends: whether Horovod's collectives are given memory of the device.
    """

    device: torch.device | None = None
    sends: bool = False

    @classmethod
    def of(cls, devices: Iterable[torch.device]) -> Placement:
        """Where gradients that lie on these devices are compressed.

        By HVD_TWOBIT_KERNELS: ``auto`` (or nothing), on the device if all of them are the same CUDA device that Triton
        can compile for, otherwise on the host; ``numba``, on the host; ``triton``, on the device, or an error. With
        ``triton`` and TRITON_INTERPRET=1 gradients on the CPU are compressed by Triton's interpreter, slowly.

        Raises:
            ConfigError: the variable has another value, or Triton was asked for and cannot be used.
        """
        asked = kernels_asked_for()
        found = set(devices)
        if asked == "numba" or len(found) != 1 or (asked == "auto" and next(iter(found)).type != "cuda"):
            if asked == "triton" and found:
                raise ConfigError(f"{KERNELS_VARIABLE}=triton asks for kernels on the gradients' device, but they lie "
                                  f"on {', '.join(sorted(map(str, found)))}: all have to be on one")
            return cls()
        device, = found
        reason = _why_unusable(device)
        if reason is None:
            return cls(device, horovod_takes(device))
        if asked == "triton":
            raise ConfigError(f"{KERNELS_VARIABLE}=triton: Triton's kernels cannot be used on {device}: {reason}")
        return cls()

    def coder(self, planned: Planned, codec: Codec, rank: int, scale: float) -> Coder:
        """What makes payloads of a bucket's gradients; arguments as for ``Coder``."""
        if self.device is None:
            return HostCoder(planned, codec, rank, scale)
        kind = DeviceCoder if self.sends else StagedCoder
        return kind(planned, codec, rank, scale, DeviceMemory(self.device), kernels.load("triton"))


def horovod_takes(device: torch.device) -> bool:
    """Whether Horovod's collectives take tensors of a device, as it was built."""
    return device.type == "cpu" or bool(hvd.nccl_built())


def _why_unusable(device: torch.device) -> str | None:
    """Why a device's gradients cannot be compressed there; None where they can. Told in the log, once per device."""
    if device not in _unusable:
        reason = trial(device)
        if reason:
            logger.warning("hvd_twobit: gradients on %s are copied to the host to be compressed, which takes longer: "
                           "%s", device, reason)
        _unusable[device] = reason
    return _unusable[device] or None


def trial(device: torch.device) -> str:
    """What goes wrong where a few elements are quantized and unpacked on a device; an empty text where that works."""
    try:
        backend = kernels.load("triton")
    except ImportError as error:
        return f"Triton is missing ({error}); pip install \"hvd_twobit[gpu]\""
    gradient = np.array([1.0, -1.0, 0.25, 1e-45], np.float32)
    try:
        there = torch.tensor(gradient, device=device)
        residual, packed, out = torch.zeros_like(there), torch.zeros(4, dtype=torch.uint8, device=device), there.clone()
        level = torch.full((1,), 0.5, device=device)
        backend.quantize_pack(there, residual, packed, kernels.Quantizer(16, level, -level, level, -level))
        backend.unpack_sum(packed[None], torch.stack([level, -level], dim=-1)[None], 16, out, 1.0)
        left = out.cpu().numpy() + residual.cpu().numpy()
    except Exception as error:  # Of compilers, drivers and devices: whatever it is, the host can do it.
        return f"Triton's kernels fail there ({type(error).__name__}: {error})"
    if left.tobytes() != gradient.tobytes():
        return f"Triton's kernels are wrong there (sums and residuals of {gradient} are {left})"
    return ""

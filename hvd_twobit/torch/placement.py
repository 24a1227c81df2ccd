"""Where an optimizer's gradients are compressed, and from where Horovod sends what comes of it.

Gradients on a CUDA device are compressed there, by Triton's kernels; all others on the host, to which they are copied
if need be. What is sent stays on the device where Horovod was built with NCCL; otherwise it is sent from pinned host
memory. What ranks send has the same bits wherever they compress, but no collective takes memory of a GPU on one rank
and of the host on another: so where it is sent from is part of what ranks agree on.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import types
from collections.abc import Iterable

import horovod.torch as hvd
import numpy as np
import torch

from .. import kernels, payload
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

    @property
    def from_gpu(self) -> bool:
        """Whether what is sent lies in a GPU's memory."""
        return self.sends and self.device is not None and self.device.type == "cuda"

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


def is_interpreted() -> bool:
    """Whether Triton was told to interpret its kernels, which takes tensors of the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


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
        wrong = _wrong(backend, device)
    except ImportError as error:
        return f"Triton is missing ({error}); pip install \"hvd_twobit[gpu]\""
    except Exception as error:  # Of compilers, drivers and devices: whatever it is, the host can do it.
        return f"Triton's kernels fail there ({type(error).__name__}: {error})"
    return wrong and f"Triton's kernels are wrong there ({wrong})"


def _wrong(backend: types.ModuleType, device: torch.device) -> str:
    """What is wrong with codes, tables and sums of two tensors, one with a subnormal number; nothing if all is well."""
    gradients = [np.array([1.0, -1.0, 0.25, 1e-45], np.float32), np.arange(-10, 10, dtype=np.float32) / 8]
    runs = backend.Runs([gradient.size for gradient in gradients], kernels.ELEMENTS_PER_WORD, device)
    there = [torch.tensor(gradient, device=device) for gradient in gradients]
    residuals, outs = [torch.zeros_like(one) for one in there], [torch.zeros_like(one) for one in there]
    packed = torch.zeros(4 * runs.words, dtype=torch.uint8, device=device)
    table = torch.zeros(payload.BLOCK_TABLE.itemsize * runs.blocks, dtype=torch.uint8, device=device)
    level = torch.full((runs.blocks,), 0.5, device=device)
    quantizer = kernels.Quantizer(runs.block_elements, level, -level, level, -level)
    backend.quantize_pack_runs(runs, there, residuals, packed, quantizer, table)
    backend.unpack_sum_runs(runs, packed[None], torch.stack([level, -level], dim=-1)[None], outs, 1.0)
    for gradient, residual, out in zip(gradients, residuals, outs):
        total = residual.cpu().numpy() + out.cpu().numpy()
        if total.tobytes() != gradient.tobytes():
            return f"sums and residuals of {gradient} are {total}"
    blocks = [np.abs(block) for block in (gradients[0], gradients[1][:16], gradients[1][16:])]
    expected = np.array([(block[block >= 0.5].sum(), (block >= 0.5).sum()) for block in blocks], payload.BLOCK_TABLE)
    found = table.cpu().numpy().view(payload.BLOCK_TABLE)
    return "" if (found == expected).all() else f"sums and numbers of what is selected are {found}, not {expected}"

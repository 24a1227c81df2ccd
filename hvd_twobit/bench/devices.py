"""Which GPU kernels are measured on, and what a reader must know of it to compare a measurement with another."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from importlib.metadata import version
from typing import TYPE_CHECKING

import click

from . import machine_facts

if TYPE_CHECKING:
    import torch

INSTALL = 'pip install "hvd_twobit[gpu]"'

_NVIDIA_SMI_LIMIT_S = 30
_NVIDIA_SMI = {
    "driver": "driver_version", "clock_mhz": "clocks.sm", "highest_clock_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem", "highest_memory_clock_mhz": "clocks.max.mem", "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}
"""What a driver tells, and what its program calls that."""


def cuda_device(name: str) -> torch.device:
    """The GPU called ``cuda`` or ``cuda:NUMBER``, on which Triton's kernels can run.

    Raises:
        click.ClickException: it is not there, or something is not installed; one line that tells what to do.
    """
    missing = [module for module in ("torch", "triton") if importlib.util.find_spec(module) is None]
    if missing:
        raise click.ClickException(f"not installed: {', '.join(missing)}; {INSTALL}")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise click.ClickException("TRITON_INTERPRET=1 has kernels interpreted on the CPU, which tells nothing of a "
                                   "GPU: unset it")
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        raise click.ClickException(f"PyTorch {torch.__version__} was built without CUDA: install a build with it, see "
                                   "https://pytorch.org/get-started/locally")
    count = torch.cuda.device_count()
    if count == 0:
        raise click.ClickException(f"PyTorch {torch.__version__} sees no CUDA device: see what nvidia-smi lists, and "
                                   f"CUDA_VISIBLE_DEVICES ({os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})")
    device = torch.device(name)
    if device.index is not None and device.index >= count:
        raise click.ClickException(f"there is no {device}: PyTorch sees {count}, cuda:0 to cuda:{count - 1}")
    try:
        current = torch.cuda.current_device()
    except RuntimeError as error:  # Of a driver that is too old, or devices that others keep for themselves.
        raise click.ClickException(f"CUDA cannot be used: {error}") from error
    return torch.device("cuda", current) if device.index is None else device


def device_facts(device: torch.device) -> dict[str, str | int | float]:
    """``machine_facts``, and those of a device: versions and, of a GPU, its name, memory, caches, driver and clocks."""
    import torch

    facts = machine_facts() | {"device": str(device), "torch": torch.__version__, "triton": version("triton")}
    if device.type != "cuda":
        return facts | {"gpu": "none: Triton's interpreter, whose times tell nothing"}
    properties = torch.cuda.get_device_properties(device)
    return facts | {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_mib": properties.total_memory >> 20,
        "l2_cache_mib": cache_nbytes(device) >> 20,
        "cuda": str(torch.version.cuda or torch.version.hip),
        **_told_by_the_driver(str(properties.uuid)),
    }


def cache_nbytes(device: torch.device) -> int:
    """Bytes of a device's last cache; 0 where it is not known."""
    import torch

    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0


def check_memory(device: torch.device, nbytes: int, purpose: str) -> None:
    """Raise click.ClickException unless so many bytes of a GPU's memory are free.

    Args:
        device: any; of others than GPUs nothing is known.
        nbytes: what is needed.
        purpose: for what, with what to change.
    """
    free = free_nbytes(device)
    if free is not None and free < nbytes:
        raise click.ClickException(f"{purpose} take {nbytes / 2**30:.1f} GiB of memory, but of {device} only "
                                   f"{free / 2**30:.1f} GiB are free")


def free_nbytes(device: torch.device) -> int | None:
    """Bytes of a GPU's memory that are free; None of other devices."""
    import torch

    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()  # What PyTorch keeps for later is free to us.
    return int(torch.cuda.mem_get_info(device)[0])


def _told_by_the_driver(uuid: str) -> dict[str, str]:
    """Version of the driver and the clocks at this moment; nothing where NVIDIA's program is not there or fails."""
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(_NVIDIA_SMI.values())}",
               "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_LIMIT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(_NVIDIA_SMI, map(str.strip, told.strip().split(","))))

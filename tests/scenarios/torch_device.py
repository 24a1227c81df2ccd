"""The optimizer and the gradient scaler as on a device: gradients of the CPU that are compressed by a device's kernels.

What a device does in its own time happens at once here; all else is what runs on CUDA. ``compressed_on_a_device`` says
which kernels, and whether Horovod is given memory of the device or of the host.
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.gpu import training
from hvd_twobit import kernels
from hvd_twobit.torch import allreduce, coder, exchange, placement
from tests import tensor_reference
from tests.scenarios import torch_amp, torch_optimizer

CODERS = {"sent from the device": coder.DeviceCoder, "sent from the host": coder.StagedCoder}


def run(configurations: Sequence[str], amp: Sequence[str], triton: Sequence[str]) -> dict[str, Any]:
    """By kernels and way of sending, what ``torch_optimizer`` and ``torch_amp`` return; and which coders were used.

    Where there is Triton, also what differs in the training of ``benchmarks/gpu_check.py``.

    Args:
        configurations: of ``torch_optimizer``, with the kernels of the reference.
        amp: of ``torch_amp``, likewise.
        triton: of ``torch_optimizer``, with Triton's kernels, interpreted; without them where there is no Triton.
    """
    results: dict[str, Any] = {}
    for sending in CODERS:
        with compressed_on_a_device(sending, tensor_reference) as used:
            results[sending] = {"optimizer": torch_optimizer.run(configurations), "amp": torch_amp.run(amp)}
        results[sending]["coders"] = sorted(used)
        if triton:
            with compressed_on_a_device(sending, kernels.load("triton")):
                results[sending]["triton"] = torch_optimizer.run(triton)
    if triton:
        results["gpu_check"] = training.compared(torch.device("cpu"), [(20,)], steps=2)
    return results


@contextlib.contextmanager
def compressed_on_a_device(sending: str, backend: types.ModuleType) -> Iterator[set[str]]:
    """Within it, gradients on the CPU pass for a device's; yields the names of the coders that were made."""
    used: set[str] = set()
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def noted(kind: type) -> Any:
        def make(*arguments: Any) -> Any:
            used.add(kind.__name__)
            return kind(*arguments)
        return make

    def takes(device: torch.device) -> bool:
        return sending == "sent from the device"

    load = kernels.load
    replace(kernels, "load", lambda name: backend if name == "triton" else load(name))
    for kind in (coder.HostCoder, coder.DeviceCoder, coder.StagedCoder):
        replace(placement, kind.__name__, noted(kind))
    for module in (placement, exchange, allreduce):
        replace(module, "horovod_takes", takes)
    os.environ[placement.KERNELS_VARIABLE] = "triton"
    placement._unusable.clear()
    try:
        yield used
    finally:
        del os.environ[placement.KERNELS_VARIABLE]
        for owner, name, value in replaced:
            setattr(owner, name, value)

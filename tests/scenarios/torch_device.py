"""The optimizer and the gradient scaler as on a device: gradients of the CPU that are compressed by a device's kernels.

What a device does in its own time happens at once here, but for copies to the host, of which every second one is late;
all else is what runs on CUDA. ``compressed_on_a_device`` says which kernels, and whether Horovod is given memory of the
device or of the host.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from benchmarks.gpu import training
from hvd_twobit import kernels
from hvd_twobit.config import TRANSPORTS, TwoBitConfig
from hvd_twobit.torch import allreduce, coder, exchange, memory, placement, words
from tests import tensor_reference
from tests.scenarios import torch_allreduce, torch_amp, torch_optimizer

CASES_IN_TRITON = ["the bare class", "a group"]
"""Of ``allreduce``: few, as Triton's interpreter is slow."""

CODERS = {"sent from the device": coder.DeviceCoder, "sent from the host": coder.StagedCoder}


def run(configurations: Sequence[str], amp: Sequence[str], triton: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """By kernels and way of sending, what ``torch_optimizer``, ``torch_amp`` and ``torch_allreduce`` return.

    And which coders were used.

    Where there is Triton, also what differs in the training of ``benchmarks/gpu_check.py``.

    Args:
        configurations: of ``torch_optimizer``, with the kernels of the reference.
        amp: of ``torch_amp``, likewise.
        triton: of ``torch_optimizer``, by way of sending, with Triton's kernels, interpreted; nothing where there is no
            Triton.
    """
    results: dict[str, Any] = {}
    for sending in CODERS:
        with compressed_on_a_device(sending, tensor_reference) as used:
            results[sending] = {"orders": {transport: in_orders_of_their_own(transport) for transport in TRANSPORTS},
                                "optimizer": torch_optimizer.run(configurations), "amp": torch_amp.run(amp),
                                "allreduce": torch_allreduce.run()}
        results[sending]["coders"] = sorted(used)
        if triton:
            with compressed_on_a_device(sending, kernels.load("triton")):
                results[sending]["triton"] = {"optimizer": torch_optimizer.run(triton[sending]),
                                              "cases": torch_allreduce.cases(CASES_IN_TRITON),
                                              "named": torch_allreduce.named(["adaptive"], steps=4)}
    if triton:
        results["gpu_check"] = training.compared(torch.device("cpu"), [(20,)], steps=2)
    return results


class LateDownload(memory.Download):
    """A copy that is not over until somebody waits for it: every second one, on odd ranks the others."""

    _numbers = itertools.count()

    def __init__(self, source: torch.Tensor, into: torch.Tensor | None = None) -> None:
        super().__init__(source, into)
        self._copied: torch.Tensor | None = None
        if (next(self._numbers) + hvd.rank()) % 2:
            self._copied = self.host.clone()
            self.host.view(-1).view(torch.uint8).fill_(0xEE)

    def is_done(self, wait: bool) -> bool:
        if wait and self._copied is not None:
            self.host.copy_(self._copied)
            self._copied = None
        return self._copied is None


def in_orders_of_their_own(transport: str) -> list[dict[str, np.ndarray]]:
    """Four steps, in which each rank begins and awaits gradients in an order of its own; per step, what came of them.

    All of them begin where Horovod's ``synchronize`` starts what no hook has. Before the third step one is broken off
    whose first bucket is not full, and after the last another, in which Horovod has failed.
    """
    one = exchange.Exchange(TwoBitConfig.from_arguments(transport=transport, bucket_cap_mb=0.006), hvd.Average, 1.0,
                            hvd.global_process_set)
    names = list(gradients(0, 0))
    one.declare([(name, torch.from_numpy(value), name) for name, value in gradients(0, 0).items()])
    steps = []
    for step in range(4):
        mine = {name: torch.from_numpy(value) for name, value in gradients(hvd.rank(), step).items()}
        if step == 2:
            for name in names[1:]:
                one.start(name, mine[name].clone())
            one.abandon()
        order = names[::-1] if hvd.rank() % 2 else names
        with one.agreed():
            started = {name: one.start(name, mine[name]) for name in order}
            steps.append({name: pending.finish(handle()).numpy().copy() for name, (handle, pending) in started.items()})
    one._departures.append(exchange.Departure([torch.zeros(1)], _fail))
    one.abandon()
    return steps


def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    """Those of ``in_orders_of_their_own``: of three tensors that are compressed and three that are not."""
    random = np.random.default_rng((rank, step))
    return {name: random.standard_normal(1500 if "wide" in name else 5, np.float32)
            for name in ("wide 0", "wide 1", "wide 2", "small 0", "small 1", "small 2")}


def _fail(tensors: Sequence[torch.Tensor]) -> list[exchange.Handle]:
    raise HorovodInternalError("Horovod has been shut down")


def _refused(*arguments: Any) -> None:
    raise AssertionError("a tensor of the device was compressed on the host")


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
    for user in (coder, exchange):
        replace(user, "Download", LateDownload)
    replace(words, "Download", LateDownload)
    for method in ("quantize", "new"):
        replace(words.HostTensors, method, _refused)
    os.environ[placement.KERNELS_VARIABLE] = "triton"
    placement._unusable.clear()
    words._on_device.cache_clear()
    try:
        yield used
    finally:
        del os.environ[placement.KERNELS_VARIABLE]
        words._on_device.cache_clear()
        for owner, name, value in replaced:
            setattr(owner, name, value)

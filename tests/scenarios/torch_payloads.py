"""What PyTorch's front end hands to Horovod's allgather and alltoall for known gradients; see ``payloads``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvd_twobit.torch import TwoBit
from tests.scenarios.payloads import ARGUMENTS, SHAPES, STEPS, TRANSPORTS, tensor_of
from tests.simulation import gradient


def run() -> dict[str, Any]:
    """By transport, what this rank sends by name of the collective, and the reduced gradients of each step."""
    return {transport: _sent(transport) for transport in TRANSPORTS}


def _sent(transport: str) -> dict[str, Any]:
    with _recording() as sent:
        parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters.values(), lr=0.25),
                                             named_parameters=parameters.items(),
                                             compression=TwoBit(transport=transport, **ARGUMENTS))
        reduced = []
        for step in range(STEPS):
            sum((parameter * torch.from_numpy(gradient(0, hvd.rank(), step, name, SHAPES[name]))).sum()
                for name, parameter in parameters.items()).backward()
            optimizer.step()
            reduced.append({name: parameter.grad.numpy().copy() for name, parameter in parameters.items()})
            optimizer.zero_grad()
    return {"sent": sent, "reduced": reduced}


@contextlib.contextmanager
def _recording() -> Iterator[dict[str, list[np.ndarray]]]:
    sent: dict[str, list[np.ndarray]] = {}
    originals = {function: getattr(hvd, function) for function in ("allgather_async", "alltoall_async")}

    def recording(original: Any) -> Any:
        def record(tensor: torch.Tensor, *args: Any, name: str = "", **kwargs: Any) -> int:
            if tensor_of(name):
                sent.setdefault(tensor_of(name), []).append(tensor.numpy().copy())
            return original(tensor, *args, name=name, **kwargs)

        return record

    try:
        for function, original in originals.items():
            setattr(hvd, function, recording(original))
        yield sent
    finally:
        for function, original in originals.items():
            setattr(hvd, function, original)

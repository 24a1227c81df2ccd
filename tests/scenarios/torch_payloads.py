"""What PyTorch's front end hands to Horovod's allgather for the gradients of ``tensorflow_variables.payloads``."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvd_twobit.torch import TwoBit
from tests.simulation import gradient


def run() -> dict[str, Any]:
    """The payloads that this rank sends over three steps, and the reduced gradients."""
    sent: list[np.ndarray] = []
    original = hvd.allgather_async

    def recording(tensor: torch.Tensor, *args: Any, name: str = "", **kwargs: Any) -> int:
        if "agreement" not in name:
            sent.append(tensor.numpy().copy())
        return original(tensor, *args, name=name, **kwargs)

    hvd.allgather_async = recording
    parameter = torch.nn.Parameter(torch.zeros(37, 61))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.25), named_parameters=[("wide", parameter)],
                                         compression=TwoBit())
    reduced = []
    for step in range(3):
        (parameter * torch.from_numpy(gradient(0, hvd.rank(), step, "wide", (37, 61)))).sum().backward()
        optimizer.step()
        reduced.append(parameter.grad.numpy().copy())
        optimizer.zero_grad()
    return {"sent": sent, "reduced": reduced}

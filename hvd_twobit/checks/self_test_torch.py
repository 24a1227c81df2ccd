"""The self-test's training with PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import horovod.torch as hvd
import numpy as np
import torch

from ..torch import TwoBit

__all__ = ["hvd", "train"]


def train(transport: str, gradients: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
    """Weights after each step, from zero, with this rank's gradients of each step."""
    parameters = [torch.nn.Parameter(torch.zeros(of_tensor.shape)) for of_tensor in gradients[0]]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=1.0), compression=TwoBit(transport=transport),
        named_parameters=[(f"{transport}.{number}", parameter) for number, parameter in enumerate(parameters)])
    trained = []
    for of_step in gradients:
        optimizer.zero_grad()
        loss = sum((parameter * torch.from_numpy(constant)).sum() for parameter, constant in zip(parameters, of_step))
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        optimizer.step()
        trained.append([parameter.detach().numpy().copy() for parameter in parameters])
    return trained

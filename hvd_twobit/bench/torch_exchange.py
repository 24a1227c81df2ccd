"""An exchange of constant random gradients as Horovod's PyTorch optimizer makes it in a training step.

What is timed is the exchange alone, from the first gradient to the last reduced one: backward() reaches the parameters
from the last to the first and fires the optimizer's own hooks, which compress and send; synchronize() waits and
decompresses. But the backward pass computes nothing: gradients are there before. Real ones would take time that says
nothing of the network, and setting ``p.grad`` and calling synchronize() alone would start the exchanges in the order of
a set, another on every rank. ``tensorflow_exchange`` has the same names.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import torch

from .methods import METHODS
from .sent_bytes import SentBytes


class Gradients:
    """This rank's gradients, and the memory in which optimizers find a copy and leave what became of it.

    Args:
        shapes: of the model's parameters.
        seed: of the standard normal values.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], seed: int) -> None:
        self._sizes = [torch.Size(shape) for shape in shapes]
        elements = sum(size.numel() for size in self._sizes)
        self._constant = torch.randn(elements, generator=torch.Generator().manual_seed(seed))
        self._memory = torch.empty(elements)

    def parameters(self) -> list[torch.nn.Parameter]:
        """New parameters of the model, which take no memory."""
        return [torch.nn.Parameter(torch.zeros(()).expand(size)) for size in self._sizes]

    def give_to(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Set the parameters' gradients anew."""
        self._memory.copy_(self._constant)
        pieces = self._memory.split([size.numel() for size in self._sizes])
        for parameter, piece, size in zip(parameters, pieces, self._sizes):
            parameter.grad = piece.view(size)


class Exchange:
    """Exchanges with one method, by an optimizer of its own.

    Args:
        method: name of the method.
        gradients: what is exchanged.
    """

    def __init__(self, method: str, gradients: Gradients) -> None:
        self._gradients = gradients
        self._parameters = gradients.parameters()
        self._optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self._parameters, lr=1.0), compression=METHODS[method].compression("torch"),
            named_parameters=[(f"{method}.{number}", parameter) for number, parameter in enumerate(self._parameters)])

    def seconds(self) -> float:
        """Exchange once, with all ranks beginning together: seconds on this rank."""
        self._gradients.give_to(self._parameters)
        loss = torch.zeros((), requires_grad=True)
        for parameter in self._parameters:
            loss = _Reach.apply(loss, parameter)
        hvd.barrier()
        start = time.perf_counter()
        loss.backward()
        self._optimizer.synchronize()
        return time.perf_counter() - start

    def sent_nbytes(self) -> int:
        """Exchange once: bytes that this rank handed to Horovod's collectives."""
        with SentBytes("torch") as sent:
            self.seconds()
        return sent.total

    def digest(self) -> str:
        """Exchange once: a digest of the reduced gradients, of all bits."""
        self.seconds()
        digest = hashlib.blake2b(digest_size=16)
        for parameter in self._parameters:
            assert parameter.grad is not None
            digest.update(parameter.grad.numpy().data)
        return digest.hexdigest()


class _Reach(torch.autograd.Function):
    """A step of the backward pass that reaches a parameter, whose hooks then run, and leaves its gradient alone."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        return upstream[0], None

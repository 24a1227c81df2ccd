"""The program of one rank: exchanges constant random gradients, and tells time and bytes.

    python -m benchmarks.network.rank CONTROL MODEL METHOD...       # started by ``job``

Rank 0 reads orders from the Unix socket CONTROL, a line of JSON each, until there are none. ``{"methods": [...],
"check": false}`` is one exchange with each of the methods, in that order, with the answer ``{method: {"seconds": [...],
"sent": [...], "received": [...]}}``: values of all ranks. With ``check``, ranks compare what they received, bit by bit,
and fail where it differs. ``{"settle": BYTES}`` is an uncompressed allreduce: TCP learns a link's bandwidth.

What is timed is the exchange alone, from the first gradient to the last reduced one, as Horovod's optimizer makes it in
a training step: backward() reaches the parameters from the last to the first and fires the optimizer's own hooks, which
compress and send; synchronize() waits and decompresses. But the backward pass computes nothing: gradients are there
before. Real ones would take time that says nothing of the network, on cores that ranks have to share here, and setting
``p.grad`` and calling synchronize() alone would start the exchanges in the order of a set, another on every rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from .methods import METHODS
from .models import shapes_of

_COUNTERS = [pathlib.Path("/sys/class/net/eth0/statistics", name) for name in ("tx_bytes", "rx_bytes")]


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
            torch.optim.SGD(self._parameters, lr=1.0), compression=METHODS[method].compression(),
            named_parameters=[(f"{method}.{number}", parameter) for number, parameter in enumerate(self._parameters)])

    def measure(self) -> tuple[float, int, int]:
        """Exchange once: seconds on this rank; bytes that it sent and received until all ranks had finished."""
        self._gradients.give_to(self._parameters)
        loss = torch.zeros((), requires_grad=True)
        for parameter in self._parameters:
            loss = _Reach.apply(loss, parameter)
        hvd.barrier()
        sent, received = _counted()
        start = time.perf_counter()
        loss.backward()
        self._optimizer.synchronize()
        seconds = time.perf_counter() - start
        hvd.barrier()
        sent_after, received_after = _counted()
        return seconds, sent_after - sent, received_after - received

    def digest(self) -> str:
        """Of the reduced gradients, all bits."""
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


def _counted() -> tuple[int, int]:
    """Bytes that have been sent and received on this rank's link."""
    sent, received = (int(counter.read_text()) for counter in _COUNTERS)
    return sent, received


def carry_out(order: dict[str, Any], exchanges: dict[str, Exchange]) -> dict[str, Any]:
    """Do what one order says, on all ranks; the answer.

    Raises:
        RuntimeError: ranks received different gradients.
    """
    if "settle" in order:
        hvd.allreduce(torch.zeros(order["settle"] // 4), name="settle")
        return {}
    answer = {}
    for method in order["methods"]:
        measured = exchanges[method].measure()
        if order["check"]:
            _compare(method, hvd.allgather_object(exchanges[method].digest(), name="digest"))
        seconds, sent, received = zip(*hvd.allgather_object(measured, name="measured"))
        answer[method] = {"seconds": seconds, "sent": sent, "received": received}
    return answer


def _compare(method: str, digests: Sequence[str]) -> None:
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise RuntimeError(f"{method}: ranks received different gradients; of rank {rank} the digest is {digest}, "
                               f"of rank 0 {digests[0]}")


@contextlib.contextmanager
def _control(path: str) -> Iterator[tuple[Any, Any]]:
    """What orders are read from and answers written to, on rank 0; nothing on the others."""
    if hvd.rank():
        yield None, None
        return
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        with connection.makefile("r") as orders, connection.makefile("w") as answers:
            yield orders, answers


def main() -> None:
    """Carry out orders until there are no more."""
    control, model, *methods = sys.argv[1:]
    hvd.init()
    torch.set_num_threads(1)
    gradients = Gradients(shapes_of(model), seed=hvd.rank())
    exchanges = {method: Exchange(method, gradients) for method in methods}
    with _control(control) as (orders, answers):
        while line := hvd.broadcast_object(orders.readline() if orders else None, name="order"):
            answer = carry_out(json.loads(line), exchanges)
            if answers:
                answers.write(json.dumps(answer) + "\n")
                answers.flush()
    hvd.barrier()


if __name__ == "__main__":
    main()

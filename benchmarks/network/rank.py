"""The program of one rank: exchanges constant random gradients, and tells time and bytes.

    python -m benchmarks.network.rank CONTROL MODEL METHOD...       # started by ``job``

Rank 0 reads orders from the Unix socket CONTROL, a line of JSON each, until there are none. ``{"methods": [...],
"check": false}`` is one exchange with each of the methods, in that order, with the answer ``{method: {"seconds": [...],
"sent": [...], "received": [...]}}``: values of all ranks. With ``check``, ranks compare what they received, bit by bit,
and fail where it differs. ``{"settle": BYTES}`` is an uncompressed allreduce: TCP learns a link's bandwidth.

What is timed, and how gradients are exchanged, is told in ``hvd_twobit.bench.torch_exchange``.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import socket
import sys
from collections.abc import Iterator
from typing import Any

import horovod.torch as hvd
import torch

from hvd_twobit.bench.rounds import compare
from hvd_twobit.bench.shapes import shapes_of
from hvd_twobit.bench.torch_exchange import Exchange, Gradients

_COUNTERS = [pathlib.Path("/sys/class/net/eth0/statistics", name) for name in ("tx_bytes", "rx_bytes")]


def measure(exchange: Exchange) -> tuple[float, int, int]:
    """Exchange once: seconds on this rank; bytes that it sent and received until all ranks had finished."""
    hvd.barrier()
    sent, received = _counted()
    seconds = exchange.seconds()
    hvd.barrier()
    sent_after, received_after = _counted()
    return seconds, sent_after - sent, received_after - received


def _counted() -> tuple[int, int]:
    """Bytes that have been sent and received on this rank's link."""
    sent, received = (int(counter.read_text()) for counter in _COUNTERS)
    return sent, received


def carry_out(order: dict[str, Any], exchanges: dict[str, Exchange]) -> dict[str, Any]:
    """Do what one order says, on all ranks; the answer.

    Raises:
        DifferentGradients: ranks received different gradients.
    """
    if "settle" in order:
        hvd.allreduce(torch.zeros(order["settle"] // 4), name="settle")
        return {}
    answer = {}
    for method in order["methods"]:
        measured = measure(exchanges[method])
        if order["check"]:
            compare(method, hvd.allgather_object(exchanges[method].digest(), name="digest"))
        seconds, sent, received = zip(*hvd.allgather_object(measured, name="measured"))
        answer[method] = {"seconds": seconds, "sent": sent, "received": received}
    return answer


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

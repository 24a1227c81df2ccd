"""A PyTorch job of which one rank comes to grief within a step, after it has encoded a gradient."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_twobit.codec import Codec
from hvd_twobit.torch import TwoBit


def train(fault: str, folder: str = "") -> None:
    """Train until rank 1 comes to grief in its third step.

    Args:
        fault: ``killed`` or ``terminated`` by a signal; ``raises`` in its gradient hook; ``waits`` for ever, after each
            rank has left a file named after its process in the folder.
        folder: see ``waits``.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 160), torch.nn.Linear(160, 12))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05),
                                         named_parameters=model.named_parameters(), compression=TwoBit)
    for step in range(4):
        if step == 2:
            if fault == "waits":
                pathlib.Path(folder, str(os.getpid())).touch()
            if hvd.rank() == 1:
                _after_encode(fault)
        optimizer.zero_grad()
        model(torch.randn(16, 24)).square().mean().backward()
        optimizer.step()


def break_off(folder: str) -> None:
    """Rank 0 breaks off steps: one in which a group was half computed, and one whose world ended; then both leave.

    Args:
        folder: where rank 0 tells that its second step is under way.
    """
    under_way = pathlib.Path(folder, "under_way")
    parameters = {name: torch.nn.Parameter(torch.zeros(100)) for name in "ab"}
    a, b = parameters.values()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=0.25), named_parameters=list(parameters.items()),
                                         compression=TwoBit(0.5, min_elements=0), groups=1)
    if hvd.rank() == 1:
        while not under_way.exists():
            time.sleep(0.01)
        hvd.shutdown()
        os._exit(0)
    a.sum().backward()
    optimizer.load_state_dict(optimizer.state_dict())
    assert set(optimizer._group_counts.values()) == {0} and not optimizer._twobit.is_under_way
    a.sum().backward()
    assert not optimizer._twobit.is_under_way, "the group was started without the gradient of b"
    b.sum().backward()
    assert optimizer._twobit.is_under_way
    under_way.touch()
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer._twobit.is_under_way and not optimizer._handles
    print("broken off", flush=True)
    os._exit(0)  # Nobody is left for a barrier.


def fail(folder: str, grouped: bool) -> None:
    """Rank 0 takes up training after a step of which an uncompressed gradient failed; then both leave.

    Args:
        folder: where rank 0 tells that the step is under way.
        grouped: whether two such gradients share an allreduce.
    """
    under_way = pathlib.Path(folder, "under_way")
    parameters = {name: torch.nn.Parameter(torch.zeros(size)) for name, size in [("a", 100), ("b", 9), ("c", 9)]}
    a, b, c = parameters.values()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b, c], lr=0.25), named_parameters=list(parameters.items()),
                                         compression=TwoBit(0.5, min_elements=50), groups=[[b, c]] if grouped else None)
    a.sum().backward()
    if hvd.rank() == 1:
        while not under_way.exists():
            time.sleep(0.01)
        hvd.shutdown()
        os._exit(0)
    (b.sum() + c.sum()).backward()
    while not hvd.poll(optimizer._twobit._agreement):
        time.sleep(0.01)
    under_way.touch()
    begun = optimizer._handles
    for wait in optimizer.synchronize, lambda: begun[b][0]():  # Who asks again is told again.
        try:
            wait()
        except HorovodInternalError as error:
            print("told:", error, flush=True)
    assert optimizer._twobit.is_under_way
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer._twobit.is_under_way and not optimizer._handles
    print("taken up", flush=True)
    os._exit(0)  # Nobody is left for a barrier.


def _after_encode(fault: str) -> None:
    original = Codec.encode

    def encode(codec: Codec, *args: Any) -> Any:
        original(codec, *args)
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "terminated":
            os.kill(os.getpid(), signal.SIGTERM)
        elif fault == "raises":
            raise RuntimeError("the hook of rank 1 has failed")
        while True:
            signal.pause()

    Codec.encode = encode

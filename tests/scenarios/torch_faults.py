"""A PyTorch job of which one rank comes to grief within a step, after it has encoded a gradient."""

from __future__ import annotations

import os
import pathlib
import signal
from typing import Any

import horovod.torch as hvd
import torch

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

"""Exchanges of two levels on machines that differ, and without process sets: what ranks do, and what they are told."""

from __future__ import annotations

import itertools
from typing import Any

import horovod.torch as hvd
import torch

import hvd_twobit
from hvd_twobit.torch import TwoBit, residuals_of
from tests.scenarios import told_by

_numbers = itertools.count()


def _train(hierarchical: bool | str) -> dict[str, Any]:
    """Two steps with a fixed threshold; the weight afterwards, and the names of residuals."""
    weight = torch.nn.Parameter(torch.zeros(4096))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0),
                                         named_parameters=[(f"weight{next(_numbers)}", weight)],
                                         compression=TwoBit(0.5, hierarchical=hierarchical))
    for _ in range(2):
        (weight * (0.25 + hvd.rank())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weight": weight.detach().numpy(), "residuals": sorted(residuals_of(optimizer))}


def on_unequal_machines() -> dict[str, Any]:
    """Two ranks on one machine, one on another."""
    def refused() -> None:
        _train(True)

    return {"told": told_by([refused])["refused"], "auto": _train("auto")}


def without_process_sets() -> dict[str, Any]:
    """Two machines of two ranks each; Horovod adds no process sets later."""
    def refused() -> None:
        _train(True)

    told = told_by([refused])["refused"]
    hvd.shutdown()
    hvd.init(process_sets=hvd_twobit.node_process_sets())
    return {"told": told, "with_them": _train(True), "auto": _train("auto")}

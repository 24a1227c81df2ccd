"""Training that is repeated, interrupted and resumed, what it leaves in memory, and residuals of ranks that are gone.

A small network is really trained: its gradients depend on its weights, so that a bit that is lost anywhere changes
everything after it. ``first`` and ``second`` are two jobs of the same number of ranks.
"""

from __future__ import annotations

import copy
import gc
import pathlib
import tracemalloc
from collections.abc import Mapping
from typing import Any

import horovod.torch as hvd
import numpy as np
import psutil
import torch

from hvd_twobit import checkpoint
from hvd_twobit.residuals import ResidualRegistry
from hvd_twobit.torch import TwoBit, as_tensors, residuals_of

STEPS, SAVED_AFTER = 200, 100
CONFIGURATIONS: dict[str, Mapping[str, Any]] = {
    "adaptive levels": dict(warmup_steps=3, block_elements=256),
    "a fixed threshold, sra": dict(threshold=0.01, transport="sra", bucket_cap_mb=0.01),
}
MANY_STEPS, STEPS_BEFORE = 2000, 100


class Training:
    """Model, optimizer and the data of one rank."""

    def __init__(self, compression: Mapping[str, Any]) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64),
                                         torch.nn.Tanh(), torch.nn.Linear(64, 10))
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9),
            named_parameters=self.model.named_parameters(), compression=TwoBit(**compression))
        self.residuals = residuals_of(self.optimizer)

    def train(self, first: int, last: int) -> Training:
        """Steps ``first`` to ``last - 1``; each has the same batch whenever it is run."""
        for step in range(first, last):
            random = torch.Generator().manual_seed(1000 * step + hvd.rank())
            inputs = torch.randn(16, 48, generator=random)
            loss = torch.nn.functional.cross_entropy(self.model(inputs), inputs[:, :10].argmax(1))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return self

    def result(self) -> dict[str, Any]:
        """Weights, residuals and levels."""
        state = self.residuals.state_dict()
        return {"weights": {name: value.detach().numpy().copy() for name, value in self.model.named_parameters()},
                "residuals": state["residuals"], "levels": state["levels"]}


def _path(folder: str, number: int, kind: str) -> pathlib.Path:
    return pathlib.Path(folder, f"{number}_{hvd.rank()}.{kind}")


def _save(training: Training, folder: str, number: int) -> None:
    """As the documentation recommends: one file with everything, and residuals in one of their own."""
    saved = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict(),
             "residuals": as_tensors(training.residuals.state_dict())}
    torch.save(saved, _path(folder, number, "pt"))
    training.residuals.save(_path(folder, number, "npz"))


def _resumed(compression: Mapping[str, Any], folder: str, number: int) -> Training:
    """A new training that goes on from what was saved, whichever file residuals are taken from."""
    training = Training(compression)
    saved = torch.load(_path(folder, number, "pt"), weights_only=True)
    training.model.load_state_dict(saved["model"])
    training.optimizer.load_state_dict(saved["optimizer"])
    training.residuals.load_state_dict(saved["residuals"])
    from_pt = training.residuals.state_dict()
    training.residuals.reset()
    training.residuals.load(_path(folder, number, "npz"))
    from_npz = training.residuals.state_dict()
    assert checkpoint.to_bytes(from_npz) == checkpoint.to_bytes(from_pt) and any(training.residuals.norms().values())
    return training


def first(folder: str) -> dict[str, Any]:
    """Each configuration from its first to its last step, saved on the way."""
    results = {}
    for number, (name, compression) in enumerate(CONFIGURATIONS.items()):
        training = Training(compression).train(0, SAVED_AFTER)
        _save(training, folder, number)
        results[name] = training.train(SAVED_AFTER, STEPS).result()
    return results


def second(folder: str) -> dict[str, Any]:
    """The same in new processes: once more from the first step, and resumed from what the other job saved."""
    results: dict[str, Any] = {name: {} for name in CONFIGURATIONS}
    for number, (name, compression) in enumerate(CONFIGURATIONS.items()):
        results[name]["again"] = Training(compression).train(0, STEPS).result()
        results[name]["resumed"] = _resumed(compression, folder, number).train(SAVED_AFTER, STEPS).result()
    return {**results, "reset": reset(), "ranks that are gone": ranks_that_are_gone(), "memory": memory(),
            "many steps": many_steps()}


def reset() -> dict[str, Any]:
    """``reset()`` on every rank makes the next steps those of an optimizer that was just made."""
    training = Training(CONFIGURATIONS["adaptive levels"]).train(0, 10)
    other = Training(CONFIGURATIONS["adaptive levels"])
    other.model.load_state_dict(training.model.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))  # Else they share momenta.
    training.residuals.reset()
    return {"reset": training.train(10, 20).result(), "new": other.train(10, 20).result()}


def ranks_that_are_gone() -> dict[str, Any]:
    """A job of four ranks goes on with these two: what the four had not sent is sent, added up, and nothing else."""
    states = []
    for rank in range(4):
        registry = ResidualRegistry()
        registry.residual("weight", (64, 32))[:] = np.random.default_rng(rank).integers(-40, 41, 2048) / 8
        states.append(registry.state_dict())
    model = torch.nn.ParameterDict({"weight": torch.zeros(64, 32)})
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(),
                                         compression=TwoBit(threshold=0.5), op=hvd.Sum)
    residuals_of(optimizer).load_state_dict(checkpoint.redistribute(states, hvd.size())[hvd.rank()])
    for _ in range(50):
        (model["weight"] * 0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    unsent = hvd.allreduce(torch.from_numpy(residuals_of(optimizer)["weight"]), op=hvd.Sum, name="unsent").numpy()
    return {"sent": -model["weight"].detach().numpy(), "unsent": unsent,
            "before": sum(state["residuals"]["weight"] for state in states)}


def memory() -> dict[str, Any]:
    """Bytes per element that are kept for a large tensor, and what a step has beside them at its peak.

    To be called after some training: what is imported and cached in a process's first step would count.
    """
    elements = 1 << 20
    found = {}
    for name, compression in (("adaptive levels", {}), ("a fixed threshold", dict(threshold=0.5)),
                              ("a scaler", dict(threshold=0.5, scaler=torch.amp.GradScaler("cpu")))):
        model = torch.nn.ParameterDict({"weight": torch.zeros(elements)})
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(),
                                             compression=TwoBit(**compression, transport="allgather"))
        weight = torch.from_numpy(np.random.default_rng(hvd.rank()).standard_normal(elements).astype(np.float32))
        tracemalloc.start()
        peaks = []
        for _ in range(4):
            gc.collect()
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            (model["weight"] * weight).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        found[name] = {"kept": kept / elements, "step": peaks[-1] / elements,
                       "registry": residuals_of(optimizer).nbytes / elements}
    return found


def many_steps() -> dict[str, Any]:
    """What 2,000 steps add to the process's memory, and to what Python and NumPy have allocated."""
    model = torch.nn.ParameterDict({"weight": torch.zeros(64, 64)})
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
                                         compression=TwoBit)

    def train(steps: int) -> None:
        for step in range(steps):
            (model["weight"] - hvd.rank() - step % 7).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()

    tracemalloc.start()
    train(STEPS_BEFORE)  # Fills caches.
    before = tracemalloc.take_snapshot()
    resident = psutil.Process().memory_info().rss
    train(MANY_STEPS)
    resident = psutil.Process().memory_info().rss - resident
    changes = tracemalloc.take_snapshot().compare_to(before, "lineno")
    tracemalloc.stop()
    return {"resident": resident, "traced": sum(change.size_diff for change in changes),
            "lines": [str(change) for change in changes[:10]]}

"""What is handed to ``hvd.allreduce(compression=TwoBit)`` in both front ends, and what has to come back.

``expected`` and its like are called in the test's process, the rest by the scenarios of a front end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.simulation import SimulatedAdaptiveTensor, SimulatedTensor, gradient, simulated, summed_once

SHAPES = {"wide": (37, 61), "row": (1500,), "tiny": (5,), "scalar": ()}
STEPS = 20


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to call ``hvd.allreduce``; the defaults are those of a plain script.

    Attributes:
        compression: keyword arguments of TwoBit; None passes the class itself.
        op: by name.
        prescale: Horovod's ``prescale_factor``.
        postscale: Horovod's ``postscale_factor``.
        dtype: of the tensors.
        grouped: all tensors in one ``hvd.grouped_allreduce``.
        subset: within a process set of the second half of the ranks.
        overflow: rank 1 has a NaN in "wide".
    """

    compression: Mapping[str, Any] | None = None
    op: str = "Average"
    prescale: float = 1.0
    postscale: float = 1.0
    dtype: str = "float32"
    grouped: bool = False
    subset: bool = False
    overflow: bool = False

    @property
    def min_elements(self) -> int:
        """Below which tensors are not compressed."""
        return (self.compression or {}).get("min_elements", 1024)

    @property
    def options(self) -> dict[str, float]:
        """Keyword arguments that both front ends have."""
        return {"prescale_factor": self.prescale, "postscale_factor": self.postscale}

    def members(self, ranks: int) -> list[int]:
        """The ranks that exchange."""
        return list(range(ranks // 2, ranks)) if self.subset else list(range(ranks))

    def tensor(self, rank: int, name: str) -> np.ndarray:
        """The float32 tensor of a rank, exact in the dtype of the case; sums of what is not compressed are exact."""
        dyadic = int(np.prod(SHAPES[name])) < self.min_elements or self.dtype != "float32"
        value = gradient(5, rank, 0, name, SHAPES[name], dyadic)
        if self.overflow and rank == 1 and name == "wide":
            value.flat[100] = np.nan
        return value


ASYMMETRICAL = dict(positive_threshold=0.2, negative_threshold=-0.45)
CASES = {
    "the bare class": Case(),
    "sum": Case(op="Sum"),
    "sum, a third before": Case(op="Sum", prescale=1 / 3),
    "average, three before and seven behind": Case(prescale=3.0, postscale=7.0),
    "fixed, average": Case(dict(threshold=0.3)),
    "fixed, sum, a third behind": Case(dict(threshold=0.3), op="Sum", postscale=1 / 3),
    "fixed, average, a third before and seven behind": Case(dict(threshold=0.3), prescale=1 / 3, postscale=7.0),
    "asymmetrical, sum, a seventh before": Case(ASYMMETRICAL, op="Sum", prescale=1 / 7),
    "asymmetrical, average": Case(ASYMMETRICAL),
    "every tensor": Case(dict(min_elements=0, block_elements=64)),
    "a group": Case(dict(block_elements=256), grouped=True),
    "a group, fixed, sum, three before": Case(dict(threshold=0.3), op="Sum", prescale=3.0, grouped=True),
    "a process set": Case(dict(threshold=0.3), subset=True),
    "a process set, adaptive, sum": Case(op="Sum", subset=True),
    "float16": Case(dict(threshold=0.375), dtype="float16"),
    "bfloat16": Case(dict(threshold=0.375), dtype="bfloat16"),
    "a group of bfloat16": Case(dict(threshold=0.375), dtype="bfloat16", grouped=True),
    "float64": Case(dict(threshold=0.375), dtype="float64"),
    "NaN on one rank": Case(dict(threshold=0.3), overflow=True),
}


def expected(name: str, ranks: int, factors: type = float) -> dict[str, np.ndarray]:
    """By tensor, what a case returns on every rank that exchanges, as float32.

    Args:
        name: the case's.
        ranks: of the job.
        factors: what the front end makes of the user's factors.
    """
    case = CASES[name]
    members = case.members(ranks)
    before, after = (float(factors(factor)) for factor in (case.prescale, case.postscale))
    scale = before * (after / len(members) if case.op == "Average" else after)
    found = {}
    for tensor, shape in SHAPES.items():
        values = [case.tensor(rank, tensor) for rank in members]
        if int(np.prod(shape)) < case.min_elements:
            found[tensor] = np.asarray(np.sum(values, axis=0, dtype=np.float64) * scale, np.float32)
        else:
            found[tensor] = summed_once(case.compression, values, scale, ranks).reshape(shape)
    return found


NAMED = {
    "adaptive": Case(),
    "adaptive, sum, warm-up": Case(dict(warmup_steps=2, block_elements=256), op="Sum"),
    "fixed": Case(dict(threshold=0.4)),
    "asymmetrical, sum": Case(ASYMMETRICAL, op="Sum"),
}


def named_gradient(rank: int, step: int) -> np.ndarray:
    """What a rank hands in at a step; sums of these are exact."""
    return gradient(6, rank, step, "named", (43, 47), dyadic=True)


def expected_named(name: str, ranks: int,
                   steps: int = STEPS) -> tuple[list[np.ndarray], SimulatedTensor | SimulatedAdaptiveTensor]:
    """The results of so many steps, and the tensor on all ranks afterwards."""
    case = NAMED[name]
    tensor = simulated(case.compression, list(range(ranks)), 43 * 47)
    scale = 1 / ranks if case.op == "Average" else 1.0
    return [tensor.step([named_gradient(rank, step) for rank in range(ranks)], scale).reshape(43, 47)
            for step in range(steps)], tensor


JOINING = {
    "adaptive": Case(dict(block_elements=256), op="Sum"),
    "fixed, average, a third before": Case(dict(threshold=0.4), prescale=1 / 3),
}


def steps_before_join(rank: int) -> int:
    """How many steps a rank has data for; rank 0 joins last."""
    return max(1, 7 - 2 * rank)


STEPS_AFTER_JOIN = 3


def seen_by(rank: int, steps: list[Any]) -> list[Any]:
    """What a rank sees of the steps before and after all have joined."""
    return steps[:steps_before_join(rank)] + steps[-STEPS_AFTER_JOIN:]


def expected_joining(name: str, ranks: int, factors: type = float) -> list[np.ndarray]:
    """What rank 0 gets in the steps before and after all have joined; ``factors`` as for ``expected``."""
    case = JOINING[name]
    scale = float(factors(case.prescale)) / (ranks if case.op == "Average" else 1)
    return joined_steps(simulated(case.compression, list(range(ranks)), 43 * 47), ranks, scale)


def joined_steps(tensor: Any, ranks: int, scale: float) -> list[np.ndarray]:
    """What rank 0 gets of a simulated tensor in the steps before and after all have joined."""
    found = []
    for step in range(steps_before_join(0) + STEPS_AFTER_JOIN):
        active = [rank for rank in range(ranks) if step < steps_before_join(rank) or step >= steps_before_join(0)]
        found.append(tensor.step([named_gradient(rank, step) for rank in active], scale).reshape(43, 47))
    return found

"""Checks that are carried out one after another, each with many cases, and what came of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

MOST_TOLD = 5
"""Mismatches of a check whose text is kept."""


class LeftOut(Exception):
    """A check cannot be made here; the text tells why."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """Where checks are made.

    Attributes:
        device: a GPU, or the CPU where Triton's kernels are interpreted.
        seed: of random numbers.
    """

    device: torch.device
    seed: int = 0

    @property
    def full(self) -> bool:
        """Whether all sizes are tried, or the few that an interpreter can do."""
        return self.device.type == "cuda"

    def random(self) -> np.random.Generator:
        """New random numbers, the same for every check."""
        return np.random.default_rng(self.seed)

    def needs_gpu(self, what: str) -> None:
        """Raise LeftOut on the CPU, where there is no such thing."""
        if not self.full:
            raise LeftOut(f"there are no {what} on the CPU")


Check = Callable[[Setup], Iterable[str]]
"""Gives a text for every case: what is wrong, or nothing."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a check.

    Attributes:
        name: of the check.
        cases: how many were compared.
        mismatches: of how many something was wrong.
        told: what was wrong, of the first few.
        left_out: why it was not made; empty where it was.
        seconds: for which it took.
    """

    name: str
    cases: int
    mismatches: int
    told: tuple[str, ...]
    left_out: str
    seconds: float


def carry_out(name: str, check: Check, setup: Setup) -> Outcome:
    """Make a check. An exception is a mismatch, and ends it."""
    start, cases, wrong, left_out = time.perf_counter(), 0, list[str](), ""
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            for text in check(setup):
                cases += 1
                if text:
                    wrong.append(text)
    except LeftOut as reason:
        left_out = str(reason)
    except Exception as error:  # Of compilers, drivers and devices: whatever it is, other checks may still tell more.
        cases += 1
        wrong.append(f"{type(error).__name__}: {error}")
    return Outcome(name, cases, len(wrong), tuple(wrong[:MOST_TOLD]), left_out, time.perf_counter() - start)


def difference(found: np.ndarray, wanted: np.ndarray) -> str:
    """How two arrays differ in their bits; empty where they do not. One NaN is as good as another."""
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return f"{found.dtype}{list(found.shape)} instead of {wanted.dtype}{list(wanted.shape)}"
    different = np.flatnonzero(_bits(found) != _bits(wanted))
    if different.size == 0:
        return ""
    first = int(different[0])
    return (f"{different.size} of {found.size} elements, first {first}: {found.reshape(-1)[first]!r} instead of "
            f"{wanted.reshape(-1)[first]!r}")


def differences(found: Sequence[tuple[str, np.ndarray, np.ndarray]]) -> str:
    """How arrays that are found differ from those that are wanted, by name."""
    texts = [(name, difference(one, other)) for name, one, other in found]
    return "; ".join(f"{name}: {text}" for name, text in texts if text)


def _bits(array: np.ndarray) -> np.ndarray:
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.kind == "f":
        flat = np.where(np.isnan(flat), flat.dtype.type(np.nan), flat)
    return flat.view(f"u{flat.dtype.itemsize}") if flat.dtype.itemsize in (1, 2, 4, 8) else flat

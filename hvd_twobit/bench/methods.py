"""The ways to exchange gradients that are compared; a new one is a line in ``METHODS``."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from ..config import DEFAULT_MIN_ELEMENTS, TwoBitConfig
from ..cost_model import HIERARCHICAL, cost
from ..errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to exchange gradients.

    Attributes:
        name: on the command line and in results.
        label: in reports.
        arguments: TwoBit's; None for what Horovod does itself.
    """

    name: str
    label: str
    arguments: Mapping[str, Any] | None = None

    def unavailable(self, ranks_per_machine: int = 1) -> str | None:
        """Why the installed hvd_twobit does not have this method on such machines, or None where it does."""
        if self.name == HIERARCHICAL and ranks_per_machine == 1:
            return "it needs machines with several ranks"
        try:
            TwoBitConfig.from_arguments(**(self.arguments or {}))
        except ConfigError as error:
            return str(error)
        return None

    def compression(self, front_end: str) -> Any:
        """A new argument ``compression=`` for Horovod's optimizers and tapes.

        Args:
            front_end: ``"torch"`` or ``"tensorflow"``.
        """
        if self.arguments is None:
            known = importlib.import_module(f"horovod.{front_end}").Compression
            return {"none": known.none, "fp16": known.fp16}[self.name]
        return importlib.import_module(f"hvd_twobit.{front_end}").TwoBit(**self.arguments)

    def nbytes(self, elements: Sequence[int], ranks: int, ranks_per_machine: int = 1) -> float:
        """Bytes that a machine sends in an exchange, and as many that it receives, by ``cost_model``.

        Args:
            elements: of each tensor.
            ranks: number of ranks.
            ranks_per_machine: how many of them share a machine and its link.
        """
        small = sum(count for count in elements if count < DEFAULT_MIN_ELEMENTS)  # Of these, TwoBit keeps away.
        if self.arguments is None:
            parts = [("fp32" if self.name == "none" else self.name, sum(elements))]
        else:
            parts = [("fp32", small), (self.name, sum(elements) - small)]
        return sum(cost(name, count, ranks, ranks_per_machine=ranks_per_machine).nbytes for name, count in parts
                   if count)


BASELINES = ("none", "fp16")
"""Measured in every run: what the others are compared with meets the same load then."""

METHODS = {method.name: method for method in (
    Method("none", "fp32"),
    Method("fp16", "fp16"),
    Method("allgather", "2-bit, allgather", {"transport": "allgather"}),
    Method("sra", "2-bit, sra", {"transport": "sra"}),
    Method("allreduce", "2-bit, allreduce", {"transport": "allreduce"}),
    Method("auto", "2-bit, auto", {"transport": "auto"}),
    Method(HIERARCHICAL, "2-bit, two levels", {"hierarchical": True}),
)}

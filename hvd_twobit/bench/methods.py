"""The ways to exchange gradients that are compared; a new one is a line in ``METHODS``."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

from ..config import DEFAULT_MIN_ELEMENTS, TwoBitConfig
from ..cost_model import cost
from ..errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to exchange gradients.

    Attributes:
        name: on the command line and in results.
        label: in reports.
        transport: TwoBit's; None for what Horovod does itself.
    """

    name: str
    label: str
    transport: str | None = None

    def unavailable(self) -> str | None:
        """Why the installed hvd_twobit does not have this method, or None where it does."""
        try:
            TwoBitConfig.from_arguments(**self._arguments())
        except ConfigError as error:
            return str(error)
        return None

    def compression(self, front_end: str) -> Any:
        """A new argument ``compression=`` for Horovod's optimizers and tapes.

        Args:
            front_end: ``"torch"`` or ``"tensorflow"``.
        """
        if self.transport is None:
            known = importlib.import_module(f"horovod.{front_end}").Compression
            return {"none": known.none, "fp16": known.fp16}[self.name]
        return importlib.import_module(f"hvd_twobit.{front_end}").TwoBit(**self._arguments())

    def nbytes(self, elements: Sequence[int], ranks: int) -> float:
        """Bytes that a rank sends in an exchange, and as many that it receives, by ``cost_model``.

        Args:
            elements: of each tensor.
            ranks: number of ranks.
        """
        small = sum(count for count in elements if count < DEFAULT_MIN_ELEMENTS)  # Of these, TwoBit keeps away.
        if self.transport is None:
            parts = [("fp32" if self.name == "none" else self.name, sum(elements))]
        else:
            parts = [("fp32", small), (self.name, sum(elements) - small)]
        return sum(cost(name, count, ranks).nbytes for name, count in parts if count)

    def _arguments(self) -> dict[str, Any]:
        return {} if self.transport is None else {"transport": self.transport}


BASELINES = ("none", "fp16")
"""Measured in every run: what the others are compared with meets the same load then."""

METHODS = {method.name: method for method in (
    Method("none", "fp32"),
    Method("fp16", "fp16"),
    Method("allgather", "2-bit, allgather", "allgather"),
    Method("sra", "2-bit, sra", "sra"),
    Method("allreduce", "2-bit, allreduce", "allreduce"),
    Method("auto", "2-bit, auto", "auto"),
)}

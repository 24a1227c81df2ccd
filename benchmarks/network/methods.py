"""The ways to exchange gradients that are compared; a new one is a line in ``METHODS``."""

from __future__ import annotations

import dataclasses
from typing import Any

from hvd_twobit.config import TwoBitConfig
from hvd_twobit.errors import ConfigError


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

    def compression(self) -> Any:
        """A new argument for ``hvd.DistributedOptimizer(compression=)`` of ``horovod.torch``."""
        import horovod.torch as hvd

        from hvd_twobit.torch import TwoBit

        if self.transport is None:
            return {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}[self.name]
        return TwoBit(**self._arguments())

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

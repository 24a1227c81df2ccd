"""Which buckets a step has, and by which transport each of them travels. Every rank computes the same.

- ``allgather``: every rank gets the payloads of all and adds them up.
- ``sra`` (scatter-reduce-allgather): every rank sums one chunk of the bucket and sends all others the sums.
- ``allreduce``: Horovod's own allreduce adds up integers that hold codes as digits.

The codec says what both carry, a front end's collectives carry it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from .buckets import Bucket, plan
from .config import AUTO, TwoBitConfig
from .cost_model import choose

_OFFSETS = 2**31
"""Horovod 0.28.1 crashes where what an allgather returns has more elements (here: bytes)."""

_BYTES_PER_ELEMENT = 4
"""The most that an element takes: in a payload a quarter (or its padding), in sums up to 4 bytes."""


@dataclasses.dataclass(frozen=True)
class Planned:
    """A bucket and how it travels.

    Attributes:
        bucket: what travels together.
        transport: ``"allgather"``, ``"sra"`` or ``"allreduce"``.
        ranks: ranks that exchange it; of two levels, those of equal number on all machines.
        ranks_per_machine: ranks that divide it among them before; 1 where there is one level.
    """

    bucket: Bucket
    transport: str
    ranks: int
    ranks_per_machine: int = 1

    @property
    def chunks(self) -> int:
        """Payloads that a rank sends of the bucket."""
        return self.ranks if self.transport == "sra" else 1


def plan_buckets(config: TwoBitConfig, tensors: Iterable[tuple[str, tuple[int, ...]]], ranks: int,
                 ranks_per_machine: int = 1) -> list[Planned]:
    """The buckets of an optimizer.

    Args:
        config: checked parameters.
        tensors: name and shape of every tensor that may travel compressed, in the order in which gradients come.
        ranks: ranks that exchange, of all machines.
        ranks_per_machine: those that divide a bucket before its exchange. Where there are several, the cuts of a tensor
            depend on no other tensor, as residuals are kept by share, and an exchange may be of other tensors.
    """
    machines = ranks // ranks_per_machine
    return [Planned(bucket, transport_of(config, bucket.elements, machines, ranks_per_machine), machines,
                    ranks_per_machine)
            for bucket in plan(tensors, bucket_elements(config, ranks), config.block_elements,
                               alone=ranks_per_machine > 1)]


def restricted(buckets: Iterable[Planned], compressed: Callable[[str], bool]) -> list[Planned]:
    """The buckets of a step in which only some tensors travel compressed, cut as where all do."""
    left = []
    for planned in buckets:
        parts = tuple(part for part in planned.bucket.parts if compressed(part.name))
        if parts:
            left.append(dataclasses.replace(planned, bucket=Bucket(parts)))
    return left


def bucket_elements(config: TwoBitConfig, ranks: int) -> int:
    """The most elements of a bucket: as configured, and few enough for what Horovod's allgather can return."""
    return min(int(config.bucket_cap_mb * 2**20 / 4), _OFFSETS // (2 * max(ranks, _BYTES_PER_ELEMENT)))


def transport_of(config: TwoBitConfig, elements: int, ranks: int, ranks_per_machine: int = 1) -> str:
    """How a bucket of so many elements travels, or the shares in which ``ranks_per_machine`` ranks have divided it."""
    if config.transport == AUTO:
        return choose(-(-elements // ranks_per_machine), ranks, adaptive=config.adaptive)
    return config.transport

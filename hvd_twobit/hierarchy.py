"""How a bucket is exchanged on two levels: in full precision within machines, two bits between them. No framework.

1. Each rank of a machine hands every other one that one's shares of the bucket (``sharding``): an alltoall of float32.
2. It adds up what it received, in the order of ranks, and divides by their number where gradients are averaged.
3. What it has now, the machine's gradient in its shares, is a bucket like any other: codec, buckets and transports
   bring it to the ranks of the same number on all machines.
4. It hands the result to all ranks of its machine: an allgather of float32.

This file says what lies where, for both front ends. Source: MXNet's kvstore ``dist``, which adds up the gradients of a
machine's devices before it compresses what leaves the machine.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .buckets import Bucket
from .errors import PayloadError
from .sharding import Share, shares_of

FAILED = np.float32(1)
"""Sent behind a share that could not be exchanged, in place of 0: all ranks of the machine have to know."""


class TwoLevelLayout:
    """Where the shares of a bucket lie in what the ranks of a machine exchange.

    Args:
        bucket: of whole tensors or parts of them.
        rank: this rank's number among those of its machine.
        ranks: number of ranks on each machine.
        block_elements: shares are cut at multiples of this many elements of a tensor.
        keys: see ``sharding.shares_of``, by tensor.
        with_empty: whether empty shares are exchanged as well.

    Attributes:
        own: this rank's shares, as a bucket of whole tensors; None where there is nothing to exchange.
        splits: elements that each rank of the machine gets, int32[ranks].
    """

    def __init__(self, bucket: Bucket, rank: int, ranks: int, block_elements: int,
                 keys: Mapping[str, str] | None = None, with_empty: bool = False) -> None:
        self._bucket = bucket
        self._ranks = ranks
        by_part = [shares_of(part, ranks, block_elements, (keys or {}).get(part.name)) for part in bucket.parts]
        self._own = [(part.name, shares[rank]) for part, shares in zip(bucket.parts, by_part)
                     if shares[rank].elements or with_empty]
        self.own = Bucket(tuple(share.part for _, share in self._own)) if self._own else None
        self.splits = np.array([sum(shares[number].elements for shares in by_part) for number in range(ranks)],
                               np.int32)
        self._places: dict[str, list[tuple[int, int, Share]]] = {part.name: [] for part in bucket.parts}
        start = 0
        for number in range(ranks):
            for part, shares in zip(bucket.parts, by_part):
                self._places[part.name].append((number, start, shares[number]))
                start += shares[number].elements

    @property
    def elements(self) -> int:
        """Elements that a rank sends in the first collective, of all shares."""
        return int(self.splits.sum())

    def put(self, name: str, gradient: np.ndarray, out: np.ndarray) -> None:
        """Write what the bucket has of a gradient, float32[elements of the tensor], into ``out``, float32[elements]."""
        for _, start, share in self._places[name]:
            out[start:start + share.elements] = gradient[share.start:share.stop]

    def machine_gradient(self, received: np.ndarray, averages: bool) -> np.ndarray:
        """The sum or mean over the machine's ranks of this rank's shares, float32.

        Args:
            received: float32, what each rank of the machine has of the shares, in the order of ranks.
            averages: whether to divide by the number of ranks.
        """
        rows = received.reshape(self._ranks, -1)
        with np.errstate(over="ignore", invalid="ignore"):
            total = rows[0] + rows[1] if self._ranks > 1 else rows[0].copy()
            for row in rows[2:]:
                total += row
            if averages and self._ranks > 1:
                total /= np.float32(self._ranks)
        return total

    @property
    def result_elements(self) -> int:
        """Elements that this rank sends in the second collective: the reduced shares, and whether that failed."""
        return sum(share.elements for _, share in self._own) + 1

    def result(self) -> np.ndarray:
        """Memory for what the second collective sends."""
        return np.zeros(self.result_elements, np.float32)

    def of_own(self, values: np.ndarray) -> list[tuple[str, Share, np.ndarray]]:
        """Tensor and share of all that this rank has, and where it lies in ``machine_gradient`` and ``result``."""
        ends = np.cumsum([share.elements for _, share in self._own])
        return [(tensor, share, values[end - share.elements:end]) for (tensor, share), end in zip(self._own, ends)]

    def check(self, gathered: np.ndarray) -> None:
        """Raise PayloadError where a rank of the machine could not exchange its shares.

        Args:
            gathered: float32, the results of all ranks of the machine, in the order of ranks.
        """
        if gathered.size != self.elements + self._ranks:
            raise PayloadError(f"{self._bucket.label}: the ranks of this machine sent {gathered.size} elements of the "
                               f"reduced gradient instead of {self.elements + self._ranks}")
        failed = np.flatnonzero(gathered[np.cumsum(self.splits + 1) - 1] != 0)
        if failed.size:
            raise PayloadError(f"{self._bucket.label}: rank {failed[0]} of this machine's {self._ranks} could not "
                               "exchange its share with the other machines; it tells why")

    def take(self, name: str, gathered: np.ndarray, out: np.ndarray) -> None:
        """Overwrite what the bucket has of a tensor, in ``out``, float32[elements of the tensor]."""
        for number, start, share in self._places[name]:
            begin = start + number  # Behind the shares of each rank before lies its verdict.
            out[share.start:share.stop] = gathered[begin:begin + share.elements]

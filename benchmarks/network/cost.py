"""What an exchange should take: the bytes of its formula, and the time in which the link carries them.

Formulas: docs/design.md. The block table of adaptive levels is counted with 8 bytes for 1024 elements.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from hvd_twobit.config import DEFAULT_MIN_ELEMENTS
from hvd_twobit.payload import Layout

PACKET_SHARE = 1448 / 1514
"""Content of a full TCP packet (MTU 1500, time stamps), divided by what ``tbf`` counts of it."""

_BLOCK_ELEMENTS = 1024
_FLOAT64_BITS = 53


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Of one exchange, for each rank.

    Attributes:
        nbytes: bytes that a rank sends, and as many that it receives.
        seconds: time in which the link carries them, one way; None where its bandwidth is not known.
    """

    nbytes: float
    seconds: float | None


def predict(method: str, elements: Sequence[int], ranks: int, bits_per_second: float | None) -> Prediction:
    """What an exchange takes if the network is all that takes time, and has no latency.

    Args:
        method: name of a ``Method``.
        elements: of each tensor.
        ranks: number of ranks.
        bits_per_second: of the link, in each direction, headers included; None: not limited.
    """
    nbytes = sum(_tensor_nbytes(method, count, ranks) for count in elements)
    return Prediction(nbytes, None if bits_per_second is None else 8 * nbytes / (bits_per_second * PACKET_SHARE))


def _tensor_nbytes(method: str, elements: int, ranks: int) -> float:
    ring = 2 * (ranks - 1) / ranks
    if method == "fp16":
        return 2 * elements * ring
    if method == "none" or elements < DEFAULT_MIN_ELEMENTS:
        return 4 * elements * ring
    payload = Layout(elements, _BLOCK_ELEMENTS).nbytes
    by_transport = {
        "allgather": (ranks - 1) * payload,
        "sra": (ranks - 1) / ranks * (payload + elements * _sum_bits(ranks) / 8),
        "allreduce": ring * (8 * elements / _digits(ranks) + 8 * elements / _BLOCK_ELEMENTS),
    }
    return min(by_transport.values()) if method == "auto" else by_transport[method]


def _sum_bits(ranks: int) -> int:
    """Bits of an exact sum of codes, as ``sra`` returns it."""
    return 4 if ranks <= 7 else 8 if ranks <= 127 else 16


def _digits(ranks: int) -> int:
    """Codes in a float64 whose sums over ranks, with Horovod's scaling, are exact."""
    return (_FLOAT64_BITS - math.ceil(math.log2(ranks)) - 2) // math.ceil(math.log2(2 * ranks + 1))

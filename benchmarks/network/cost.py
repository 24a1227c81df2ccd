"""What an exchange should take: the bytes of ``hvd_twobit.cost_model``, and the time in which the link carries them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hvd_twobit.bench.methods import METHODS

PACKET_SHARE = 1448 / 1514
"""Content of a full TCP packet (MTU 1500, time stamps), divided by what ``tbf`` counts of it; not the preamble."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Of one exchange, for each machine.

    Attributes:
        nbytes: bytes that a machine sends, and as many that it receives.
        seconds: time in which the link carries them, both ways at once; None where its bandwidth is not known.
    """

    nbytes: float
    seconds: float | None


def predict(method: str, elements: Sequence[int], ranks: int, bits_per_second: float | None,
            ranks_per_machine: int = 1) -> Prediction:
    """What an exchange takes if the network is all that takes time, and has no latency.

    Args:
        method: name of a ``Method``.
        elements: of each tensor.
        ranks: number of ranks.
        bits_per_second: of the link, in each direction, headers included; None: not limited.
        ranks_per_machine: how many of them share a link.
    """
    nbytes = METHODS[method].nbytes(elements, ranks, ranks_per_machine)
    return Prediction(nbytes, None if bits_per_second is None else 8 * nbytes / (bits_per_second * PACKET_SHARE))

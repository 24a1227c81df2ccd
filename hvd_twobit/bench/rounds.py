"""What is made of exchanges that were measured in rounds, in each of which every method takes its turn.

A round is ``{method: {"seconds": [...], "sent": [...]}}``, with values of all ranks. Methods are compared within a
round, so that ratios hold on a busy machine or link where milliseconds do not.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

Round = Mapping[str, Mapping[str, Sequence[float]]]


@dataclasses.dataclass(frozen=True)
class Summary:
    """One method.

    Attributes:
        seconds: median over rounds of an exchange's time, which is that of the slowest rank.
        fastest, slowest: of the rounds, in seconds.
        to_fp32, to_fp16: median over rounds of the ratio to the time that these took in the same round.
        sent: bytes: median over rounds and ranks of what a rank sent.
    """

    seconds: float
    fastest: float
    slowest: float
    to_fp32: float
    to_fp16: float
    sent: float


def summarize(rounds: Sequence[Round]) -> dict[str, Summary]:
    """By method, in the order of the first round; among them have to be ``"none"`` and ``"fp16"``."""
    seconds = {method: [max(of_round[method]["seconds"]) for of_round in rounds] for method in rounds[0]}

    def to(baseline: str, own: Sequence[float]) -> float:
        return statistics.median(mine / other for mine, other in zip(own, seconds[baseline]))

    return {method: Summary(
        statistics.median(own), min(own), max(own), to("none", own), to("fp16", own),
        statistics.median(nbytes for of_round in rounds for nbytes in of_round[method]["sent"]),
    ) for method, own in seconds.items()}


class DifferentGradients(RuntimeError):
    """Ranks did not receive the same bits."""


def compare(method: str, digests: Sequence[str]) -> None:
    """Raise DifferentGradients unless all ranks received the same bits.

    Args:
        method: name of the method.
        digests: of what each rank received.
    """
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise DifferentGradients(f"{method}: ranks received different gradients; of rank {rank} the digest is "
                                     f"{digest}, of rank 0 {digests[0]}")

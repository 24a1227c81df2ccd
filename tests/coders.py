"""What Horovod's collectives do between the coders of all ranks, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvd_twobit.torch.coder import Coder


def carry(coders: Sequence[Coder], transport: str,
          damage: Callable[[torch.Tensor], torch.Tensor] = lambda arrived: arrived) -> None:
    """Bring sealed payloads of a bucket to all ranks, whose coders may keep theirs in different memory.

    Args:
        coders: of the ranks, in their order.
        transport: how the bucket travels.
        damage: makes what arrives of what was sent, in every collective.
    """
    for coder in coders:
        assert coder.is_ready(wait=True)
    payloads = [coder.payloads for coder in coders]
    if transport == "allgather":
        for coder, own in zip(coders, payloads):
            coder.receive(damage(_joined(payloads, own)))
    elif transport == "sra":
        for rank, (coder, own) in enumerate(zip(coders, payloads)):
            coder.sum(damage(_joined([payload.split(coder.splits)[rank] for payload in payloads], own)))
            assert coder.are_summed(wait=True)
        sums = [coder.sums for coder in coders]
        for coder, own in zip(coders, sums):
            coder.receive_sums(damage(_joined(sums, own)))
    else:
        integers = [coder.tally() for coder in coders]
        total = integers[0].cpu()
        for of_rank in integers[1:]:
            total = total + of_rank.cpu()
        total = damage(total)
        for coder, own in zip(coders, integers):
            own.copy_(total)
            coder.receive_tallies()


def _joined(pieces: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """All pieces, one behind the other, on the device of one of them."""
    return torch.cat([piece.to(like.device) for piece in pieces])

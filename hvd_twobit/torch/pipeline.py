"""The buckets of one optimizer in a step: which gradient goes where, and when a bucket's last collective begins.

Horovod puts what waits for its turn into one collective, so that nothing of it could be decoded before all of it has
arrived. So at most two buckets are handed over at a time: one travels, one waits, and while one is decoded the next one
travels. They begin in their order, on every rank: if one rank waited for a bucket that another has not begun because it
waits for one that the first has not begun, both would wait for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .transfer import Transfer

_AT_A_TIME = 2


class Pipeline:
    """The transfers of an optimizer's compressed gradients.

    Args:
        transfers: in the order in which their buckets are expected to be full; the same on every rank.
    """

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self._transfers = transfers
        self._begun = 0
        self._of: dict[str, list[int]] = {}
        for number, transfer in enumerate(self._transfers):
            for name in transfer.names:
                self._of.setdefault(name, []).append(number)

    @property
    def is_under_way(self) -> bool:
        """Whether a collective was begun and has not ended."""
        return any(transfer.is_under_way for transfer in self._transfers)

    def begin_step(self) -> None:
        """No gradient of this step was added yet: forget what is left of a step that was broken off."""
        if not all(transfer.is_empty for transfer in self._transfers):
            self.abandon()
        self._begun = 0

    def add(self, name: str, gradient: Any) -> None:
        """Put a gradient, float32[elements], into its buckets, and send those that are full."""
        for number in self._of[name]:
            self._transfers[number].add(name, gradient)
            self._advance(wait=False)

    def skip(self, name: str) -> None:
        """Leave out a gradient in this step, if it was expected: it turned out to travel by other means."""
        for number in self._of.get(name, ()):
            self._transfers[number].skip(name)
            self._advance(wait=False)

    def decode(self, name: str, out: Any) -> None:
        """Wait for a tensor's buckets and overwrite ``out`` with the scaled sum over all ranks.

        Args:
            name: the tensor's name. All gradients of the step have been added.
            out: float32[elements], contiguous, of the kind of what was added.

        Raises:
            PayloadError: a rank sent something else than what this rank expects.
            HorovodInternalError: a collective failed.
        """
        for number in self._of[name]:
            self._receive(number)
            self._transfers[number].decode(name, out)

    def abandon(self) -> None:
        """Wait for what is under way here and, as far as is known here, on the other ranks; and forget it."""
        for number in range(len(self._transfers)):
            self._receive(number)
        for transfer in self._transfers:
            transfer.drain()  # Full ones behind one that is not have begun what precedes the last collective.
            transfer.forget()

    def _receive(self, number: int) -> None:
        """Wait for a bucket; the next ones travel meanwhile. Nothing where one before it is not full."""
        while not self._transfers[number].has_arrived:
            self._advance(wait=True)
            awaited = [transfer for transfer in self._transfers if transfer.is_awaited]
            if not awaited:
                return
            awaited[0].receive()
        self._advance(wait=False)

    def _advance(self, wait: bool) -> None:
        """Begin last collectives as long as few are under way; with ``wait``, wait for what has to end before."""
        for transfer in self._transfers[self._begun:]:
            transfer.prepare(wait=False)
        while self._begun < len(self._transfers):
            under_way = sum(transfer.is_under_way for transfer in self._transfers[:self._begun])
            if under_way == _AT_A_TIME or not self._transfers[self._begun].prepare(wait):
                return
            self._transfers[self._begun].begin()
            self._begun += 1

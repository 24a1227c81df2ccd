"""The float64 words that one rank hands to Horovod's allreduce for one tensor: layout, tail, and a receiver's checks.

``payload`` describes what an allgather carries; this is its counterpart for sums that are made on the way. Codes travel
as digits (``kernels.Digits``), and behind them a *tail* of words that Horovod adds and multiplies like all others:

    words  field
    codes  digits of the codes: ``kernels.Digits.word_count`` words (or, uncompressed, the tensor's elements)
    ranks  presence: 1 at the place of the rank that sent it, 0 elsewhere
        1  fingerprint: 24 bits of what all ranks must have in common; a wrong sum tells that they have not
        …  block table: float64[blocks, columns], whatever the levels' rule needs the sum of

Presence tells what a sender cannot know: the factor by which Horovod multiplied (1 for Sum, 1 / ranks for Average, both
times the user's factors) and how many ranks contributed. A rank that has joined contributes zeros to every word, and
Horovod still divides by the number of all. Everything else follows by dividing by that factor and, where it is a whole
number, rounding.

No framework and no collective: a front end sends the words and says which rank this is.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import numpy as np

from .errors import PayloadError
from .kernels import Digits

_FINGERPRINT_BITS = 24  # Sums of so many bits are exact for more ranks than there are.


def fingerprint(*parts: bytes) -> int:
    """24 bits that depend on every byte of the parts and on where one ends."""
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, zlib.crc32(len(part).to_bytes(8, "little"), checksum))
    return checksum & ((1 << _FINGERPRINT_BITS) - 1)


@dataclasses.dataclass(frozen=True)
class DigitLayout:
    """Where the parts of a tensor's words lie.

    Attributes:
        elements: elements of the tensor.
        ranks: the most ranks that may contribute, numbered from 0.
        digits: how codes become digits; None where the tensor travels uncompressed.
        blocks: rows of the block table.
        columns: its columns; 0 for none.
    """

    elements: int
    ranks: int
    digits: Digits | None
    blocks: int = 0
    columns: int = 0

    @property
    def tail_offset(self) -> int:
        """Words before the tail."""
        return self.elements if self.digits is None else self.digits.word_count(self.elements)

    @property
    def size(self) -> int:
        """All words: float64[size], 8 bytes each."""
        return self.tail_offset + self.ranks + 1 + self.blocks * self.columns

    # Words are NumPy arrays or, with the same methods, tensors of a front end.

    def content(self, words: Any) -> Any:
        """View of the words before the tail."""
        return words[:self.tail_offset]

    def tail(self, words: Any) -> Any:
        """View of the words behind the content."""
        return words[self.tail_offset:]

    def table(self, words: Any) -> Any:
        """View of the block table, float64[blocks, columns]."""
        return words[self.tail_offset + self.ranks + 1:].reshape(self.blocks, self.columns)

    def signature(self, words: Any) -> Any:
        """View of what tells of the rank that made them: float64[ranks + 1], presence and fingerprint."""
        return words[self.tail_offset:self.tail_offset + self.ranks + 1]

    def signed(self, rank: int, mark: int) -> np.ndarray:
        """The signature of a rank.

        Args:
            rank: this rank's number, below ``ranks``.
            mark: what ``fingerprint`` returned.
        """
        made = np.zeros(self.ranks + 1)
        made[rank] = 1
        made[self.ranks] = mark
        return made

    def write_table(self, words: Any, totals: Any, counts: Any) -> None:
        """Write the block table: sum and number of what was selected and, in a third column, what ranks said instead.

        Args:
            words: float64[size].
            totals: float32[blocks], finite, as ``levels.block_totals``.
            counts: [blocks], integers: how many elements were selected.
        """
        table = self.table(words)
        table[:, 0] = totals * (counts > 0)
        table[:, 1] = counts
        if self.columns > 2:
            table[:, 2] = totals * (counts == 0)

    def check_size(self, found: int, tensor: str) -> None:
        """Check how many words came back for a tensor.

        Raises:
            PayloadError: there are more or fewer than were sent.
        """
        if found != self.size:
            raise PayloadError(f"tensor {tensor!r}: {found} words came back, but {self.elements} elements of up to "
                               f"{self.ranks} ranks take {self.size}: the number of ranks has changed on the way, or "
                               "words of another tensor were handed in")

    def read_tail(self, tail: np.ndarray, rank: int, mark: int, tensor: str, common: str) -> Tail:
        """Find out from the reduced words what Horovod and the other ranks did.

        Args:
            tail: what the allreduce returned of the tail, float64[size - tail_offset].
            rank: this rank's number.
            mark: the fingerprint that this rank sent.
            tensor: the tensor's name, for messages.
            common: what the fingerprint stands for and what to do where it differs, for messages.

        Raises:
            PayloadError: the words are not a scaled sum of what ranks sent, or other ranks sent another fingerprint.
        """
        presence = tail[:self.ranks]
        factor = float(presence[rank])
        present = presence == factor
        if factor == 0 or not np.isfinite(factor) or (presence[~present] != 0).any():
            raise PayloadError(f"tensor {tensor!r}: what came back to rank {rank} is not a sum, or was multiplied by "
                               f"zero: the ranks' presence is {presence.tolist()}; two-bit codes can be summed and "
                               "averaged only, use hvd.Sum or hvd.Average")
        contributors = int(np.count_nonzero(present))
        total = float(tail[self.ranks]) / factor
        if np.rint(total) != contributors * mark:
            raise PayloadError(f"tensor {tensor!r}: the fingerprints of {contributors} ranks add up to {total:.0f}, "
                               f"with that of rank {rank} it would be {contributors} * {mark}: {common}")
        return Tail(factor, contributors, tail[self.ranks + 1:].reshape(self.blocks, self.columns) / factor)


@dataclasses.dataclass(frozen=True)
class Tail:
    """What the tail of reduced words tells.

    Attributes:
        factor: by what Horovod multiplied the sum, in all.
        contributors: number of ranks whose words were added.
        table: sums over ranks, float64[blocks, columns], without the factor.
    """

    factor: float
    contributors: int
    table: np.ndarray

"""What one rank hands to Horovod's allreduce for a bucket: 32-bit integers whose sum over ranks tells everything.

    integers              field
    8 * ranks             headers: at this rank's place the header of its payload, elsewhere zeros
    2 * blocks * ranks    block tables, where levels are adaptive: likewise
    spans                 not finite: 1 where a code 01 is among ``block_elements`` elements, else 0
    16 * … * planes       digits of the codes: see ``kernels.Tallies``

A sum in which all others have zeros is a copy: so headers and tables arrive as an allgather would bring them, and all
that follows from them has the same bits. A rank that has joined (``hvd.join``) contributes zeros to everything, also
where its header would be. A digit cannot be NaN, so that an element that is not finite makes its span NaN.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import payload
from .errors import PayloadError
from .kernels import ELEMENTS_PER_WORD, Tallies, counts_nbytes

_HEADER_INTEGERS = payload.HEADER_NBYTES // 4
_TABLE_INTEGERS = payload.BLOCK_TABLE.itemsize // 4

_NAN_BYTES = {4: np.array([0x88], np.uint8), 8: np.array([0x80], np.uint8), 16: np.array([0x00, 0x80], np.uint8)}
"""By the bits of a count, the bytes of those that stand for NaN."""


@dataclasses.dataclass(frozen=True)
class TallyLayout:
    """Where the parts of a bucket's integers lie.

    Attributes:
        layout: of the bucket's payload.
        tallies: how codes become digits; tells the number of ranks.
        span_elements: elements that become NaN together.
    """

    layout: payload.Layout
    tallies: Tallies
    span_elements: int

    @functools.cached_property
    def _spans(self) -> payload.Layout:
        return payload.Layout(self.layout.runs, self.span_elements)

    @functools.cached_property
    def _ends(self) -> tuple[int, int, int, int]:
        ranks, tallies = self.tallies.ranks, self.tallies
        headers = _HEADER_INTEGERS * ranks
        tables = headers + _TABLE_INTEGERS * self.layout.blocks * ranks
        spans = tables + self._spans.blocks
        return headers, tables, spans, spans + tallies.planes * tallies.integers(self.layout.words)

    @property
    def size(self) -> int:
        """All integers: uint32[size]."""
        return self._ends[-1]

    @property
    def front(self) -> int:
        """Integers before the digits."""
        return self._ends[2]

    @property
    def span_of_word(self) -> np.ndarray:
        """The number of the span to which each word of codes belongs, int64[words]."""
        words_per_span = self.span_elements // ELEMENTS_PER_WORD
        return np.concatenate([np.empty(0, np.int64), *(
            spans.start + np.arange(words.stop - words.start) // words_per_span
            for words, spans in zip(self.layout.run_words, self._spans.run_blocks))])

    # Views of the parts: of arrays, of their beginnings where they hold the part, or of a front end's tensors.

    def headers(self, integers: Any) -> Any:
        """View of the headers, uint32[ranks, 8]."""
        return integers[:self._ends[0]].reshape(self.tallies.ranks, _HEADER_INTEGERS)

    def table_integers(self, integers: Any) -> Any:
        """View of the block tables, uint32[ranks, 2 * blocks]."""
        return integers[self._ends[0]:self._ends[1]].reshape(self.tallies.ranks, _TABLE_INTEGERS * self.layout.blocks)

    def table(self, integers: np.ndarray) -> np.ndarray:
        """View of the block tables, BLOCK_TABLE[ranks, blocks]."""
        flat = integers[self._ends[0]:self._ends[1]].view(payload.BLOCK_TABLE)
        return flat.reshape(self.tallies.ranks, self.layout.blocks)

    def not_finite(self, integers: Any) -> Any:
        """View of how many ranks have a code 01 in each span, uint32[spans]."""
        return integers[self._ends[1]:self._ends[2]]

    def digits(self, integers: Any) -> Any:
        """View of the digits, uint32[planes, ..]."""
        return integers[self._ends[2]:].reshape(self.tallies.planes, -1)

    def mark(self, integers: np.ndarray, codes: np.ndarray) -> None:
        """Tell in which spans a code 01 is: ``codes`` uint8[4 * words]."""
        words = codes.view("<u4")
        found = (words & ~(words >> 1) & 0x55555555) != 0
        for run, spans in zip(self.layout.run_words, self._spans.run_blocks):
            positions = np.flatnonzero(found[run]) * ELEMENTS_PER_WORD // self.span_elements
            self.not_finite(integers)[spans][positions] = 1

    def received(self, integers: np.ndarray, label: str) -> tuple[payload.Received, int]:
        """Headers and tables of the ranks that contributed, checked, and how many these are.

        Raises:
            PayloadError: a rank sent something else than integers of this bucket.
        """
        if integers.size != self.size:
            raise PayloadError(f"{label}: {integers.size} integers arrived, but {self.layout.elements} elements of "
                               f"{self.tallies.ranks} ranks take {self.size}")
        return self.contributed(integers, label)

    def contributed(self, front: np.ndarray, label: str) -> tuple[payload.Received, int]:
        """As ``received``, of the beginning of the integers: ``front`` or more of them."""
        headers, table = self.headers(front).view(np.uint8), self.table(front)
        present = np.flatnonzero(headers.any(axis=1))
        found = {int(rank): payload.parse(headers[rank], self.layout, f"{label}: the payload of rank {rank}")
                 for rank in present}
        if self.layout.block_elements:
            payload.check_table(table, self.layout, label)
        return payload.Received(np.empty((present.size, 0), np.uint8), found, table[present]), present.size

    def spread(self, integers: np.ndarray, bits: int, planes: np.ndarray) -> None:
        """Make counts of so many bits, uint8[planes, ..], NaN in every span in which a rank has a code 01."""
        for start, stop, value in self.not_finite_bytes(integers, bits):
            planes[:, start:stop] = value

    def not_finite_bytes(self, front: np.ndarray, bits: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """Which bytes of a plane of counts belong to spans in which a rank has a code 01: from, to, and what for NaN.

        Args:
            front: the beginning of the integers, ``front`` or more of them.
            bits: of a count.
        """
        flagged = self.not_finite(front) != 0
        if not flagged.any():
            return
        words_per_span = self.span_elements // ELEMENTS_PER_WORD
        for words, spans in zip(self.layout.run_words, self._spans.run_blocks):
            for span in np.flatnonzero(flagged[spans]):
                first = words.start + int(span) * words_per_span
                start = counts_nbytes(first, bits)
                stop = counts_nbytes(min(first + words_per_span, words.stop), bits)
                yield start, stop, np.resize(_NAN_BYTES[bits], stop - start)

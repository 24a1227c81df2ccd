"""Where the runs of a payload lie, on the device: what one launch of the Triton backend for many tensors needs.

Nobody waits for a launch, and gradients have new addresses at every step. So addresses go to the device through pinned
memory, by a copy that is queued before the kernel, and neither memory is written again before the device has passed
both.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import threading
from collections.abc import Sequence

import numpy as np
import torch

from . import ELEMENTS_PER_WORD, SUM_CHUNK_ELEMENTS, block_count, packed_nbytes

SPAN_ROWS = 16
"""Rows of a program that quantizes."""

SPAN_WORDS = 256
"""Words of a program that unpacks."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a run: a row is a chunk that ``selected_sum`` adds in lanes, so it ends where its block ends.

    Attributes:
        elements: of the run.
        block_elements: elements of a block; 0: the run is one block.
    """

    elements: int
    block_elements: int

    @functools.cached_property
    def one_block(self) -> bool:
        """Whether the run is one block."""
        return self.block_elements == 0 or self.elements <= self.block_elements

    @functools.cached_property
    def blocks(self) -> int:
        """Blocks of the run, at least one."""
        return 1 if self.one_block else block_count(self.elements, self.block_elements)

    @functools.cached_property
    def per_block(self) -> int:
        """Rows of every block but the last, which may have fewer; at least one."""
        return max(1, -(-(self.elements if self.one_block else self.block_elements) // SUM_CHUNK_ELEMENTS))

    @functools.cached_property
    def total(self) -> int:
        """Rows of the run, at least one."""
        last = self.elements - (self.blocks - 1) * self.block_elements
        return (self.blocks - 1) * self.per_block + max(1, -(-last // SUM_CHUNK_ELEMENTS))


@functools.lru_cache(maxsize=4096)
def rows_of(elements: int, block_elements: int) -> Rows:
    """The rows of a run, which are worked out once for all steps."""
    return Rows(elements, block_elements)


class Runs:
    """Where the runs of a payload lie: their words and blocks are consecutive, as in ``payload.Layout``.

    Made once for a bucket; any thread and stream may use it.

    Attributes:
        elements: of each run.
        block_elements: elements of a block; 0: every run is one block.
        words: 32-bit words of codes of all runs.
        blocks: of all runs.
        rows: of all runs, see ``Rows``.
        device: of the tensors.
        table: i64[runs, 4]: elements of each run; words, blocks and rows before it.
        row_programs, word_programs: i64[programs, 2]: which run, and which span of it, a program takes that quantizes
            ``SPAN_ROWS`` rows or unpacks ``SPAN_WORDS`` words.
        first_rows: i64[blocks + 1]: the first row of each block, and the number of rows.
    """

    def __init__(self, elements: Sequence[int], block_elements: int, device: torch.device | str) -> None:
        """Lay out runs of so many elements, 0 or more.

        Raises:
            ValueError: no run can have so many elements, or no block.
        """
        if block_elements < 0 or block_elements % ELEMENTS_PER_WORD:
            raise ValueError(f"block_elements must be 0 or a multiple of {ELEMENTS_PER_WORD}, not {block_elements}")
        if min(elements, default=0) < 0:
            raise ValueError(f"a run cannot have {min(elements)} elements")
        self.elements = tuple(elements)
        self.block_elements = block_elements
        self.device = torch.empty(0, device=device).device  # with its index
        each = [rows_of(of_run, block_elements) for of_run in self.elements]
        words = np.array([packed_nbytes(of_run) // 4 for of_run in self.elements], np.int64)
        blocks = np.array([rows.blocks for rows in each], np.int64)
        rows = np.array([rows.total for rows in each], np.int64)
        self.words, self.blocks, self.rows = int(words.sum()), int(blocks.sum()), int(rows.sum())
        before = [np.cumsum(counts) - counts for counts in (words, blocks, rows)]
        self.table = self._on_device(np.column_stack([np.array(self.elements, np.int64), *before]))
        self.row_programs = self._on_device(_spans(rows, SPAN_ROWS))
        self.word_programs = self._on_device(_spans(words, SPAN_WORDS))
        first_rows = [first + np.arange(of_run.blocks) * of_run.per_block for first, of_run in zip(before[2], each)]
        self.first_rows = self._on_device(np.concatenate([*first_rows, [self.rows]]).astype(np.int64))
        self._lock = threading.Lock()
        self._addresses: list[Addresses] = []

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def addresses(self, *tensors: Sequence[torch.Tensor]) -> Addresses:
        """The addresses of the tensors of all runs, for launches on the current stream until ``Addresses.release``."""
        wanted = [address for of_runs in tensors for address in map(torch.Tensor.data_ptr, of_runs)]
        if self.device.type != "cuda":
            return Addresses(wanted, self.device)
        with self._lock:
            for addresses in self._addresses:
                if addresses.acquire(wanted):
                    return addresses
            self._addresses.append(Addresses(wanted, self.device))
            return self._addresses[-1]


class Addresses:
    """A table of addresses on the device, and the pinned memory that they came from.

    Attributes:
        table: i64[n] on the device.
        aligned: whether all are multiples of 16.
    """

    def __init__(self, addresses: list[int], device: torch.device) -> None:
        """Upload addresses on the current stream."""
        self._used = True
        self.aligned = _are_aligned(addresses)
        self._event: torch.cuda.Event | None = None
        if device.type != "cuda":
            self.table = torch.tensor(addresses, dtype=torch.int64, device=device)
            return
        self._event = torch.cuda.Event()
        self._pinned = torch.empty(len(addresses), dtype=torch.int64, pin_memory=True)
        self._on_host = self._pinned.numpy()
        self.table = torch.empty(len(addresses), dtype=torch.int64, device=device)
        self._upload(addresses)

    def _upload(self, addresses: list[int]) -> None:
        self.aligned = _are_aligned(addresses)
        self._on_host[:] = addresses
        self.table.copy_(self._pinned, non_blocking=True)

    def acquire(self, addresses: list[int]) -> bool:
        """Upload others, unless what used the ones before is not over, or not even launched."""
        if self._used or len(addresses) != len(self.table) or self._event is None or not self._event.query():
            return False
        self._used = True
        self._upload(addresses)
        return True

    def release(self) -> None:
        """Tell that all that reads the addresses has been launched on the current stream."""
        if self._event is not None:
            self._event.record()
            self._used = False


def _are_aligned(addresses: list[int]) -> bool:
    return functools.reduce(operator.or_, addresses, 0) % 16 == 0


def _spans(lengths: np.ndarray, span: int) -> np.ndarray:
    """Run and number of each span, i64[spans, 2], of runs that are so long."""
    spans = -(-lengths // span)
    run = np.repeat(np.arange(lengths.size), spans)
    return np.column_stack([run, np.arange(run.size) - np.repeat(np.cumsum(spans) - spans, spans)])

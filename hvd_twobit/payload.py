"""The bytes that ranks send each other: layout, writing, and the checks of a receiver.

A payload is what one rank sends of one or several runs of elements, each from one tensor. It is little-endian and
padded to a multiple of 16 bytes:

    offset  bytes  field
         0      4  magic            b"2BIT"
         4      1  version          1
         5      1  flags            0 (no flag is defined in this version)
         6      2  reserved         0
         8      8  element_count    elements of all runs
        16      4  block_elements   elements that share an adaptive level; 0: the levels are fixed, for all elements
        20      4  positive_level   float32, > 0: what code 11 stands for; 0 where levels are adaptive
        24      4  negative_level   float32, < 0: what code 10 stands for; 0 where levels are adaptive
        28      4  levels_checksum  CRC-32 of the float32 levels of the whole bucket; 0 where levels are fixed
        32      …  block table      where levels are adaptive, 8 bytes per block, run after run, padded to a multiple
                                    of 16: selected_sum float32, selected_count uint32 (see levels)
         …      …  packed codes     4 * ceil(n / 16) bytes for a run of n elements, run after run; see kernels
         …      …  padding          0

Adaptive levels are not sent: ranks compute them from the tables of all. Their checksum tells whether all did.

A rank that sums a chunk for all others sends them these sums:

         0      4  magic            b"2SUM"
         4      1  version          1
         5      1  form             counts of 4, 8 or 16 bits; 32: float32 sums, where levels differ between ranks
         6      1  planes           of counts: 1, or 2 where levels are not symmetrical; of float32 sums 1
         7      1  reserved         0
         8      8  element_count    elements of all runs
        16      4  block_elements   as above
        20      4  positive_level   float32, > 0: what a code 11 stands for; 0 where levels are adaptive or differ
        24      4  negative_level   float32, < 0: what a code 10 stands for; 0 where levels are adaptive or differ
        28      4  reserved         0
        32      …  next levels      where levels are adaptive, float32 per block, padded to a multiple of 16
         …      …  planes           each for whole words of 16 elements, see kernels.pack_counts
         …      …  padding          0

Headers are written in place, like tables and codes, so that a step allocates nothing here. A receiver trusts no byte:
``split`` and ``split_sums`` find the payloads in what a collective returned, and raise an error that names the tensor,
the rank and the field.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .errors import PayloadError
from .kernels import COUNT_BITS, block_count, counts_nbytes, packed_nbytes

MAGIC = b"2BIT"
VERSION = 1
ALIGNMENT = 16
_HEADER = struct.Struct("<4sBBHQIffI")
HEADER_NBYTES = _HEADER.size

SUMS_MAGIC = b"2SUM"
_SUMS_HEADER = struct.Struct("<4sBBBBQIffI")
FLOAT32_SUMS = 32
"""The form of sums that no count can tell: levels differ between ranks."""

BLOCK_TABLE = np.dtype([("selected_sum", "<f4"), ("selected_count", "<u4")])
"""One entry of the block table."""


@dataclasses.dataclass(frozen=True)
class Header:
    """What a payload says of itself.

    Attributes:
        element_count: elements of all runs.
        positive_level: float32 value of code 11; 0 where levels are adaptive.
        negative_level: float32 value of code 10; 0 where levels are adaptive.
        block_elements: elements that share an adaptive level; 0 where levels are fixed.
        levels_checksum: CRC-32 of the adaptive levels; 0 where levels are fixed.
    """

    element_count: int
    positive_level: float = 0.0
    negative_level: float = 0.0
    block_elements: int = 0
    levels_checksum: int = 0

    def pack(self) -> bytes:
        """The 32 bytes of this header."""
        return _HEADER.pack(MAGIC, VERSION, 0, 0, self.element_count, self.block_elements, self.positive_level,
                            self.negative_level, self.levels_checksum)


@dataclasses.dataclass(frozen=True)
class SumsHeader:
    """What a payload of sums says of itself.

    Attributes:
        form: bits of a count, or FLOAT32_SUMS.
        planes: 1 or 2 of counts, 1 of float32 sums.
        element_count: elements of all runs.
        positive_level: float32 value of code 11; 0 where levels are adaptive, or sums float32.
        negative_level: float32 value of code 10; 0 likewise.
        block_elements: elements that share an adaptive level; 0 where levels are fixed.
    """

    form: int
    planes: int
    element_count: int
    positive_level: float = 0.0
    negative_level: float = 0.0
    block_elements: int = 0

    def pack(self) -> bytes:
        """The 32 bytes of this header."""
        return _SUMS_HEADER.pack(SUMS_MAGIC, VERSION, self.form, self.planes, 0, self.element_count,
                                 self.block_elements, self.positive_level, self.negative_level, 0)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the parts of a payload lie.

    Attributes:
        runs: elements of each run.
        block_elements: elements that share an adaptive level; 0 where levels are fixed.
    """

    runs: tuple[int, ...]
    block_elements: int = 0

    @functools.cached_property
    def elements(self) -> int:
        """Elements of all runs."""
        return sum(self.runs)

    @functools.cached_property
    def run_words(self) -> tuple[slice, ...]:
        """Which words of codes are those of each run."""
        return _consecutive([packed_nbytes(elements) // 4 for elements in self.runs])

    @functools.cached_property
    def run_blocks(self) -> tuple[slice, ...]:
        """Which entries of the block table are those of each run."""
        return _consecutive([block_count(elements, self.block_elements) if self.block_elements else 0
                             for elements in self.runs])

    @property
    def block_sizes(self) -> np.ndarray:
        """Elements of each block, int64[blocks]: the last one of a run may be shorter. Not kept: made in no time."""
        sizes = np.full(self.blocks, self.block_elements, np.int64)
        for elements, blocks in zip(self.runs, self.run_blocks):
            if blocks.stop > blocks.start:
                sizes[blocks.stop - 1] = elements - (blocks.stop - blocks.start - 1) * self.block_elements
        return sizes

    @property
    def words(self) -> int:
        """Words of codes, of 16 elements each."""
        return self.run_words[-1].stop if self.runs else 0

    @property
    def blocks(self) -> int:
        """Entries of the block table."""
        return self.run_blocks[-1].stop if self.runs else 0

    @property
    def codes_offset(self) -> int:
        """Bytes before the packed codes."""
        return HEADER_NBYTES + _padded(BLOCK_TABLE.itemsize * self.blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of the payload, padding included."""
        return _padded(self.codes_offset + 4 * self.words)

    def new(self) -> np.ndarray:
        """A payload without content: uint8[nbytes], its padding cleared."""
        return np.zeros(self.nbytes, np.uint8)

    def codes(self, payloads: Any) -> Any:
        """View of the packed codes, the last axis of ``payloads`` (also a tensor) being one or several payloads."""
        return payloads[..., self.codes_offset:self.codes_offset + 4 * self.words]

    def table(self, payloads: np.ndarray) -> np.ndarray:
        """View of the block table, BLOCK_TABLE[..., blocks]."""
        return np.asarray(self.table_bytes(payloads)).view(BLOCK_TABLE)

    def table_bytes(self, payloads: Any) -> Any:
        """View of the bytes of the block table, as ``codes``."""
        return payloads[..., HEADER_NBYTES:HEADER_NBYTES + BLOCK_TABLE.itemsize * self.blocks]

    def new_sums(self, header: SumsHeader) -> Sums:
        """Sums without content, behind their header, in memory of their own."""
        memory = np.zeros(self.sums_nbytes(header), np.uint8)
        memory[:HEADER_NBYTES] = np.frombuffer(header.pack(), np.uint8)
        return self.sums(memory, header)

    def counts_header(self, bits: int, planes: int, header: Header) -> SumsHeader:
        """The header of counts of codes that stand for what a payload's header says."""
        return SumsHeader(bits, planes, self.elements, header.positive_level, header.negative_level,
                          self.block_elements)

    def sums(self, memory: np.ndarray, header: SumsHeader) -> Sums:
        """Views of the parts of sums in the memory that holds them."""
        return Sums(header, memory, memory[HEADER_NBYTES:HEADER_NBYTES + 4 * self.blocks].view("<f4"),
                    self.sum_planes(memory, header))

    @property
    def sums_offset(self) -> int:
        """Bytes of sums before their planes."""
        return HEADER_NBYTES + _padded(4 * self.blocks)

    def sum_planes(self, memory: Any, header: SumsHeader) -> Any:
        """View of the planes, uint8[planes, ..], in the memory that holds sums: an array or a tensor of a front end."""
        width = counts_nbytes(self.words, header.form)
        return memory[self.sums_offset:self.sums_offset + header.planes * width].reshape(header.planes, width)

    def sums_nbytes(self, header: SumsHeader) -> int:
        """Bytes of sums, padding included."""
        return _padded(self.sums_offset + header.planes * counts_nbytes(self.words, header.form))


@dataclasses.dataclass(frozen=True)
class Received:
    """What all ranks sent, as views of the bytes that arrived.

    Attributes:
        codes: packed codes, uint8[ranks, 4 * words]; rows lie apart. Of a front end's kind where they are on a device.
        headers: by rank, in rank order.
        table: block tables, BLOCK_TABLE[ranks, blocks]; without blocks where levels are fixed.
    """

    codes: Any
    headers: dict[int, Header]
    table: np.ndarray


@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums of one chunk, as views of the bytes that hold them.

    Attributes:
        header: see ``SumsHeader``.
        memory: all bytes, uint8.
        next_levels: float32[blocks], of the next exchange; without blocks where levels are fixed.
        planes: uint8[planes, bytes of whole words]: counts, or float32 sums. Of a front end's kind where they are on a
            device.
    """

    header: SumsHeader
    memory: np.ndarray
    next_levels: np.ndarray
    planes: Any


def split(gathered: np.ndarray, ranks: int, layout: Layout, label: str) -> Received:
    """Find and check every rank's payload in what an allgather, or an alltoall, returned.

    Args:
        gathered: uint8[ranks * layout.nbytes], the payloads in rank order; any other length is an error.
        ranks: number of ranks that sent one.
        layout: that of the payload on this rank.
        label: what messages call it, for example ``tensor 'w'``.

    Raises:
        PayloadError: the first payload that is not such a one, by rank and field.
    """
    check_length(gathered.size, ranks, layout, label, lambda: gathered)
    payloads = gathered.reshape(ranks, layout.nbytes)
    return checked(payloads, layout.codes(payloads), layout, label)


def check_length(nbytes: int, ranks: int, layout: Layout, label: str, gathered: Callable[[], np.ndarray]) -> None:
    """Raise PayloadError unless so many bytes are the payloads of all ranks; ``gathered`` returns them for a look."""
    if nbytes != ranks * layout.nbytes:
        raise _wrong_length(gathered(), ranks, layout, label)


def checked(fronts: np.ndarray, codes: Any, layout: Layout, label: str) -> Received:
    """Check what precedes the codes in the payload of every rank.

    Args:
        fronts: uint8[ranks, layout.codes_offset or more], in rank order.
        codes: what lies behind, wherever that is; not looked at.
        layout: that of the payload on this rank.
        label: what messages call it.

    Raises:
        PayloadError: the first payload that is not such a one, by rank and field.
    """
    headers = {rank: parse(front, layout, f"{label}: the payload of rank {rank}") for rank, front in enumerate(fronts)}
    table = layout.table(fronts)
    if layout.block_elements:
        check_table(table, layout, label)
    return Received(codes, headers, table)


def split_sums(gathered: np.ndarray, layouts: Sequence[Layout], label: str) -> list[Sums]:
    """Find and check the sums of every chunk in what an allgather returned.

    Args:
        gathered: uint8, the sums of all chunks in rank order; each rank summed one.
        layouts: of the chunks, as on this rank.
        label: what messages call them.

    Raises:
        PayloadError: the first that are not such sums, by rank and field.
    """
    found: list[Sums] = []
    offset = 0
    for rank, layout in enumerate(layouts):
        whose = _summed_by(rank, label)
        header = _parse_sums(gathered[offset:], layout, whose)
        if found:
            _check_alike(header, found[0].header, whose)
        nbytes = layout.sums_nbytes(header)
        if gathered.size - offset < nbytes:
            raise PayloadError(f"{whose} has {gathered.size - offset} bytes left of the {gathered.size} that arrived, "
                               f"but takes {nbytes}: bytes are damaged")
        sums = layout.sums(gathered[offset:offset + nbytes], header)
        _check_next_levels(sums.next_levels, whose)
        found.append(sums)
        offset += nbytes
    if offset != gathered.size:
        raise PayloadError(f"{label}: {gathered.size} bytes arrived, but what {len(layouts)} ranks have summed takes "
                           f"{offset}: bytes are damaged")
    return found


def checked_sums(fronts: Sequence[np.ndarray], layouts: Sequence[Layout], label: str, own: SumsHeader) -> list[Sums]:
    """Check what precedes the planes in the sums of every chunk; the planes are elsewhere, and none in the result.

    Args:
        fronts: of every chunk uint8[layout.sums_offset], in rank order.
        layouts: of the chunks.
        label: what messages call them.
        own: the header of what this rank has summed, whose form those of all have.

    Raises:
        PayloadError: the first that are not such sums, by rank and field.
    """
    found: list[Sums] = []
    for rank, (front, layout) in enumerate(zip(fronts, layouts)):
        whose = _summed_by(rank, label)
        header = _parse_sums(front, layout, whose)
        _check_alike(header, own if rank == 0 else found[0].header, whose)
        next_levels = front[HEADER_NBYTES:HEADER_NBYTES + 4 * layout.blocks].view("<f4")
        _check_next_levels(next_levels, whose)
        found.append(Sums(header, front, next_levels, np.empty((header.planes, 0), np.uint8)))
    return found


def _summed_by(rank: int, label: str) -> str:
    return f"{label}: what rank {rank} has summed"


def _check_alike(header: SumsHeader, first: SumsHeader, whose: str) -> None:
    for name in ("form", "planes", "positive_level", "negative_level"):
        if getattr(header, name) != getattr(first, name):
            raise PayloadError(f"{whose} has {name} {getattr(header, name)}, what rank 0 has summed has "
                               f"{getattr(first, name)}: bytes are damaged")


def _check_next_levels(levels: np.ndarray, whose: str) -> None:
    usable = np.isfinite(levels) & (levels > 0)
    if not usable.all():
        raise PayloadError(f"{whose} has a next level of {levels[~usable][0]!r} in block {np.argmin(usable)}, which "
                           "is not a finite number above zero: bytes are damaged")


def _consecutive(lengths: Sequence[int]) -> tuple[slice, ...]:
    """Slices of these lengths, one behind the other."""
    slices, start = [], 0
    for length in lengths:
        slices.append(slice(start, start + length))
        start += length
    return tuple(slices)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def parse(payload: np.ndarray, layout: Layout, whose: str) -> Header:
    """The header of a payload of this layout, checked; ``whose`` begins messages.

    Raises:
        PayloadError: a field is wrong.
    """
    fields = _HEADER.unpack(payload[:HEADER_NBYTES].tobytes())
    magic, version, flags, reserved, count, block_elements, positive, negative, checksum = fields
    _check_beginning(whose, magic, MAGIC, version)
    if count != layout.elements:
        raise PayloadError(f"{whose} has an element_count of {count}, on this rank the tensor has {layout.elements} "
                           "elements: build the same model on every rank")
    if flags or reserved:
        raise PayloadError(f"{whose} has flags {flags:#x} and a reserved field {reserved:#x}, where version {VERSION} "
                           "has zeros: bytes are damaged")
    _check_blocks(whose, block_elements, layout)
    if block_elements:
        if positive or negative:
            raise PayloadError(f"{whose} has levels {positive!r} and {negative!r} in its header, where adaptive levels "
                               "have zeros: bytes are damaged")
        return Header(count, block_elements=block_elements, levels_checksum=checksum)
    if not (positive > 0 and math.isfinite(positive)):
        raise PayloadError(f"{whose} has a positive_level of {positive!r}, which is not a finite number above zero")
    if not (negative < 0 and math.isfinite(negative)):
        raise PayloadError(f"{whose} has a negative_level of {negative!r}, which is not a finite number below zero")
    if checksum:
        raise PayloadError(f"{whose} has a levels_checksum of {checksum:#x}, where fixed levels have zero: bytes are "
                           "damaged")
    return Header(count, positive, negative)


def _check_beginning(whose: str, magic: bytes, expected: bytes, version: int) -> None:
    if magic != expected:
        raise PayloadError(f"{whose} begins with {magic!r} instead of {expected!r}: it was not sent by hvd_twobit")
    if version != VERSION:
        raise PayloadError(f"{whose} has version {version}, this rank reads version {VERSION}: "
                           "install the same hvd_twobit on every rank")


def _check_blocks(whose: str, block_elements: int, layout: Layout) -> None:
    if block_elements != layout.block_elements:
        raise PayloadError(f"{whose} has block_elements {block_elements}, this rank's has {layout.block_elements} "
                           "(0 stands for a fixed threshold): give TwoBit the same arguments on every rank")


def _parse_sums(content: np.ndarray, layout: Layout, whose: str) -> SumsHeader:
    if content.size < HEADER_NBYTES:
        raise PayloadError(f"{whose} has {content.size} bytes left of those that arrived, fewer than a header of "
                           f"{HEADER_NBYTES}")
    fields = _SUMS_HEADER.unpack(content[:HEADER_NBYTES].tobytes())
    magic, version, form, planes, reserved, count, block_elements, positive, negative, reserved_too = fields
    _check_beginning(whose, magic, SUMS_MAGIC, version)
    if form not in (*COUNT_BITS, FLOAT32_SUMS) or planes not in (1, 2) or (form == FLOAT32_SUMS and planes != 1):
        raise PayloadError(f"{whose} has form {form} and {planes} planes, which there is not: bytes are damaged")
    if reserved or reserved_too:
        raise PayloadError(f"{whose} has reserved fields {reserved:#x} and {reserved_too:#x}, where version {VERSION} "
                           "has zeros: bytes are damaged")
    if count != layout.elements:
        raise PayloadError(f"{whose} has an element_count of {count}, on this rank it has {layout.elements} elements: "
                           "build the same model on every rank")
    _check_blocks(whose, block_elements, layout)
    if block_elements or form == FLOAT32_SUMS:
        if positive or negative:
            raise PayloadError(f"{whose} has levels {positive!r} and {negative!r} in its header, where adaptive levels "
                               "and float32 sums have zeros: bytes are damaged")
    elif not (positive > 0 > negative and math.isfinite(positive) and math.isfinite(negative)):
        raise PayloadError(f"{whose} has levels {positive!r} and {negative!r}, which are not a finite number above and "
                           "one below zero")
    return SumsHeader(form, planes, count, positive, negative, block_elements)


def check_table(table: np.ndarray, layout: Layout, label: str) -> None:
    """Check the block tables of all ranks, BLOCK_TABLE[ranks, blocks].

    Raises:
        PayloadError: an entry cannot be right.
    """
    sums, counts = table["selected_sum"], table["selected_count"]
    bad = ~((sums >= 0) & (sums <= np.finfo(np.float32).max) & (counts <= layout.block_elements))
    if bad.any():
        rank, block = np.argwhere(bad)[0]
        raise PayloadError(f"{label}: the payload of rank {rank} has a block table that says of block "
                           f"{block} a selected_sum of {sums[rank, block]} over {counts[rank, block]} elements: not "
                           "possible, bytes are damaged")


def _wrong_length(gathered: np.ndarray, ranks: int, layout: Layout, label: str) -> PayloadError:
    """The error for a gathered buffer of the wrong length: walk the headers to name the rank that differs."""
    offset = 0
    for rank in range(ranks):
        whose = f"{label}: the payload of rank {rank}"
        if gathered.size - offset < HEADER_NBYTES:
            return PayloadError(f"{whose} has {gathered.size - offset} bytes left of the {gathered.size} that arrived, "
                                f"fewer than a header of {HEADER_NBYTES}")
        try:
            parse(gathered[offset:offset + HEADER_NBYTES], layout, whose)
        except PayloadError as error:
            return error
        offset += layout.nbytes
    return PayloadError(f"{label}: {gathered.size} bytes arrived from {ranks} ranks, but {layout.elements} "
                        f"elements take {layout.nbytes} bytes per rank: the bytes are damaged")

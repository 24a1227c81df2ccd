"""The bytes that one rank sends for one tensor: layout, writing, and the checks of a receiver.

A payload is little-endian and padded to a multiple of 16 bytes:

    offset  bytes  field
         0      4  magic            b"2BIT"
         4      1  version          1
         5      1  flags            0 (no flag is defined in this version)
         6      2  reserved         0
         8      8  element_count    elements of the tensor
        16      4  block_elements   elements that share an adaptive level; 0: the levels are fixed, for all elements
        20      4  positive_level   float32, > 0: what code 11 stands for; 0 where levels are adaptive
        24      4  negative_level   float32, < 0: what code 10 stands for; 0 where levels are adaptive
        28      4  levels_checksum  CRC-32 of the float32 levels that the codes stand for; 0 where levels are fixed
        32      …  block table      where levels are adaptive, 8 bytes per block, padded to a multiple of 16:
                                    selected_sum float32, selected_count uint32 (see levels)
         …      …  packed codes     4 * ceil(element_count / 16) bytes, see kernels
         …      …  padding          0

Adaptive levels are not sent: every rank computes them from the tables of all. Their checksum tells whether all did.

The header is written in place, like table and codes, so that a step allocates nothing here. A receiver trusts no byte:
``split`` finds each rank's payload in what an allgather returned and raises an error that names the tensor, the rank
and the field.
"""

from __future__ import annotations

import dataclasses
import math
import struct

import numpy as np

from .errors import PayloadError
from .kernels import block_count, packed_nbytes

MAGIC = b"2BIT"
VERSION = 1
ALIGNMENT = 16
_HEADER = struct.Struct("<4sBBHQIffI")
HEADER_NBYTES = _HEADER.size

BLOCK_TABLE = np.dtype([("selected_sum", "<f4"), ("selected_count", "<u4")])
"""One entry of the block table."""


@dataclasses.dataclass(frozen=True)
class Header:
    """What a payload says of itself.

    Attributes:
        element_count: elements of the tensor.
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
class Layout:
    """Where the parts of a tensor's payload lie.

    Attributes:
        elements: elements of the tensor.
        block_elements: elements that share an adaptive level; 0 where levels are fixed.
    """

    elements: int
    block_elements: int = 0

    @property
    def blocks(self) -> int:
        """Entries of the block table."""
        return block_count(self.elements, self.block_elements) if self.block_elements else 0

    @property
    def codes_offset(self) -> int:
        """Bytes before the packed codes."""
        return HEADER_NBYTES + _padded(BLOCK_TABLE.itemsize * self.blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of the payload, padding included."""
        return _padded(self.codes_offset + packed_nbytes(self.elements))

    def new(self) -> np.ndarray:
        """A payload without content: uint8[nbytes], its padding cleared."""
        return np.zeros(self.nbytes, np.uint8)

    def codes(self, payloads: np.ndarray) -> np.ndarray:
        """View of the packed codes, the last axis of ``payloads`` being one or several payloads' bytes."""
        return payloads[..., self.codes_offset:self.codes_offset + packed_nbytes(self.elements)]

    def table(self, payloads: np.ndarray) -> np.ndarray:
        """View of the block table, BLOCK_TABLE[..., blocks]."""
        end = HEADER_NBYTES + BLOCK_TABLE.itemsize * self.blocks
        return payloads[..., HEADER_NBYTES:end].view(BLOCK_TABLE)

    def write_header(self, payload: np.ndarray, header: Header) -> None:
        """Write ``header`` at the beginning of ``payload``."""
        payload[:HEADER_NBYTES] = np.frombuffer(header.pack(), np.uint8)


@dataclasses.dataclass(frozen=True)
class Received:
    """What all ranks sent of one tensor, as views of the bytes that arrived.

    Attributes:
        codes: packed codes, uint8[ranks, 4 * ceil(elements / 16)]; rows lie apart.
        headers: in rank order.
        table: block tables, BLOCK_TABLE[ranks, blocks]; without blocks where levels are fixed.
    """

    codes: np.ndarray
    headers: list[Header]
    table: np.ndarray


def split(gathered: np.ndarray, ranks: int, layout: Layout, tensor: str) -> Received:
    """Find and check every rank's payload in what an allgather returned.

    Args:
        gathered: uint8[ranks * layout.nbytes], the payloads in rank order; any other length is an error.
        ranks: number of ranks that sent one.
        layout: that of the tensor on this rank.
        tensor: its name, for messages.

    Raises:
        PayloadError: the first payload that is not one of this tensor, by rank and field.
    """
    if gathered.size != ranks * layout.nbytes:
        raise _wrong_length(gathered, ranks, layout, tensor)
    payloads = gathered.reshape(ranks, layout.nbytes)
    headers = [_parse(payloads[rank], layout, f"tensor {tensor!r}: the payload of rank {rank}")
               for rank in range(ranks)]
    table = layout.table(payloads)
    if layout.block_elements:
        _check_table(table, layout, tensor)
    return Received(layout.codes(payloads), headers, table)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _parse(payload: np.ndarray, layout: Layout, whose: str) -> Header:
    fields = _HEADER.unpack(payload[:HEADER_NBYTES].tobytes())
    magic, version, flags, reserved, count, block_elements, positive, negative, checksum = fields
    if magic != MAGIC:
        raise PayloadError(f"{whose} begins with {magic!r} instead of {MAGIC!r}: it was not sent by hvd_twobit")
    if version != VERSION:
        raise PayloadError(f"{whose} has version {version}, this rank reads version {VERSION}: "
                           "install the same hvd_twobit on every rank")
    if count != layout.elements:
        raise PayloadError(f"{whose} has an element_count of {count}, on this rank the tensor has {layout.elements} "
                           "elements: build the same model on every rank")
    if flags or reserved:
        raise PayloadError(f"{whose} has flags {flags:#x} and a reserved field {reserved:#x}, where version {VERSION} "
                           "has zeros: bytes are damaged")
    if block_elements != layout.block_elements:
        raise PayloadError(f"{whose} has block_elements {block_elements}, this rank's has {layout.block_elements} "
                           "(0 stands for a fixed threshold): give TwoBit the same arguments on every rank")
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


def _check_table(table: np.ndarray, layout: Layout, tensor: str) -> None:
    sums, counts = table["selected_sum"], table["selected_count"]
    bad = ~((sums >= 0) & (sums <= np.finfo(np.float32).max) & (counts <= layout.block_elements))
    if bad.any():
        rank, block = np.argwhere(bad)[0]
        raise PayloadError(f"tensor {tensor!r}: the payload of rank {rank} has a block table that says of block "
                           f"{block} a selected_sum of {sums[rank, block]} over {counts[rank, block]} elements: not "
                           "possible, bytes are damaged")


def _wrong_length(gathered: np.ndarray, ranks: int, layout: Layout, tensor: str) -> PayloadError:
    """The error for a gathered buffer of the wrong length: walk the headers to name the rank that differs."""
    offset = 0
    for rank in range(ranks):
        whose = f"tensor {tensor!r}: the payload of rank {rank}"
        if gathered.size - offset < HEADER_NBYTES:
            return PayloadError(f"{whose} has {gathered.size - offset} bytes left of the {gathered.size} that arrived, "
                                f"fewer than a header of {HEADER_NBYTES}")
        try:
            _parse(gathered[offset:offset + HEADER_NBYTES], layout, whose)
        except PayloadError as error:
            return error
        offset += layout.nbytes
    return PayloadError(f"tensor {tensor!r}: {gathered.size} bytes arrived from {ranks} ranks, but {layout.elements} "
                        f"elements take {layout.nbytes} bytes per rank: the bytes are damaged")

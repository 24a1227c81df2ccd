"""The bytes that one rank sends for one tensor: layout, writing, and the checks of a receiver.

A payload is little-endian and padded to a multiple of 16 bytes:

    offset  bytes  field
         0      4  magic            b"2BIT"
         4      1  version          1
         5      1  flags            0 (no flag is defined in this version)
         6      2  reserved         0
         8      8  element_count    elements of the tensor
        16      4  block_elements   elements that share a level; 0: all of them
        20      4  positive_level   float32, > 0: what code 11 stands for
        24      4  negative_level   float32, < 0: what code 10 stands for
        28      4  reserved         0
        32      …  packed codes     4 * ceil(element_count / 16) bytes, see kernels
         …      …  padding          0

The header is written once per tensor and the codes in place, so that a step allocates nothing here. A receiver
trusts no byte: ``split`` finds each rank's payload in what an allgather returned and raises an error that names the
tensor, the rank and the field.
"""

from __future__ import annotations

import dataclasses
import math
import struct

import numpy as np

from .errors import PayloadError
from .kernels import packed_nbytes

MAGIC = b"2BIT"
VERSION = 1
ALIGNMENT = 16
_HEADER = struct.Struct("<4sBBHQIffI")
HEADER_NBYTES = _HEADER.size


@dataclasses.dataclass(frozen=True)
class Header:
    """What a payload says of itself.

    Attributes:
        element_count: elements of the tensor.
        positive_level: float32 value of code 11.
        negative_level: float32 value of code 10.
    """

    element_count: int
    positive_level: float
    negative_level: float

    def pack(self) -> bytes:
        """The 32 bytes of this header."""
        return _HEADER.pack(MAGIC, VERSION, 0, 0, self.element_count, 0, self.positive_level, self.negative_level, 0)


def payload_nbytes(elements: int) -> int:
    """Bytes of the payload of a tensor of so many elements, header and padding included."""
    return -(-(HEADER_NBYTES + packed_nbytes(elements)) // ALIGNMENT) * ALIGNMENT


def write_header(payload: np.ndarray, header: Header) -> None:
    """Write ``header`` into ``payload``, uint8[payload_nbytes(element_count)], and clear the padding at its end."""
    payload[:HEADER_NBYTES] = np.frombuffer(header.pack(), np.uint8)
    payload[HEADER_NBYTES + packed_nbytes(header.element_count):] = 0


def codes_of(payload: np.ndarray, elements: int) -> np.ndarray:
    """View of the packed codes, the last axis of ``payload`` being one or several payloads' bytes."""
    return payload[..., HEADER_NBYTES:HEADER_NBYTES + packed_nbytes(elements)]


def split(gathered: np.ndarray, ranks: int, elements: int, tensor: str) -> tuple[np.ndarray, list[Header]]:
    """Find and check every rank's payload in what an allgather returned.

    Args:
        gathered: uint8[ranks * payload_nbytes(elements)], the payloads in rank order; any other length is an error.
        ranks: number of ranks that sent one.
        elements: elements of the tensor on this rank.
        tensor: its name, for messages.

    Returns:
        The packed codes, uint8[ranks, 4 * ceil(elements / 16)], as a view, and the headers in rank order.

    Raises:
        PayloadError: the first payload that is not one of this tensor, by rank and field.
    """
    size = payload_nbytes(elements)
    if gathered.size != ranks * size:
        raise _wrong_length(gathered, ranks, elements, tensor)
    payloads = gathered.reshape(ranks, size)
    headers = [_parse(payloads[rank], elements, f"tensor {tensor!r}: the payload of rank {rank}")
               for rank in range(ranks)]
    return codes_of(payloads, elements), headers


def _parse(payload: np.ndarray, elements: int, whose: str) -> Header:
    fields = _HEADER.unpack(payload[:HEADER_NBYTES].tobytes())
    magic, version, flags, reserved, count, block_elements, positive, negative, reserved_end = fields
    if magic != MAGIC:
        raise PayloadError(f"{whose} begins with {magic!r} instead of {MAGIC!r}: it was not sent by hvd_twobit")
    if version != VERSION:
        raise PayloadError(f"{whose} has version {version}, this rank reads version {VERSION}: "
                           "install the same hvd_twobit on every rank")
    if count != elements:
        raise PayloadError(f"{whose} has an element_count of {count}, on this rank the tensor has {elements} elements: "
                           "build the same model on every rank")
    if flags or reserved or block_elements or reserved_end:
        raise PayloadError(f"{whose} has flags {flags:#x}, block_elements {block_elements} and reserved fields "
                           f"{reserved:#x}, {reserved_end:#x}, where version {VERSION} has zeros: bytes are damaged")
    if not (positive > 0 and math.isfinite(positive)):
        raise PayloadError(f"{whose} has a positive_level of {positive!r}, which is not a finite number above zero")
    if not (negative < 0 and math.isfinite(negative)):
        raise PayloadError(f"{whose} has a negative_level of {negative!r}, which is not a finite number below zero")
    return Header(count, positive, negative)


def _wrong_length(gathered: np.ndarray, ranks: int, elements: int, tensor: str) -> PayloadError:
    """The error for a gathered buffer of the wrong length: walk the headers to name the rank that differs."""
    offset = 0
    for rank in range(ranks):
        whose = f"tensor {tensor!r}: the payload of rank {rank}"
        if gathered.size - offset < HEADER_NBYTES:
            return PayloadError(f"{whose} has {gathered.size - offset} bytes left of the {gathered.size} that arrived, "
                                f"fewer than a header of {HEADER_NBYTES}")
        try:
            _parse(gathered[offset:offset + HEADER_NBYTES], elements, whose)
        except PayloadError as error:
            return error
        offset += payload_nbytes(elements)
    return PayloadError(f"tensor {tensor!r}: {gathered.size} bytes arrived from {ranks} ranks, but {elements} elements "
                        f"take {payload_nbytes(elements)} bytes per rank: the bytes are damaged")

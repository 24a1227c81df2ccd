"""The payload: its bytes, and what a receiver says of bytes that are not one."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_twobit.errors import PayloadError
from hvd_twobit.kernels import packed_nbytes
from hvd_twobit.payload import (
    ALIGNMENT,
    FLOAT32_SUMS,
    HEADER_NBYTES,
    Header,
    Layout,
    Sums,
    SumsHeader,
    split,
    split_sums,
)

ELEMENTS = 100


def payload_of(elements: int = ELEMENTS, positive: float = 0.5, negative: float = -0.25,
               fill: int = 0xE4) -> np.ndarray:
    layout = Layout((elements,))
    payload = layout.new()
    payload[:HEADER_NBYTES] = np.frombuffer(Header(elements, positive, negative).pack(), np.uint8)
    layout.codes(payload)[:] = fill
    return payload


ADAPTIVE = Layout((100,), 48)


def adaptive_payload_of(checksum: int = 7) -> np.ndarray:
    payload = ADAPTIVE.new()
    header = Header(100, block_elements=48, levels_checksum=checksum)
    payload[:HEADER_NBYTES] = np.frombuffer(header.pack(), np.uint8)
    ADAPTIVE.table(payload)[:] = [(1.5, 3), (0.0, 0), (2.0, 4)]
    ADAPTIVE.codes(payload)[:] = 0xE4
    return payload


def test_bytes_are_those_of_the_table_in_the_module() -> None:
    header = struct.pack("<4sBBHQIffI", b"2BIT", 1, 0, 0, 20, 0, 0.5, -0.25, 0)
    assert payload_of(20).tobytes() == header + b"\xe4" * 8 + bytes(8)


def test_bytes_with_adaptive_levels_have_a_block_table() -> None:
    header = struct.pack("<4sBBHQIffI", b"2BIT", 1, 0, 0, 100, 48, 0, 0, 7)
    table = struct.pack("<fIfIfI", 1.5, 3, 0.0, 0, 2.0, 4)
    assert adaptive_payload_of().tobytes() == header + table + bytes(8) + b"\xe4" * 28 + bytes(4)


@given(st.integers(0, 10**12), st.integers(0, 100).map(lambda words: 16 * words))
def test_size_is_header_table_and_codes_padded_to_16_bytes(elements: int, block_elements: int) -> None:
    layout = Layout((elements,), block_elements)
    assert layout.blocks == (max(1, -(-elements // block_elements)) if block_elements else 0)
    assert layout.nbytes % ALIGNMENT == layout.codes_offset % ALIGNMENT == 0
    assert 0 <= layout.codes_offset - HEADER_NBYTES - 8 * layout.blocks < ALIGNMENT
    assert 0 <= layout.nbytes - layout.codes_offset - packed_nbytes(elements) < ALIGNMENT


@given(st.integers(1, 5), st.integers(0, 70))
def test_split_finds_what_each_rank_sent_without_copying(ranks: int, elements: int) -> None:
    payloads = [payload_of(elements, positive=rank + 1.0, negative=-rank - 2.0, fill=rank) for rank in range(ranks)]
    gathered = np.concatenate(payloads)
    received = split(gathered, ranks, Layout((elements,)), "tensor 'w'")
    codes = received.codes
    assert list(received.headers.values()) == [Header(elements, rank + 1.0, -rank - 2.0) for rank in range(ranks)]
    assert codes.shape == (ranks, packed_nbytes(elements)) and (codes == np.arange(ranks)[:, None]).all()
    assert codes.size == 0 or np.shares_memory(codes, gathered)


def test_split_finds_the_block_table_of_each_rank() -> None:
    received = split(np.concatenate([adaptive_payload_of(5), adaptive_payload_of(6)]), 2, ADAPTIVE, "tensor 'w'")
    assert [header.levels_checksum for header in received.headers.values()] == [5, 6]
    assert received.table["selected_sum"].tolist() == [[1.5, 0, 2]] * 2
    assert received.table["selected_count"].tolist() == [[3, 0, 4]] * 2
    assert received.codes.shape == (2, 28) and (received.codes == 0xE4).all()


@pytest.mark.parametrize("offset, value, message", [
    (0, b"2BITX"[1:], "begins with b'BITX' instead of b'2BIT'"),
    (4, b"\x02", "version 2, this rank reads version 1: install the same hvd_twobit on every rank"),
    (5, b"\x01", "flags 0x1"),
    (6, b"\x01", "reserved field 0x1"),
    (8, struct.pack("<Q", 99), "element_count of 99, on this rank the tensor has 100 elements"),
    (16, struct.pack("<I", 1024), "block_elements 1024, this rank's has 0"),
    (20, struct.pack("<f", 0.0), "positive_level of 0.0"),
    (20, struct.pack("<f", -1.0), "positive_level of -1.0"),
    (20, struct.pack("<f", float("nan")), "positive_level of nan"),
    (20, struct.pack("<f", float("inf")), "positive_level of inf"),
    (24, struct.pack("<f", 1.0), "negative_level of 1.0"),
    (24, struct.pack("<f", float("-inf")), "negative_level of -inf"),
    (28, b"\x07", "levels_checksum of 0x7"),
])
def test_a_wrong_field_is_an_error_with_tensor_rank_and_field(offset: int, value: bytes, message: str) -> None:
    gathered = np.concatenate([payload_of(), payload_of(), payload_of()])
    start = Layout((ELEMENTS,)).nbytes + offset
    gathered[start:start + len(value)] = np.frombuffer(value, np.uint8)
    with pytest.raises(PayloadError, match=f"tensor 'layer.weight': the payload of rank 1 .*{message}"):
        split(gathered, 3, Layout((ELEMENTS,)), "tensor 'layer.weight'")


@pytest.mark.parametrize("offset, value, message", [
    (16, struct.pack("<I", 0), "block_elements 0, this rank's has 48"),
    (20, struct.pack("<f", 0.5), "levels 0.5 and 0.0 in its header"),
    (32, struct.pack("<f", float("nan")), "of block 0 a selected_sum of nan over 3 elements"),
    (40, struct.pack("<f", -1.0), "of block 1 a selected_sum of -1.0 over 0 elements"),
    (48, struct.pack("<f", float("inf")), "of block 2 a selected_sum of inf over 4"),
    (36, struct.pack("<I", 49), "of block 0 a selected_sum of 1.5 over 49 elements"),
])
def test_a_wrong_field_of_an_adaptive_payload_is_an_error(offset: int, value: bytes, message: str) -> None:
    gathered = np.concatenate([adaptive_payload_of(), adaptive_payload_of(), adaptive_payload_of()])
    start = ADAPTIVE.nbytes + offset
    gathered[start:start + len(value)] = np.frombuffer(value, np.uint8)
    with pytest.raises(PayloadError, match=f"tensor 'layer.weight': the payload of rank 1 .*{message}"):
        split(gathered, 3, ADAPTIVE, "tensor 'layer.weight'")


def test_a_rank_with_another_shape_is_told_by_its_count() -> None:
    gathered = np.concatenate([payload_of(ELEMENTS), payload_of(300)])
    with pytest.raises(PayloadError, match="rank 1 has an element_count of 300, on this rank the tensor has 100"):
        split(gathered, 2, Layout((ELEMENTS,)), "tensor 'w'")
    with pytest.raises(PayloadError, match="rank 0 has an element_count of 100, on this rank the tensor has 300"):
        split(gathered, 2, Layout((300,)), "tensor 'w'")


@pytest.mark.parametrize("cut", [1, 15, 16, 40, 79])
def test_bytes_that_are_missing_are_an_error(cut: int) -> None:
    gathered = np.concatenate([payload_of(), payload_of()])[:-cut]
    with pytest.raises(PayloadError, match="tensor 'w'"):
        split(gathered, 2, Layout((ELEMENTS,)), "tensor 'w'")


def test_no_bytes_at_all_are_an_error() -> None:
    with pytest.raises(PayloadError, match="rank 0 has 0 bytes left of the 0 that arrived"):
        split(np.empty(0, np.uint8), 2, Layout((ELEMENTS,)), "tensor 'w'")


@settings(max_examples=300)
@given(st.binary(max_size=400), st.integers(1, 4), st.integers(0, 200), st.sampled_from([0, 16, 64]))
def test_any_bytes_are_a_payload_or_a_payload_error(content: bytes, ranks: int, elements: int, block: int) -> None:
    try:
        received = split(np.frombuffer(content, np.uint8), ranks, Layout((elements,), block), "tensor 'w'")
    except PayloadError:
        return
    assert len(received.headers) == ranks and received.codes.shape == (ranks, packed_nbytes(elements))


@settings(max_examples=300)
@given(st.integers(0, 2 * Layout((ELEMENTS,)).nbytes - 1), st.integers(0, 7))
def test_a_flipped_bit_is_noticed_unless_it_is_in_a_code_a_level_or_the_padding(position: int, bit: int) -> None:
    gathered = np.concatenate([payload_of(), payload_of()])
    gathered[position] ^= 1 << bit
    field = position % Layout((ELEMENTS,)).nbytes
    if field < 20 or 28 <= field < HEADER_NBYTES:
        with pytest.raises(PayloadError):
            split(gathered, 2, Layout((ELEMENTS,)), "tensor 'w'")


# ---- several runs --------------------------------------------------------------------------------------------------

def test_runs_follow_each_other_in_table_and_codes() -> None:
    layout = Layout((100, 0, 20), 48)
    assert layout.run_blocks == (slice(0, 3), slice(3, 4), slice(4, 5))
    assert layout.run_words == (slice(0, 7), slice(7, 7), slice(7, 9))
    assert layout.block_sizes.tolist() == [48, 48, 4, 0, 20]
    assert (layout.elements, layout.words, layout.blocks, layout.nbytes) == (120, 9, 5, 32 + 48 + 48)


def test_a_payload_of_nothing_is_a_header() -> None:
    assert Layout(()).nbytes == Layout((), 1024).nbytes == HEADER_NBYTES


# ---- sums ----------------------------------------------------------------------------------------------------------

LAYOUTS = [Layout((100, 20), 48), Layout((), 48), Layout((17,), 48)]
FIXED = [Layout((100, 20)), Layout(()), Layout((17,))]


def sums_of(layouts: list[Layout], form: int, planes: int = 1, levels: tuple[float, float] = (0.0, 0.0)) -> list[Sums]:
    """Sums of every chunk, all bytes 0x55, all next levels 1.5."""
    made = [layout.new_sums(SumsHeader(form, planes, layout.elements, *levels, layout.block_elements))
            for layout in layouts]
    for sums in made:
        sums.next_levels[:], sums.planes[:] = 1.5, 0x55
    return made


def gathered(sums: list[Sums]) -> np.ndarray:
    return np.concatenate([one.memory for one in sums])


def test_bytes_of_sums_are_those_of_the_table_in_the_module() -> None:
    header = struct.pack("<4sBBBBQIffI", b"2SUM", 1, 8, 1, 0, 17, 48, 0, 0, 0)
    assert sums_of(LAYOUTS, 8)[2].memory.tobytes() == header + struct.pack("<f12x", 1.5) + b"\x55" * 32
    header = struct.pack("<4sBBBBQIffI", b"2SUM", 1, 4, 2, 0, 17, 0, 0.5, -0.25, 0)
    assert sums_of(FIXED, 4, 2, (0.5, -0.25))[2].memory.tobytes() == header + b"\x55" * 32


@pytest.mark.parametrize("form, planes", [(4, 1), (8, 1), (16, 2), (FLOAT32_SUMS, 1)])
def test_the_sums_of_every_rank_are_found_without_copying(form: int, planes: int) -> None:
    levels = (0.0, 0.0) if form == FLOAT32_SUMS else (0.5, -0.25)
    for layouts, has in ((LAYOUTS, (0.0, 0.0)), (FIXED, levels)):
        content = gathered(sums_of(layouts, form, planes, has))
        found = split_sums(content, layouts, "tensor 'w'")
        for layout, sums in zip(layouts, found):
            assert sums.header == SumsHeader(form, planes, layout.elements, *has, layout.block_elements)
            assert sums.planes.shape == (planes, 2 * form * layout.words) and (sums.planes == 0x55).all()
            assert sums.next_levels.shape == (layout.blocks,) and (sums.next_levels == 1.5).all()
            assert not sums.planes.size or np.shares_memory(sums.planes, content)


@pytest.mark.parametrize("layouts, offset, value, message", [
    (LAYOUTS, 0, b"2BIT", "begins with b'2BIT' instead of b'2SUM'"),
    (LAYOUTS, 4, b"\x02", "version 2, this rank reads version 1"),
    (LAYOUTS, 5, b"\x05", "form 5 and 1 planes, which there is not"),
    (LAYOUTS, 6, b"\x03", "form 8 and 3 planes"),
    (LAYOUTS, 5, b"\x20\x02", "form 32 and 2 planes"),
    (LAYOUTS, 5, b"\x04", "has form 4, what rank 0 has summed has 8"),
    (LAYOUTS, 7, b"\x01", "reserved fields 0x1 and 0x0"),
    (LAYOUTS, 28, b"\x01", "reserved fields 0x0 and 0x1"),
    (LAYOUTS, 8, b"\x12", "element_count of 18, on this rank it has 17"),
    (LAYOUTS, 16, b"\x00", "block_elements 0, this rank's has 48"),
    (LAYOUTS, 20, struct.pack("<f", 0.5), "levels 0.5 and 0.0 in its header"),
    (LAYOUTS, 32, struct.pack("<f", 0.0), "a next level of 0.0 in block 0"),
    (LAYOUTS, 32, struct.pack("<f", float("nan")), "a next level of nan in block 0"),
    (FIXED, 20, struct.pack("<f", 0.25), "has positive_level 0.25, what rank 0 has summed has 0.5"),
    (FIXED, 20, struct.pack("<f", -0.25), "has levels -0.25 and -0.5, which are not"),
    (FIXED, 24, struct.pack("<f", float("-inf")), "has levels 0.5 and -inf, which are not"),
])
def test_a_wrong_field_of_sums_is_an_error_with_tensor_rank_and_field(layouts: list[Layout], offset: int, value: bytes,
                                                                      message: str) -> None:
    sums = sums_of(layouts, 8, 1, (0.0, 0.0) if layouts is LAYOUTS else (0.5, -0.5))
    sums[2].memory[offset:offset + len(value)] = np.frombuffer(value, np.uint8)
    with pytest.raises(PayloadError, match=f"tensor 'layer.weight': what rank 2 has summed .*{message}"):
        split_sums(gathered(sums), layouts, "tensor 'layer.weight'")


@pytest.mark.parametrize("cut", [1, 16, 48, 80, 200])
def test_sums_of_which_bytes_are_missing_or_too_many_are_an_error(cut: int) -> None:
    content = gathered(sums_of(LAYOUTS, 8))
    with pytest.raises(PayloadError, match="tensor 'w'"):
        split_sums(content[:-cut], LAYOUTS, "tensor 'w'")
    with pytest.raises(PayloadError, match="tensor 'w': .* bytes arrived"):
        split_sums(np.concatenate([content, content[:cut]]), LAYOUTS, "tensor 'w'")

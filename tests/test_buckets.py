"""Buckets and chunks: every element travels once, cuts lie between blocks, nothing is larger than it may be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_twobit.buckets import Bucket, Part, plan
from hvd_twobit.config import TwoBitConfig
from hvd_twobit.kernels import packed_nbytes
from hvd_twobit.transports import bucket_elements, plan_buckets

sizes = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 5000)), min_size=1, max_size=12)
blocks = st.sampled_from([16, 64, 1024])


def tensors(elements: list[int]) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"w{number}", (count,)) for number, count in enumerate(elements)]


def covered(parts: list[Part]) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for part in parts:
        found.setdefault(part.name, []).append((part.start, part.stop))
    return found


def whole(pieces: list[tuple[int, int]], elements: int) -> bool:
    """Whether pieces follow each other from the first element to the last."""
    return (pieces[0][0] == 0 and pieces[-1][1] == elements
            and all(one[1] == other[0] for one, other in zip(pieces, pieces[1:])))


@given(sizes, st.integers(1, 3000), blocks)
def test_every_element_is_in_one_bucket_in_the_order_of_tensors(elements: list[int], cap: int, block: int) -> None:
    buckets = plan(tensors(elements), cap, block)
    parts = [part for bucket in buckets for part in bucket.parts]
    assert list(dict.fromkeys(part.name for part in parts)) == [name for name, _ in tensors(elements)]
    for (name, (count,)), pieces in zip(tensors(elements), covered(parts).values()):
        assert whole(pieces, count), name
        assert all(start % block == 0 for start, _ in pieces)
    for bucket in buckets:
        assert bucket.elements <= max(cap, block)
        assert len(bucket.parts) == 1 or all(part.start == 0 and part.is_last for part in bucket.parts)
    assert len({bucket.name for bucket in buckets}) == len(buckets)


@given(sizes, st.integers(1, 3000), blocks)
def test_where_shares_are_kept_no_tensor_is_cut_otherwise_for_others(elements: list[int], cap: int, block: int) -> None:
    together = covered([part for bucket in plan(tensors(elements), cap, block, alone=True) for part in bucket.parts])
    for name, shape in tensors(elements):
        assert together[name] == covered([part for bucket in plan([(name, shape)], cap, block, alone=True)
                                          for part in bucket.parts])[name]


@given(sizes, st.integers(1, 20), blocks)
def test_chunks_hold_every_element_once_and_are_cut_between_blocks(elements: list[int], count: int, block: int) -> None:
    bucket = Bucket(tuple(Part(name, shape, 0, shape[0]) for name, shape in tensors(elements)))
    chunks = bucket.chunks(count, block)
    assert len(chunks) == count
    found = covered([part for chunk in chunks for part in chunk])
    assert list(found) == [name for name, _ in tensors(elements)]
    for (name, (size,)), pieces in zip(tensors(elements), found.values()):
        assert whole(pieces, size), name
        assert all(start % block == 0 for start, _ in pieces)
    words = [sum(packed_nbytes(part.elements) // 4 for part in chunk) for chunk in chunks]
    assert max(words) - sum(words) / count <= block // 16 + 1


def sizes_of(elements: list[int], cap: int, block: int) -> list[tuple[str, int]]:
    return [(bucket.name, bucket.elements) for bucket in plan(tensors(elements), cap, block)]


def test_a_tensor_larger_than_a_bucket_is_cut_into_equal_parts_and_shares_none() -> None:
    assert sizes_of([100, 5000, 100], 2100, 16) == [
        ("w0", 100), ("w1", 1664), ("w1.1664", 1664), ("w1.3328", 1672), ("w2", 100)]


def test_the_first_bucket_and_the_ends_of_a_cut_tensor_are_a_quarter() -> None:
    assert sizes_of([300, 300, 300, 300], 2000, 16) == [("w0", 300), ("w1", 900)]
    assert sizes_of([5000], 2000, 16) == [("w0", 512), ("w0.512", 1984), ("w0.2496", 2000), ("w0.4496", 504)]
    assert sizes_of([5000, 10], 2000, 16) == [("w0", 512), ("w0.512", 1488), ("w0.2000", 1504), ("w0.3504", 1496),
                                              ("w1", 10)]


def test_a_part_of_a_cut_bucket_may_be_cut_again() -> None:
    *_, last, _ = plan([("v", (1,)), ("w", (5000,)), ("x", (1,))], 2100, 16)
    assert [[(part.start, part.stop) for part in chunk] for chunk in last.chunks(3, 16)] == [
        [(3328, 3888)], [(3888, 4448)], [(4448, 5000)]]


def test_labels_name_the_tensors() -> None:
    assert Bucket.of("w", (3,)).label == "tensor 'w'"
    assert plan([("v", (3,)), ("w", (3,))], 100, 16)[0].label == "tensors 'v' to 'w'"


@pytest.mark.parametrize("ranks", [2, 64, 1024, 32767])
@pytest.mark.parametrize("cap", [25.0, 1e6])
def test_what_all_ranks_send_of_a_bucket_stays_below_what_horovod_can_gather(ranks: int, cap: float) -> None:
    config = TwoBitConfig(bucket_cap_mb=cap)
    elements = bucket_elements(config, ranks)
    assert elements <= cap * 2**18
    for planned in plan_buckets(config, [("w", (3 * elements,))], ranks):
        assert planned.bucket.elements <= elements
    payload = 32 + 4 * -(-elements // 16) + 8 * -(-elements // 1024) + 32
    assert ranks * payload < 2**31
    assert 4 * elements + ranks * 64 < 2**31  # float32 sums

"""The cost model: formulas at points that were computed by hand, what holds everywhere, and what ``choose`` answers."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_twobit.cost_model import (
    AUTO,
    DEFAULT_LINK,
    DEFAULT_PROCESSOR,
    MAX_RANKS,
    METHODS,
    TRANSPORTS,
    Link,
    Processor,
    bucket_elements,
    choose,
    cost,
)
from hvd_twobit.errors import ConfigError
from hvd_twobit.kernels import Tallies, count_bits

FAST = Link(1e18, 0.0)
IDLE = Processor(*[0.0] * len(dataclasses.fields(Processor)))
ONE_BUCKET = 1e6

elements_of_buckets = st.integers(1, 2**34)
numbers_of_ranks = st.integers(2, MAX_RANKS)
methods = st.sampled_from(METHODS)
links = st.builds(Link, st.floats(1e5, 1e13), st.floats(0, 1), st.floats(0.1, 1))
caps = st.floats(0.001, 1e4)


def nbytes(method: str, elements: int, ranks: int, **arguments: Any) -> int:
    return cost(method, elements, ranks, bucket_cap_mb=ONE_BUCKET, **arguments).nbytes


# Bytes.

@pytest.mark.parametrize("method, ranks, expected", [
    ("fp32", 2, 4 * 8192), ("fp32", 4, 6 * 8192), ("fp16", 2, 2 * 8192), ("fp16", 4, 3 * 8192),
    ("allgather", 2, 32 + 2048), ("allgather", 4, 3 * (32 + 2048)), ("allgather", 8, 7 * (32 + 2048)),
    ("sra", 2, 32 + 1024 + 32 + 2048), ("sra", 4, 3 * (32 + 512 + 32 + 1024)),
    ("sra", 8, 7 * (32 + 256 + 32 + 1024)),
    ("allreduce", 2, 4 * (16 * 40 + 8 * 2 + 8)), ("allreduce", 4, 6 * (16 * 52 + 8 * 4 + 8)),
    ("allreduce", 8, 7 * (16 * 74 + 8 * 8 + 8)),
])
def test_bytes_at_fixed_levels_are_those_computed_by_hand(method: str, ranks: int, expected: int) -> None:
    assert nbytes(method, 8192, ranks, adaptive=False) == expected


@pytest.mark.parametrize("method, ranks, more", [
    ("fp32", 4, 0), ("allgather", 4, 3 * 8 * 8), ("sra", 4, 3 * (8 * 2 + 4 * 2)), ("allreduce", 4, 6 * 2 * 4 * 8),
])
def test_adaptive_levels_add_their_tables(method: str, ranks: int, more: int) -> None:
    assert nbytes(method, 8192, ranks) - nbytes(method, 8192, ranks, adaptive=False) == more


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 64])
def test_bits_per_element_of_large_tensors(ranks: int) -> None:
    elements = 1024 * ranks * 1000
    bits = {method: 8 * nbytes(method, elements, ranks, adaptive=False) / elements for method in METHODS}
    assert bits["allgather"] == pytest.approx(2 * (ranks - 1), rel=1e-3)
    assert bits["sra"] == pytest.approx((ranks - 1) / ranks * (2 + count_bits(ranks)), rel=1e-2)
    per_element = 32 / Tallies(ranks, 1).per_integer + 32 / 1024
    assert bits["allreduce"] == pytest.approx(2 * (ranks - 1) / ranks * per_element, rel=1e-2)
    assert bits["fp32"] == 2 * bits["fp16"] == pytest.approx(64 * (ranks - 1) / ranks)


def test_with_three_ranks_allgather_and_sra_carry_the_same_but_for_headers() -> None:
    assert nbytes("sra", 3 * 1024 * 50, 3, adaptive=False) == nbytes("allgather", 3 * 1024 * 50, 3, adaptive=False) + 64


@pytest.mark.parametrize("elements, ranks, chunk", [(5 * 1024, 4, 2048), (1, 4, 1), (1025, 2, 1024), (100, 64, 100)])
def test_sra_counts_the_bytes_of_the_rank_with_the_largest_chunk(elements: int, ranks: int, chunk: int) -> None:
    codes = 16 * -(-4 * -(-chunk // 16) // 16)
    sums = -(-(elements - chunk) * 4 // 8) if ranks < 8 else elements - chunk
    assert nbytes("sra", elements, ranks, adaptive=False) == (ranks - 1) * (32 + codes + 32) + sums


def test_a_machine_with_several_ranks_receives_what_crosses_its_link() -> None:
    elements = 8 * 1024 * 1000
    arguments: dict[str, Any] = {"adaptive": False, "ranks_per_machine": 4}
    for ring in ("fp32", "fp16", "allgather", "allreduce"):
        assert nbytes(ring, elements, 8, **arguments) == nbytes(ring, elements, 8, adaptive=False)
    # Four ranks get a chunk of an eighth from four others each; then the sums of seven eighths come in a ring.
    assert nbytes("sra", elements, 8, **arguments) == 16 * (elements // 32 + 32) + elements // 8 * 7 + 7 * 32
    # Four exchanges of a quarter between two machines.
    transport = choose(elements // 4, 2, adaptive=False)
    assert nbytes("hierarchical", elements, 8, **arguments) == 4 * nbytes(transport, elements // 4, 2, adaptive=False)


def test_two_levels_carry_less_between_machines_and_take_less_time_where_the_link_is_slow() -> None:
    link = Link(1e8, 50e-6)
    flat, two_levels = (cost(method, 25_600_000, 16, ranks_per_machine=4, link=link) for method in (
        "auto", "hierarchical"))
    assert two_levels.nbytes < flat.nbytes / 2 and two_levels.seconds < flat.seconds / 2
    assert two_levels.transports == (choose(25 * 2**18 // 4, 4),)


@pytest.mark.parametrize("ranks, ranks_per_machine", [(4, 3), (4, 4), (2, 8)])
def test_machines_that_cannot_be_are_refused(ranks: int, ranks_per_machine: int) -> None:
    with pytest.raises(ConfigError, match=f"{ranks} ranks cannot be {ranks_per_machine} on each of several machines"):
        cost("auto", 1000, ranks, ranks_per_machine=ranks_per_machine)


@pytest.mark.parametrize("ranks, bits", [(2, 4), (7, 4), (8, 8), (127, 8), (128, 16), (MAX_RANKS, 16)])
def test_a_field_holds_every_sum_and_not_a_number(ranks: int, bits: int) -> None:
    assert count_bits(ranks) == bits and 2 * ranks + 2 <= 2**bits


# Seconds.

def test_rounds_of_latency_are_those_of_each_collective_and_its_negotiation() -> None:
    link = Link(1e18, 1.0)
    rounds = {method: cost(method, 10**6, 8, link=link, processor=IDLE).seconds for method in METHODS}
    assert rounds == pytest.approx({"fp32": 14 + 14, "fp16": 14 + 14, "allgather": 14 + 7, "sra": 14 + 2 + 14 + 7,
                                    "allreduce": 14 + 14, AUTO: rounds[choose(10**6, 8)]})


def test_every_bucket_waits_for_its_own_cycle_and_rounds() -> None:
    link, processor = Link(1e18, 1.0), dataclasses.replace(IDLE, cycle_s=100.0)
    one, four = (cost("sra", 4 * 2**20, 4, link=link, processor=processor, bucket_cap_mb=cap) for cap in (16, 4))
    assert (one.buckets, four.buckets) == (1, 4)
    assert one.seconds == pytest.approx(200 + 17) and four.seconds == pytest.approx(4 * one.seconds)


def test_bytes_take_the_time_of_the_link_or_of_the_processor_whichever_is_more() -> None:
    link = Link(8e6, 0.0, payload_share=0.5)
    assert cost("fp32", 10**6, 2, link=link, processor=IDLE).seconds == pytest.approx(8.0)
    for tcp_s, seconds in ((1e-7, 8.0), (1e-5, 40.0)):
        processor = dataclasses.replace(IDLE, tcp_s=tcp_s)
        assert cost("fp32", 10**6, 2, link=link, processor=processor).seconds == pytest.approx(seconds)


@pytest.mark.parametrize("method, ranks, times", [("fp32", 2, 1), ("allreduce", 2, 1), ("allgather", 2, 2),
                                                  ("sra", 2, 2), ("allgather", 3, 1), ("sra", 3, 1)])
def test_two_ranks_gather_in_one_direction_after_the_other(method: str, ranks: int, times: int) -> None:
    one = cost(method, 10**6, ranks, link=Link(8e6, 0.0, payload_share=1.0), processor=IDLE)
    assert one.seconds == pytest.approx(times * one.nbytes / 1e6)


def test_additions_hide_behind_the_bytes_of_the_reduce_scatter_only() -> None:
    link = Link(8e6, 0.0, payload_share=1.0)  # 4 s for 4 MB, half of them while ranks add
    for add_s, seconds in ((2e-6, 4.0), (20e-6, 2.0 + 10.0)):
        processor = dataclasses.replace(IDLE, add_s=add_s)
        assert cost("fp32", 10**6, 2, link=link, processor=processor).seconds == pytest.approx(seconds)


@pytest.mark.parametrize("method, per_element", [
    ("allgather", 1 + 10 + 4 * 100), ("sra", 1 + (10 + 4 * 100) / 4 + 10 + 100), ("allreduce", 1 + 1000)])
def test_what_is_computed_for_an_element(method: str, per_element: float) -> None:
    processor = dataclasses.replace(IDLE, quantize_s=1, unpack_s=10, unpack_payload_s=100, digits_s=1000)
    assert cost(method, 4096, 4, processor=processor).compute_s == pytest.approx(4096 * per_element)


def test_only_one_bucket_is_computed_while_nothing_travels() -> None:
    processor = dataclasses.replace(IDLE, quantize_s=1e-6)
    slow_link = cost("allgather", 10 * 2**18, 2, link=Link(1e3, 0), processor=processor, bucket_cap_mb=1)
    assert slow_link.buckets == 10
    assert slow_link.seconds == pytest.approx(slow_link.exchange_s + slow_link.compute_s / 10)
    fast_link = cost("allgather", 10 * 2**18, 2, link=FAST, processor=processor, bucket_cap_mb=1)
    assert fast_link.seconds == pytest.approx(fast_link.compute_s, rel=1e-6)


@pytest.mark.parametrize("method, elements, buckets", [
    ("fp32", 2**25, 1), ("fp32", 2**25 + 1, 2), ("fp16", 2**26, 1), ("fp16", 2**26 + 1, 2),
    ("sra", 6_553_600, 1), ("sra", 6_553_601, 2), ("allgather", 25_600_000, 4)])
def test_pieces_hold_25_mib_of_gradient_and_what_horovod_fuses_128_mib(method: str, elements: int,
                                                                        buckets: int) -> None:
    assert cost(method, elements, 4).buckets == buckets


def test_a_bucket_is_of_whole_blocks_and_of_one_at_least() -> None:
    assert [bucket_elements(cap) for cap in (25, 1, 0.006, 1e-6)] == [6_553_600, 262_144, 1024, 1024]


# What holds everywhere.

@given(methods, elements_of_buckets, numbers_of_ranks, links, caps, st.booleans())
def test_an_exchange_takes_as_long_as_either_part_and_at_most_as_both(
        method: str, elements: int, ranks: int, link: Link, cap: float, adaptive: bool) -> None:
    one = cost(method, elements, ranks, link=link, bucket_cap_mb=cap, adaptive=adaptive)
    assert max(one.exchange_s, one.compute_s) <= one.seconds * (1 + 1e-9)
    assert one.seconds <= (one.exchange_s + one.compute_s) * (1 + 1e-9)
    assert one.buckets > 1 or one.seconds == pytest.approx(one.exchange_s + one.compute_s)
    assert one.nbytes > 0 and one.buckets > 0


@given(st.sampled_from([*TRANSPORTS, "fp32", "fp16"]), elements_of_buckets, st.integers(0, 2**34), numbers_of_ranks,
       links)
def test_more_elements_never_cost_less(method: str, elements: int, more: int, ranks: int, link: Link) -> None:
    fewer, all_of_them = (cost(method, count, ranks, link=link) for count in (elements, elements + more))
    assert fewer.nbytes <= all_of_them.nbytes and fewer.seconds <= all_of_them.seconds * (1 + 1e-9)


@given(methods, elements_of_buckets, numbers_of_ranks, links, st.floats(1, 100), st.floats(0, 1))
def test_a_slower_link_never_makes_it_faster(method: str, elements: int, ranks: int, link: Link, slower: float,
                                             later: float) -> None:
    worse = dataclasses.replace(link, bits_per_second=link.bits_per_second / slower, latency_s=link.latency_s + later)
    assert (cost(method, elements, ranks, link=link).seconds
            <= cost(method, elements, ranks, link=worse).seconds * (1 + 1e-9))


@given(elements_of_buckets, st.integers(2, 1000), links)
def test_allgather_grows_with_every_rank(elements: int, ranks: int, link: Link) -> None:
    fewer, more = (cost("allgather", elements, count, link=link) for count in (ranks, ranks + 1))
    assert fewer.nbytes < more.nbytes and fewer.seconds <= more.seconds


# What auto takes.

def test_full_buckets_of_two_ranks_take_the_allreduce_which_uses_both_directions_at_once() -> None:
    assert choose(bucket_elements(25), 2) == "allreduce"
    assert choose(bucket_elements(25), 1) == "allgather"


@given(st.integers(0, 1024), st.integers(1, 10**6), st.booleans())
def test_tiny_buckets_are_gathered(elements: int, ranks: int, adaptive: bool) -> None:
    assert choose(elements, ranks, adaptive=adaptive) == "allgather"


@pytest.mark.parametrize("ranks", [4, 7, 8, 64, 128, 1024, MAX_RANKS])
def test_full_buckets_of_four_ranks_or_more_take_sra(ranks: int) -> None:
    assert choose(bucket_elements(25), ranks) == "sra"


def test_full_buckets_of_three_ranks_are_gathered() -> None:
    assert choose(bucket_elements(25), 3) == "allgather"


def test_more_ranks_than_fields_can_sum_gather() -> None:
    assert choose(10**9, MAX_RANKS) == "sra" and choose(10**9, MAX_RANKS + 1) == "allgather"


@given(st.integers(1, 2**30), st.integers(3, MAX_RANKS), st.booleans(), links)
def test_the_cheapest_is_chosen(elements: int, ranks: int, adaptive: bool, link: Link) -> None:
    seconds = {transport: cost(transport, elements, ranks, adaptive=adaptive, link=link,
                               bucket_cap_mb=ONE_BUCKET).seconds for transport in TRANSPORTS}
    chosen = choose(elements, ranks, adaptive=adaptive, link=link)
    possible = TRANSPORTS if adaptive else ("allgather", "sra")
    assert seconds[chosen] == pytest.approx(min(seconds[transport] for transport in possible), rel=1e-12)
    assert chosen in possible


@pytest.mark.parametrize("ranks, gigabits", [(ranks, gigabits) for ranks in (4, 8, 16, 64) for gigabits in (1, 25)])
def test_full_buckets_are_decided_alike_for_other_links(ranks: int, gigabits: float) -> None:
    link = dataclasses.replace(DEFAULT_LINK, bits_per_second=1e9 * gigabits)
    assert choose(bucket_elements(25), ranks, link=link) == choose(bucket_elements(25), ranks)


def test_auto_decides_for_each_bucket_and_as_if_the_link_were_the_default() -> None:
    full, rest = bucket_elements(25), 5000
    one = cost(AUTO, 3 * full + rest, 8, link=Link(1e5, 0.0))
    assert one.transports == ("sra", "allgather")
    assert one.nbytes == 3 * nbytes("sra", full, 8) + nbytes("allgather", rest, 8)
    assert cost(AUTO, 10**6, 2, link=Link(1e13, 0.0)).transports == ("allreduce",)
    assert choose(10**6, 2, link=Link(1e13, 0.0)) == "allgather"


# What is refused.

@pytest.mark.parametrize("arguments, message", [
    (("sra", 0, 4), "elements must be a whole number of 1 or more, not 0"),
    (("sra", 1.5, 4), "elements must be a whole number"),
    (("sra", True, 4), "elements must be a whole number"),
    (("sra", 10, 1), "ranks must be a whole number of 2 or more, not 1"),
    (("sra", 10, MAX_RANKS + 1), "ranks must be at most 32,767"),
    (("ring", 10, 4), "unknown method 'ring'; known: fp32, fp16, allgather"),
])
def test_what_cannot_be_exchanged_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cost(*arguments)


@pytest.mark.parametrize("cap", [0, -1, float("nan"), float("inf"), "25", None])
def test_a_bucket_of_no_size_is_refused(cap: Any) -> None:
    with pytest.raises(ConfigError, match="bucket_cap_mb must be a finite number above zero"):
        cost("sra", 10, 4, bucket_cap_mb=cap)


@pytest.mark.parametrize("elements, ranks", [(-1, 4), (4, 0), (4, -2), (4.0, 4), (4, 2.0), (float("nan"), 4)])
def test_choose_refuses_what_is_no_count(elements: Any, ranks: Any) -> None:
    with pytest.raises(ConfigError, match="must be a whole number"):
        choose(elements, ranks)


@pytest.mark.parametrize("values", [(0, 0), (-1, 0), (float("nan"), 0), (1, -1), (1, float("inf")), (1, 0, 0),
                                    (1, 0, 1.1), ("1e9", 0)])
def test_a_link_that_cannot_be_is_refused(values: Any) -> None:
    with pytest.raises(ConfigError, match="bits_per_second|latency_s|payload_share"):
        Link(*values)


def test_a_processor_that_computes_in_negative_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="add_s must be a finite number of 0 or more, not -1"):
        Processor(add_s=-1)


def test_a_slowed_processor_computes_slower_and_waits_as_long() -> None:
    slow = DEFAULT_PROCESSOR.slowed(2)
    assert slow.cycle_s == DEFAULT_PROCESSOR.cycle_s and slow.tcp_s == 2 * DEFAULT_PROCESSOR.tcp_s
    assert slow.quantize_s == 2 * DEFAULT_PROCESSOR.quantize_s


def test_importing_the_model_loads_no_framework_and_no_compiler() -> None:
    program = ("import sys, hvd_twobit.cost_model\n"
               "print({'numba', 'rich', 'torch', 'tensorflow', 'horovod'} & set(sys.modules))")
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed == "set()\n"

"""What an exchange of gradients costs: bytes that a rank receives, and seconds, by transport, ranks and link.

Pure arithmetic, no framework, no state: ``transport="auto"`` asks ``choose`` on every rank and has to get the same
answer there, and ``hvd-twobit plan`` prints what the rest says.

**Bytes**, received by each of n ranks for N elements; by that rank which receives most, where they differ:

- ``fp32``, ``fp16``: ring allreduce, 2 (n-1)/n of the tensor's bytes [1, 2].
- ``allgather``: n-1 payloads. A payload is 2 bits per element, 8 bytes per block of 1024 where levels are adaptive, and
  a header of 32 bytes (``hvd_twobit.payload``).
- ``sra``: every rank sums up one chunk, of whole blocks. The payloads of that chunk from n-1 ranks (alltoall), then the
  exact sums of n-1 chunks (allgather): fields of f bits, 4 for n <= 7, 8 for n <= 127, 16 for more, as a field has to
  hold -n to n and NaN; a float32 per block, the next level, where levels are adaptive; 32 bytes of header.
- ``allreduce``: ring allreduce of 32-bit integers, of as many digits of 2n+1 values as fit (``kernels.Tallies``), with
  a header per rank, an integer per block and, where levels are adaptive, two more per block and rank.

**Seconds of a collective** are bytes / bandwidth + rounds * latency + ``cycle_s``, where bandwidth is the link's, or
that of the processor's TCP if it is less. As Horovod 0.28.1 does it on Gloo:

- Rounds: ring allreduce 2 (n-1), allgather n-1 [1, 2]. Gloo's alltoall posts its n-1 messages at once, so one round,
  and Horovod exchanges its splits in another before.
- Between two ranks, an allgather and an alltoall take their bytes' time twice. Gloo sends first and then announces that
  it can receive, on the same connection, behind its own bytes, so that one direction waits for the other: 279 ms where
  one direction takes 131 (2 ranks, 6 million elements, 100 Mbit/s). With more ranks, what a rank sends and what it
  announces go to different neighbours; in an allreduce, Gloo announces first.
- Before a collective, ranks agree that it is ready on all, by an allreduce of a few bytes: 2 (n-1) rounds. Horovod's
  thread does this once per cycle, HOROVOD_CYCLE_TIME (1 ms) apart, and one collective at a time. Collectives that are
  ready at the same time share a cycle and may be fused; the model has one cycle for each, the most that it can take.
- In a ring allreduce, Gloo adds one segment while another is on the way: the reduce-scatter, half of the bytes, takes
  as long as its additions or its bytes, whichever is more. Copies to the fusion buffer and back come on top.

**Machines.** Where several ranks share a machine and its link, bytes are those of the machine. A ring over ranks that
are numbered machine by machine crosses the link once in each direction, so allgather and allreduce carry over it what
they carry to one rank. ``sra``'s alltoall carries what each of the machine's ranks gets from all others.
``hierarchical`` (two levels, see ``hierarchy``) has as many exchanges between machines at a time as a machine has
ranks, each of one share of the bucket, by the transport that ``choose`` takes for it; before and after, ranks of the
machine hand each other shares at ``tcp_s``, without latency.

**Buckets.** TwoBit's exchange is cut into buckets of at most ``bucket_cap_mb`` MiB of float32 gradient, larger tensors
too; each has collectives of its own. Horovod's own allreduces are fused up to 128 MiB (HOROVOD_FUSION_THRESHOLD).

**Overlap.** Training's threads compress and decompress (``compute_s``) while Horovod's thread exchanges other buckets
(``exchange_s``). Of the largest bucket nothing overlaps: ``compute + max(all exchange, all other compute)``. Overlap
with the backward pass is not in the model: the time is that of an exchange in which all gradients are there at once.

Also left out: that the first bucket and the ends of a large tensor are smaller (``buckets``), the agreement (an
allgather of 32 bytes per rank), small tensors, which travel uncompressed, stragglers, congestion. Each rank is taken to
have a link and a processor of its own.

[1] R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH",
    Int. J. High Performance Computing Applications 19(1), 2005.
[2] P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    J. Parallel and Distributed Computing 69(2), 2009.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any

from .config import AUTO, DEFAULT_BLOCK_ELEMENTS, DEFAULT_BUCKET_CAP_MB, TRANSPORTS
from .errors import ConfigError
from .kernels import ELEMENTS_PER_WORD, Tallies, count_bits
from .payload import HEADER_NBYTES, Layout

UNCOMPRESSED = ("fp32", "fp16")
METHODS = (*UNCOMPRESSED, *TRANSPORTS, AUTO)
HIERARCHICAL = "hierarchical"
"""The method of two levels, where a machine has several ranks; how shares travel is chosen as by ``AUTO``."""

MAX_RANKS = 2**15 - 1
"""Sums of more ranks would not fit into ``sra``'s largest fields, of 16 bits."""

_FUSION_NBYTES = 128 * 2**20
"""HOROVOD_FUSION_THRESHOLD, Horovod's default: what one allreduce carries."""


def _check_number(name: str, value: Any, above_zero: bool = False) -> None:
    if (isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value)
            or value < 0 or above_zero and value == 0):
        raise ConfigError(f"{name} must be a finite number {'above zero' if above_zero else 'of 0 or more'}, "
                          f"not {value!r}")


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ConfigError(f"{name} must be a whole number of {least} or more, not {value!r}")


@dataclasses.dataclass(frozen=True)
class Link:
    """The network between ranks.

    Attributes:
        bits_per_second: > 0, what the link is rated at, in each direction.
        latency_s: >= 0, seconds from one rank to the next beside the time that bytes take.
        payload_share: part of the rated bits that are payload: 1448 of the 1538 bytes that a full TCP segment takes on
            Ethernet with an MTU of 1500.
    """

    bits_per_second: float
    latency_s: float
    payload_share: float = 1448 / 1538

    def __post_init__(self) -> None:
        _check_number("bits_per_second", self.bits_per_second, above_zero=True)
        _check_number("latency_s", self.latency_s)
        _check_number("payload_share", self.payload_share, above_zero=True)
        if self.payload_share > 1:
            raise ConfigError(f"payload_share must be at most 1, not {self.payload_share!r}")


DEFAULT_LINK = Link(1e9, 50e-6)
"""What ``transport="auto"`` supposes: 1 Gbit/s and 50 us. On faster links a wrong choice costs less."""


@dataclasses.dataclass(frozen=True)
class Processor:
    """Seconds that one rank's processor takes. Defaults: AMD EPYC, 2 cores, one thread, arrays beyond its caches.

    Ranges are those of several runs of ``benchmarks/collectives.py``, 4 million elements, at a load average of up to
    2.3. At 5.7, one element took 4 to 7 ms and an addition of float16 84 to 118 ns, so these do not count.

    Attributes:
        cycle_s: of a collective, until Horovod's thread looks for it. HOROVOD_CYCLE_TIME; tiny collectives of 2 ranks
            took 0.8 to 1.9 ms (``benchmarks/collectives.py``).
        tcp_s: per byte that a rank receives while it sends as many. An allreduce of float64 took 4 to 9 ns per element
            longer than one of float32, with 2 ranks (``benchmarks/collectives.py``).
        copy_s: per element, into Horovod's fusion buffer and back. As two of the ``np.add`` beside which
            ``hvd-twobit bench kernels`` measures (0.30 ns).
        cast_s: per element, to float16 and back. 0.48 to 0.85 ns (``benchmarks/collectives.py``).
        add_s: per float32 or float64 added in Gloo's allreduce. As ``np.add``.
        add_half_s: per float16 added in it, which Gloo does in software. 19 to 31 ns (``benchmarks/collectives.py``).
        quantize_s: per element, ``quantize_pack``. 9.2 ms for 25.6 million elements (``bench kernels``).
        unpack_s: per element, what ``unpack_sum`` takes whatever the number of payloads; with the next,
            7.4, 11.8, 16.2, 26.6 ms for 1, 2, 4, 8 payloads of 25.6 million elements (``bench kernels``).
        unpack_payload_s: per element and payload, what ``unpack_sum`` takes for each.
        digits_s: per element, into the integers of ``allreduce`` and out of them: ``pack_tallies`` 3.9 ms,
            ``unpack_tallies`` 15.5 ms and ``unpack_counts`` 8.3 ms of processor time for 25.6 million elements.
    """

    cycle_s: float = 1e-3
    tcp_s: float = 1.0e-9
    copy_s: float = 0.6e-9
    cast_s: float = 0.6e-9
    add_s: float = 0.3e-9
    add_half_s: float = 27e-9
    quantize_s: float = 0.36e-9
    unpack_s: float = 0.25e-9
    unpack_payload_s: float = 0.10e-9
    digits_s: float = 1.08e-9

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_number(field.name, getattr(self, field.name))

    def slowed(self, factor: float) -> Processor:
        """A processor that takes ``factor`` times as long, as where ranks share cores; cycles stay as they are."""
        return dataclasses.replace(self, **{field.name: factor * getattr(self, field.name)
                                            for field in dataclasses.fields(self) if field.name != "cycle_s"})


DEFAULT_PROCESSOR = Processor()


@dataclasses.dataclass(frozen=True)
class Cost:
    """What an exchange costs.

    Attributes:
        method: one of ``METHODS``, or ``HIERARCHICAL``.
        buckets: pieces that are exchanged one after the other.
        nbytes: bytes that a rank receives, or a machine over its link where it has several.
        exchange_s: seconds in which Horovod's thread is busy.
        compute_s: seconds in which training's threads compress and decompress.
        seconds: from the beginning of the exchange to its end.
        transports: TwoBit's transports of the full buckets and of the rest, without repetition; empty where gradients
            are not compressed.
    """

    method: str
    buckets: int
    nbytes: int
    exchange_s: float
    compute_s: float
    seconds: float
    transports: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Bucket:
    """One piece of an exchange: what its collectives carry and what is computed for it."""

    nbytes: int
    exchange_s: float
    compute_s: float


def choose(elements: int, ranks: int, *, adaptive: bool = True, link: Link = DEFAULT_LINK) -> str:
    """The transport that ``transport="auto"`` takes for one bucket: the cheapest.

    Not the allreduce where levels are fixed: they may differ between ranks, which its integers cannot tell.

    Every rank gets the same answer, as nothing but the arguments and constants of this file counts. The default
    ``link`` serves where the real one is not known: see docs/design.md.

    Args:
        elements: of the bucket, 0 or more.
        ranks: number of ranks, 1 or more.
        adaptive: whether levels follow the gradient.
        link: the network between ranks.

    Raises:
        ConfigError: an argument cannot be used.
    """
    _check_count("elements", elements, 0)
    _check_count("ranks", ranks, 1)
    if ranks == 1 or ranks > MAX_RANKS:
        return "allgather"

    def seconds(transport: str) -> float:
        bucket = _TWOBIT[transport](elements, ranks, adaptive, link, DEFAULT_PROCESSOR)
        return bucket.exchange_s + bucket.compute_s

    return min(TRANSPORTS if adaptive else ("allgather", "sra"), key=seconds)


def cost(method: str, elements: int, ranks: int, *, ranks_per_machine: int = 1, adaptive: bool = True,
         link: Link = DEFAULT_LINK, bucket_cap_mb: float = DEFAULT_BUCKET_CAP_MB,
         processor: Processor = DEFAULT_PROCESSOR) -> Cost:
    """What one exchange of a gradient costs.

    Args:
        method: ``"fp32"``, ``"fp16"``, a transport of TwoBit, or ``"auto"``, which takes for each bucket what
            ``choose`` says of it (for ``DEFAULT_LINK``, as training does not know its link), or ``HIERARCHICAL``.
        elements: float32 elements of all tensors, 1 or more.
        ranks: number of ranks, 2 to 32,767.
        ranks_per_machine: how many of them share a machine and its link.
        adaptive: whether levels follow the gradient.
        link: the network between ranks, or between machines.
        bucket_cap_mb: most MiB of float32 gradient in a bucket of TwoBit.
        processor: how fast a rank computes.

    Raises:
        ConfigError: an argument cannot be used.
    """
    if method not in (*METHODS, HIERARCHICAL):
        raise ConfigError(f"unknown method {method!r}; known: {', '.join((*METHODS, HIERARCHICAL))}")
    _check_count("elements", elements, 1)
    _check_count("ranks", ranks, 2)
    if ranks > MAX_RANKS:
        raise ConfigError(f"ranks must be at most {MAX_RANKS:,}, not {ranks}: fields of 16 bits hold no sum of more")
    _check_count("ranks_per_machine", ranks_per_machine, 1)
    if ranks % ranks_per_machine or ranks == ranks_per_machine:
        raise ConfigError(f"{ranks} ranks cannot be {ranks_per_machine} on each of several machines")
    if method in UNCOMPRESSED:
        width = 4 if method == "fp32" else 2
        sizes = _sizes(elements, _FUSION_NBYTES // width)
        return _total(method, [(_uncompressed(width, size, ranks, link, processor), times) for size, times in sizes])
    sizes = _sizes(elements, bucket_elements(bucket_cap_mb))
    if method == HIERARCHICAL:
        machines = ranks // ranks_per_machine
        transports = [choose(-(-size // ranks_per_machine), machines, adaptive=adaptive) for size, _ in sizes]
        buckets = [(_two_levels(transport, size, machines, ranks_per_machine, adaptive, link, processor), times)
                   for transport, (size, times) in zip(transports, sizes)]
    else:
        transports = [choose(size, ranks, adaptive=adaptive) if method == AUTO else method for size, _ in sizes]
        buckets = [(_TWOBIT[transport](size, ranks, adaptive, link, processor, ranks_per_machine), times)
                   for transport, (size, times) in zip(transports, sizes)]
    return _total(method, buckets, tuple(dict.fromkeys(transports)))


def bucket_elements(bucket_cap_mb: float) -> int:
    """Elements of a full bucket: what fits into ``bucket_cap_mb`` MiB as float32, in whole blocks, at least one."""
    _check_number("bucket_cap_mb", bucket_cap_mb, above_zero=True)
    return max(1, int(bucket_cap_mb * 2**20 / 4) // DEFAULT_BLOCK_ELEMENTS) * DEFAULT_BLOCK_ELEMENTS


def _uncompressed(width: int, elements: int, ranks: int, link: Link, processor: Processor) -> _Bucket:
    """Horovod's allreduce of floats of ``width`` bytes."""
    add_s, cast_s = (processor.add_s, 0.0) if width == 4 else (processor.add_half_s, processor.cast_s)
    nbytes, exchange_s = _ring_allreduce(elements, width, add_s, ranks, link, processor)
    return _Bucket(nbytes, exchange_s, elements * cast_s)


def _allgather(elements: int, ranks: int, adaptive: bool, link: Link, processor: Processor,
               ranks_per_machine: int = 1) -> _Bucket:
    nbytes = (ranks - 1) * _payload_nbytes(elements, adaptive)
    return _Bucket(nbytes, _gathering(nbytes, ranks, link, processor) + _waiting(ranks - 1, ranks, link, processor),
                   elements * (processor.quantize_s + processor.unpack_s + ranks * processor.unpack_payload_s))


def _sra(elements: int, ranks: int, adaptive: bool, link: Link, processor: Processor,
         ranks_per_machine: int = 1) -> _Bucket:
    # Bytes of the first rank, whose chunk is the largest. Sums, and their decoding, are given the time of unpack_sum
    # over as many payloads: they move as many bytes.
    blocks = _blocks(elements)
    own_blocks = -(-blocks // ranks)
    own = min(elements, own_blocks * DEFAULT_BLOCK_ELEMENTS)
    others_sums = -(-(elements - own) * count_bits(ranks) // 8) + (ranks - 1) * HEADER_NBYTES
    if adaptive:
        others_sums += 4 * (blocks - own_blocks)
    nbytes = ranks_per_machine * (ranks - ranks_per_machine) * _payload_nbytes(own, adaptive) + others_sums
    waiting_s = _waiting(2, ranks, link, processor) + _waiting(ranks - 1, ranks, link, processor)
    compute_s = (elements * processor.quantize_s
                 + own * (processor.unpack_s + ranks * processor.unpack_payload_s)
                 + elements * (processor.unpack_s + processor.unpack_payload_s))
    return _Bucket(nbytes, _gathering(nbytes, ranks, link, processor) + waiting_s, compute_s)


def _allreduce(elements: int, ranks: int, adaptive: bool, link: Link, processor: Processor,
               ranks_per_machine: int = 1) -> _Bucket:
    integers = (Tallies(ranks, 1).integers(-(-elements // ELEMENTS_PER_WORD)) + ranks * HEADER_NBYTES // 4
                + _blocks(elements))
    if adaptive:
        integers += 2 * ranks * _blocks(elements)
    nbytes, exchange_s = _ring_allreduce(integers, 4, processor.add_s, ranks, link, processor)
    return _Bucket(nbytes, exchange_s, elements * (processor.quantize_s + processor.digits_s))


_TWOBIT: dict[str, Callable[..., _Bucket]] = {"allgather": _allgather, "sra": _sra, "allreduce": _allreduce}


def _two_levels(transport: str, elements: int, machines: int, ranks_per_machine: int, adaptive: bool, link: Link,
                processor: Processor) -> _Bucket:
    """A bucket that a machine's ranks divide; the one with the largest share is the last."""
    blocks = _blocks(elements)
    edges = [min(blocks * number // ranks_per_machine * DEFAULT_BLOCK_ELEMENTS, elements)
             for number in range(ranks_per_machine + 1)]
    shares = [stop - start for start, stop in zip(edges, edges[1:])]
    own = max(shares)
    shared = dataclasses.replace(link, bits_per_second=link.bits_per_second / ranks_per_machine)
    across = _TWOBIT[transport](own, machines, adaptive, shared, processor)
    nbytes = sum(_TWOBIT[transport](share, machines, adaptive, shared, processor).nbytes for share in shares if share)
    within_nbytes = 4 * (ranks_per_machine - 1) * own + 4 * (elements - own)
    return _Bucket(nbytes, across.exchange_s + within_nbytes * processor.tcp_s + 2 * processor.cycle_s,
                   across.compute_s + own * (ranks_per_machine - 1) * processor.add_s + elements * processor.copy_s)


def _blocks(elements: int) -> int:
    return -(-elements // DEFAULT_BLOCK_ELEMENTS)


def _payload_nbytes(elements: int, adaptive: bool) -> int:
    return Layout((elements,), DEFAULT_BLOCK_ELEMENTS if adaptive else 0).nbytes


def _ring_allreduce(values: int, width: int, add_s: float, ranks: int, link: Link,
                    processor: Processor) -> tuple[int, float]:
    """Bytes that a rank receives, and seconds, of an allreduce of ``values`` numbers of ``width`` bytes each."""
    nbytes = -(-2 * (ranks - 1) * values * width // ranks)
    half_s = _carrying(nbytes / 2, link, processor)
    added_s = values * (ranks - 1) / ranks * add_s
    return nbytes, (max(half_s, added_s) + half_s + values * processor.copy_s
                    + _waiting(2 * (ranks - 1), ranks, link, processor))


def _carrying(nbytes: float, link: Link, processor: Processor) -> float:
    """Seconds in which a rank receives ``nbytes``, without latency."""
    return nbytes * max(8 / (link.bits_per_second * link.payload_share), processor.tcp_s)


def _gathering(nbytes: float, ranks: int, link: Link, processor: Processor) -> float:
    """The same in an allgather or an alltoall, which between two ranks is done in one direction after the other."""
    return _carrying(nbytes, link, processor) * (2 if ranks == 2 else 1)


def _waiting(rounds: int, ranks: int, link: Link, processor: Processor) -> float:
    """Seconds of a collective of ``rounds`` rounds in which no byte of it travels: cycle, negotiation, latency."""
    return processor.cycle_s + (2 * (ranks - 1) + rounds) * link.latency_s


def _sizes(elements: int, cap: int) -> list[tuple[int, int]]:
    """Pieces of at most ``cap`` elements, as (elements, how many of them), the largest first."""
    full, rest = divmod(elements, cap)
    return [(size, times) for size, times in ((cap, full), (rest, 1)) if size and times]


def _total(method: str, buckets: list[tuple[_Bucket, int]], transports: tuple[str, ...] = ()) -> Cost:
    exchange_s = sum(times * bucket.exchange_s for bucket, times in buckets)
    compute_s = sum(times * bucket.compute_s for bucket, times in buckets)
    alone_s = buckets[0][0].compute_s
    return Cost(method, sum(times for _, times in buckets), sum(times * bucket.nbytes for bucket, times in buckets),
                exchange_s, compute_s, alone_s + max(exchange_s, compute_s - alone_s), transports)

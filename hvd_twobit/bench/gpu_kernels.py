"""``hvd-twobit bench kernels --device cuda``: how fast the Triton kernels are, compared with a copy on the same GPU.

The kernels move more bytes than they compute, so the measure is what the device needs to copy as many: every kernel is
timed right after ``copy_`` between two float32 tensors that reads and writes, together, the bytes that the kernel must
read and write. A copy of that size also leaves nothing in the caches that a kernel could use, unless all is small.

Three times are measured of a call: what the device takes for it, between events, while it is kept busy so that it never
waits for the host; how long the host is busy with it, the device being busy too; and, of the gradients of a model, the
whole time from the call until an idle device is done. What is reported are medians over rounds, and medians of ratios
within a round.

Targets: ``quantize_pack`` and ``unpack_sum`` of one rank at 85 % of the copy's bandwidth, for 25.6 and 256 million
elements; a call for one tensor keeps the host busy for 15 microseconds at most; the 161 gradients of ResNet-50 are
compressed in a millisecond. Nothing here was measured by the authors, who had no GPU at hand.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence

import click
import torch

from .. import kernels
from ..kernels import Quantizer, block_count, count_bits, counts_nbytes, packed_nbytes
from . import progress_bar
from .devices import cache_nbytes, check_memory, cuda_device, device_facts, free_nbytes
from .kernels import BLOCK_ELEMENTS, RANKS, THRESHOLDS, Columns, blocks_of, in_rounds, met, report, without_code_01
from .shapes import TENSOR_ELEMENTS, shapes_of
from .timers import Call, Timer, timer_of

SIZES = (TENSOR_ELEMENTS, 10 * TENSOR_ELEMENTS)
"""Elements of the tensors for which there are targets."""

SHARE_OF_COPY = 0.85
HOST_MICROSECONDS = 15.0
MODEL_MILLISECONDS = 1.0

LAUNCHES = 10
"""Calls in a sample."""

COUNTED_RANKS = (4, 8)
"""Of ``pack_counts`` and ``unpack_counts``: counts of 4 and of 8 bits."""

_BYTES_PER_ELEMENT = 45
"""More than a workload takes: gradient, residual, result and two copies' worth of them, codes and counts."""

_BYTES_OF_TIMER = 1 << 30

_ALIGNMENT = 128
"""Elements between the beginnings of two residuals, as of tensors with memory of their own."""



@dataclasses.dataclass(frozen=True)
class Targets:
    """What a case has to reach; None where nothing is set.

    Attributes:
        share_of_copy: at least.
        host_microseconds: at most.
        whole_milliseconds: at most.
    """

    share_of_copy: float | None = None
    host_microseconds: float | None = None
    whole_milliseconds: float | None = None

    def are_met(self, share_of_copy: float, host_microseconds: float, whole_milliseconds: float) -> dict[str, bool]:
        """By name, whether each target that is set is met."""
        found = {"share_of_copy": (share_of_copy, self.share_of_copy, 1),
                 "host_microseconds": (host_microseconds, self.host_microseconds, -1),
                 "whole_milliseconds": (whole_milliseconds, self.whole_milliseconds, -1)}
        return {name: sign * value >= sign * target
                for name, (value, target, sign) in found.items() if target is not None}


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel with one configuration.

    Attributes:
        kernel: name of the function.
        tensors: how many one call is for.
        elements: of all of them.
        ranks: payloads that are read; 1 where one is written.
        block: ``"one"`` per tensor, or the elements of a block.
        data: share of elements that get a level, how ranks' levels relate, or what counts are like.
        scale: what sums are multiplied by.
        nbytes: bytes of arguments and results, each of which is read or written once, or both; not counted: addresses
            of tensors and where they lie.
        targets: what has to be reached.
    """

    kernel: str
    tensors: int
    elements: int
    ranks: int
    block: str
    data: str
    scale: float
    nbytes: int
    targets: Targets


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What was measured of a case: medians over rounds.

    Attributes:
        case: of what.
        milliseconds: on the device.
        gigabytes_per_second: of the case's bytes.
        copy_gigabytes_per_second: of the copies before.
        share_of_copy: of the copies' bandwidth.
        host_microseconds: for which a call keeps the host busy.
        whole_milliseconds: from a call to its end on an idle device.
        is_cached: whether at least half of the bytes fit into the device's last cache.
        met: by name, whether each target is met.
    """

    case: Case
    milliseconds: float
    gigabytes_per_second: float
    copy_gigabytes_per_second: float
    share_of_copy: float
    host_microseconds: float
    whole_milliseconds: float
    is_cached: bool
    met: dict[str, bool]


@dataclasses.dataclass(frozen=True)
class Sample:
    """Seconds of one round: of a copy and of a call on the device, of calls on the host, of a whole call."""

    copy: float
    call: float
    host: Sequence[float]
    whole: float


class Workload:
    """Tensors on a device, made before anything is timed, and the calls that are timed.

    Args:
        device: where they are made.
        elements: of the gradient.
    """

    def __init__(self, device: torch.device, elements: int) -> None:
        self.device = device
        self.elements = elements
        self.backend = kernels.load("triton")
        self._random = torch.Generator(device).manual_seed(0)
        self._copied = torch.zeros((2, 1), device=device)

    def cases(self) -> list[tuple[Case, Call]]:
        """Every case that is measured and what runs it once, in the order of the tables."""
        raise NotImplementedError

    def reset(self) -> None:
        """Clear residuals, which decide how many elements get a level."""
        raise NotImplementedError

    def copy_of(self, nbytes: int) -> Call:
        """A copy that reads and writes so many bytes together, rounded up to 8."""
        elements = -(-nbytes // 8)
        if elements > self._copied.shape[1]:
            self._copied = torch.zeros((2, elements), device=self.device)
        return lambda: self._copied[0, :elements].copy_(self._copied[1, :elements])

    def _normal(self, elements: int) -> torch.Tensor:
        return torch.randn(elements, device=self.device, generator=self._random)

    def _codes(self, nbytes: int) -> torch.Tensor:
        """Codes of all ranks, uint8[ranks, nbytes]."""
        return without_code_01(torch.randint(0, 256, (max(RANKS), nbytes), dtype=torch.uint8, device=self.device,
                                             generator=self._random))

    def _quantizer(self, share: str, block_elements: int, blocks: int) -> Quantizer:
        threshold = torch.full((blocks,), THRESHOLDS[share], device=self.device)
        return Quantizer(block_elements, threshold, -threshold, threshold, -threshold)

    def _levels(self, ranks: int, blocks: int, by_rank: bool = False) -> torch.Tensor:
        levels = torch.tensor([0.5, -0.5], device=self.device).repeat(ranks, blocks, 1)
        return levels * torch.arange(1.0, ranks + 1, device=self.device)[:, None, None] if by_rank else levels


class TensorWorkload(Workload):
    """One tensor."""

    def __init__(self, device: torch.device, elements: int) -> None:
        super().__init__(device, elements)
        self.gradient = self._normal(elements)
        self.residual = torch.zeros(elements, device=device)
        self.out = torch.zeros(elements, device=device)
        self.packed = self._codes(packed_nbytes(elements))
        self.made = torch.zeros_like(self.packed[0])

    def reset(self) -> None:
        self.residual.zero_()

    def __str__(self) -> str:
        return f"{self.elements:,} elements"

    def cases(self) -> list[tuple[Case, Call]]:
        return [*self._quantize_cases(), *self._unpack_cases(), *self._count_cases()]

    def _quantize_cases(self) -> Iterator[tuple[Case, Call]]:
        for block, block_elements in blocks_of(self.elements):
            for share in THRESHOLDS:
                blocks = block_count(self.elements, block_elements)
                call = functools.partial(self.backend.quantize_pack, self.gradient, self.residual, self.made,
                                         self._quantizer(share, block_elements, blocks))
                yield self._case("quantize_pack", 1, block, share, 12 * self.elements + self.made.numel() + 24 * blocks,
                                 sized=True), call

    def _unpack_cases(self) -> Iterator[tuple[Case, Call]]:
        for block, block_elements in blocks_of(self.elements):
            for ranks in RANKS:
                for levels in ("symmetrical", "by rank")[:ranks]:
                    pairs = self._levels(ranks, block_count(self.elements, block_elements), levels == "by rank")
                    call = functools.partial(self.backend.unpack_sum, self.packed[:ranks], pairs, block_elements,
                                             self.out, 1 / ranks)
                    nbytes = 4 * self.elements + self.packed[:ranks].numel() + 4 * pairs.numel()
                    yield self._case("unpack_sum", ranks, block, levels, nbytes, 1 / ranks, sized=ranks == 1), call

    def _count_cases(self) -> Iterator[tuple[Case, Call]]:
        for ranks in COUNTED_RANKS:
            bits = count_bits(ranks)
            for planes in (1, 2):
                data = f"{planes} x {bits} bits"
                counts = torch.zeros((planes, counts_nbytes(self.packed.shape[1] // 4, bits)), dtype=torch.uint8,
                                     device=self.device)
                pack = functools.partial(self.backend.pack_counts, self.packed[:ranks], bits, counts)
                yield self._case("pack_counts", ranks, "-", data, self.packed[:ranks].numel() + counts.numel()), pack
                for block, block_elements in blocks_of(self.elements):
                    pairs = self._levels(1, block_count(self.elements, block_elements))[0]
                    unpack = functools.partial(self.backend.unpack_counts, counts, bits, pairs, block_elements,
                                               self.out, 1 / ranks)
                    nbytes = counts.numel() + 4 * pairs.numel() + 4 * self.elements
                    yield self._case("unpack_counts", ranks, block, data, nbytes, 1 / ranks), unpack

    def _case(self, kernel: str, ranks: int, block: str, data: str, nbytes: int, scale: float = 1.0,
              sized: bool = False) -> Case:
        """A case; ``sized``: of a kernel whose bandwidth has a target at ``SIZES``."""
        targets = Targets(share_of_copy=SHARE_OF_COPY if sized and self.elements in SIZES else None,
                          host_microseconds=HOST_MICROSECONDS)
        return Case(kernel, 1, self.elements, ranks, block, data, scale, nbytes, targets)


class ModelWorkload(Workload):
    """The gradients of a model, all in one call.

    Args:
        device: where they are made.
        elements: of each gradient.
        milliseconds: target of their compression.
    """

    def __init__(self, device: torch.device, elements: Sequence[int], milliseconds: float | None = None) -> None:
        super().__init__(device, sum(elements))
        self._milliseconds = milliseconds
        self.each = list(elements)
        self.gradients = list(map(self._normal, elements))
        self.outs = list(map(torch.empty_like, self.gradients))
        apart = [-(-of_one // _ALIGNMENT) * _ALIGNMENT for of_one in elements]
        self._all_residuals = torch.zeros(sum(apart), device=device)
        self.residuals = [piece[:of_one] for piece, of_one in zip(self._all_residuals.split(apart), elements)]
        self.runs = {"one": self.backend.Runs(elements, 0, device),
                     str(BLOCK_ELEMENTS): self.backend.Runs(elements, BLOCK_ELEMENTS, device)}
        words = self.runs["one"].words
        self.packed = self._codes(4 * words)
        self.made = torch.zeros_like(self.packed[0])

    def reset(self) -> None:
        self._all_residuals.zero_()

    def __str__(self) -> str:
        return f"{len(self.each)} gradients"

    def cases(self) -> list[tuple[Case, Call]]:
        return [*self._quantize_cases(), *self._unpack_cases()]

    def _quantize_cases(self) -> Iterator[tuple[Case, Call]]:
        for block, runs in self.runs.items():
            table = torch.zeros(8 * runs.blocks, dtype=torch.uint8, device=self.device) if block != "one" else None
            for share in THRESHOLDS:
                quantizer = self._quantizer(share, BLOCK_ELEMENTS, runs.blocks)
                call = functools.partial(self.backend.quantize_pack_runs, runs, self.gradients, self.residuals,
                                         self.made, quantizer, table)
                nbytes = 12 * self.elements + self.made.numel() + (16 if table is None else 24) * runs.blocks
                yield self._case("quantize_pack_runs", 1, block, share, nbytes, 1.0, self._milliseconds), call

    def _unpack_cases(self) -> Iterator[tuple[Case, Call]]:
        for block, runs in self.runs.items():
            for ranks in RANKS:
                pairs = self._levels(ranks, runs.blocks)
                call = functools.partial(self.backend.unpack_sum_runs, runs, self.packed[:ranks], pairs, self.outs,
                                         1 / ranks)
                nbytes = 4 * self.elements + self.packed[:ranks].numel() + 4 * pairs.numel()
                yield self._case("unpack_sum_runs", ranks, block, "symmetrical", nbytes, 1 / ranks), call

    def _case(self, kernel: str, ranks: int, block: str, data: str, nbytes: int, scale: float,
              milliseconds: float | None = None) -> Case:
        return Case(kernel, len(self.each), self.elements, ranks, block, data, scale, nbytes,
                    Targets(whole_milliseconds=milliseconds))


def run(device: str, elements: int | None, repeats: int, as_json: bool) -> None:
    """Measure on a GPU, and print tables or JSON to standard output.

    Args:
        device: ``cuda`` or ``cuda:NUMBER``.
        elements: of the tensor; by default ``SIZES``, as far as memory allows.
        repeats: rounds.
        as_json: print JSON and nothing else.

    Raises:
        click.ClickException: there is no such GPU, it has too little memory, or kernels do not run on it.
    """
    place = cuda_device(device)
    if elements is not None:
        check_memory(place, memory_of(elements), f"{elements:,} elements (--elements)")
    sizes = [elements] if elements is not None else list(fitting(place, SIZES))
    measurements = measure_on(place, sizes, resnet50(), repeats, quiet=as_json)
    report_on(place, measurements, repeats, as_json)


def resnet50() -> list[int]:
    """Elements of each of its gradients."""
    return [torch.Size(shape).numel() for shape in shapes_of("resnet50")]


def memory_of(elements: int) -> int:
    """Bytes of a device that are needed to measure with a tensor of so many elements, or rather more."""
    return _BYTES_PER_ELEMENT * elements + _BYTES_OF_TIMER


def fitting(device: torch.device, sizes: Sequence[int]) -> Iterator[int]:
    """Those sizes for which a device has memory."""
    free = free_nbytes(device)
    return (elements for elements in sizes if free is None or memory_of(elements) <= free)


def measure_on(device: torch.device, sizes: Sequence[int], model: Sequence[int], repeats: int, quiet: bool,
               launches: int = LAUNCHES) -> list[Measurement]:
    """Measure kernels.

    Args:
        device: a GPU, or the CPU where kernels are interpreted.
        sizes: elements of the single tensors.
        model: elements of each of a model's gradients.
        repeats: rounds.
        quiet: show no progress.
        launches: calls in a sample.

    Raises:
        click.ClickException: the device has too little memory, or kernels do not run on it.
    """
    target = MODEL_MILLISECONDS if list(model) == resnet50() else None
    check_memory(device, memory_of(sum(model)), f"{len(model)} gradients of {sum(model):,} elements")
    makers: list[Callable[[], Workload]] = [functools.partial(TensorWorkload, device, elements) for elements in sizes]
    makers.append(functools.partial(ModelWorkload, device, model, target))
    measurements = []
    timer = timer_of(device)
    with torch.no_grad(), timer.current(), progress_bar(quiet) as progress:
        for make in makers:
            task = progress.add_task("preparing", total=None)
            workload = make()
            progress.update(task, description=str(workload), total=repeats * len(workload.cases()))
            measurements += measure(workload, timer, repeats, launches, functools.partial(progress.advance, task))
            del workload  # Before the next one takes its memory.
            progress.remove_task(task)
    return measurements


def measure(workload: Workload, timer: Timer, repeats: int, launches: int,
            advance: Callable[[], object]) -> list[Measurement]:
    """Time all cases in ``repeats`` rounds; ``advance`` is called after each case.

    Raises:
        click.ClickException: a kernel does not run on the device.
    """
    cases = workload.cases()

    def on_device(case: Case, call: Call) -> list[float]:
        return timer.laps([workload.copy_of(case.nbytes), call], launches, workload.reset)

    def sample(case: Case, call: Call) -> Sample:
        copied, called = on_device(case, call)
        host = timer.host(call, launches)
        workload.reset()
        return Sample(copied, called, host, timer.whole(call))

    for case, call in cases:  # Kernels are compiled, memory is taken, and clocks rise.
        try:
            call()
            timer.finish()
        except Exception as error:  # Of compilers, drivers and devices: whatever it is, nothing can be measured.
            raise click.ClickException(f"{case.kernel} does not run on {workload.device} ({type(error).__name__}): "
                                       f"{error}") from error
        on_device(case, call)
    samples = in_rounds([functools.partial(sample, *each) for each in cases], repeats, advance)
    cache = cache_nbytes(workload.device)
    return [measurement_of(case, of_case, cache) for (case, _), of_case in zip(cases, samples)]


def measurement_of(case: Case, samples: Sequence[Sample], cache: int = 0) -> Measurement:
    """Medians of the samples of a case; ``cache``: bytes of the device's last cache."""
    copied = 8 * -(-case.nbytes // 8)
    seconds = statistics.median(sample.call for sample in samples)
    share = statistics.median((case.nbytes / sample.call) / (copied / sample.copy) for sample in samples)
    host = 1e6 * statistics.median(call for sample in samples for call in sample.host)
    whole = 1e3 * statistics.median(sample.whole for sample in samples)
    return Measurement(
        case=case, milliseconds=1e3 * seconds, gigabytes_per_second=case.nbytes / seconds / 1e9,
        copy_gigabytes_per_second=copied / statistics.median(sample.copy for sample in samples) / 1e9,
        share_of_copy=share, host_microseconds=host, whole_milliseconds=whole,
        is_cached=case.nbytes <= 2 * cache, met=case.targets.are_met(share, host, whole))


def report_on(device: torch.device, measurements: Sequence[Measurement], repeats: int, as_json: bool) -> None:
    """Print measurements as tables or JSON, with the facts of the device."""
    report(device_facts(device) | {"repeats": repeats, "launches": LAUNCHES}, measurements, _COLUMNS, _LEGEND, as_json)


def _elements(one: Measurement) -> str:
    return f"{one.case.elements / 1e6:.4g} M{'*' if one.is_cached else ' '}"


_BEGINNING: Columns = {"elements": _elements, "block": lambda one: one.case.block}
_RANKS: Columns = {"ranks": lambda one: str(one.case.ranks)}
_TIMES: Columns = {
    "ms": lambda one: f"{one.milliseconds:.3f}",
    "GB/s": lambda one: f"{one.gigabytes_per_second:.0f}",
    "/ copy": lambda one: f"{100 * one.share_of_copy:.0f} %",
    "met": lambda one: met(one.met.get("share_of_copy")),
    "host us": lambda one: f"{one.host_microseconds:.1f}",
}
_ONE_TENSOR: Columns = {**_TIMES, "met ": lambda one: met(one.met.get("host_microseconds"))}
_MODEL: Columns = {**_TIMES, "whole ms": lambda one: f"{one.whole_milliseconds:.3f}",
                   "met ": lambda one: met(one.met.get("whole_milliseconds"))}
_COLUMNS: dict[str, Columns] = {
    "quantize_pack": {**_BEGINNING, "not 00": lambda one: one.case.data, **_ONE_TENSOR},
    "unpack_sum": {**_BEGINNING, **_RANKS, "levels": lambda one: one.case.data, **_ONE_TENSOR},
    "pack_counts": {**_BEGINNING, **_RANKS, "counts": lambda one: one.case.data, **_ONE_TENSOR},
    "unpack_counts": {**_BEGINNING, **_RANKS, "counts": lambda one: one.case.data, **_ONE_TENSOR},
    "quantize_pack_runs": {**_BEGINNING, "not 00": lambda one: one.case.data, **_MODEL},
    "unpack_sum_runs": {**_BEGINNING, **_RANKS, **_MODEL},
}

_TARGET_SIZES = " and ".join(f"{elements / 1e6:g} M" for elements in SIZES)
_LEGEND = f"""
/ copy    share of the bandwidth of a copy of as many bytes, made right before;
          required: {100 * SHARE_OF_COPY:.0f} % for quantize_pack and for unpack_sum of one rank,
          of {_TARGET_SIZES} elements
host us   microseconds that a call keeps the host busy;
          required: at most {HOST_MICROSECONDS:g} for one tensor
whole ms  from the call until an idle device is done;
          required: at most {MODEL_MILLISECONDS:g} to compress the gradients of ResNet-50
*         half of the bytes or more fit into the device's cache: such data are
          moved faster than gradients in training
Medians. Times in ms are between events on the device. What ends in _runs takes
all gradients of a model in one call."""

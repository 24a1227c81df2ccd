"""``hvd-twobit bench kernels --device cpu``: how long the Numba kernels take, compared with NumPy's add and fill.

Both kernels move more bytes than they compute, so the measure is what NumPy needs to move as much:
``np.add(residual, gradient, out=residual)`` reads and writes what ``quantize_pack`` does, but for the codes, and
``out.fill(x)`` writes what ``unpack_sum`` does. Limits: 1.15 adds for ``quantize_pack``; 1.2 fills, and 1.8 adds for
every rank after the first, for ``unpack_sum``, where all ranks have the same symmetrical levels.

Each kernel is timed right after one add and one fill, round by round; what is reported are medians over rounds of
milliseconds and of ratios within a round.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable

import numpy as np

from .. import kernels
from ..kernels import Quantizer, block_count, packed_nbytes
from . import machine_facts, progress_bar
from .kernels import RANKS, THRESHOLDS, Columns, blocks_of, in_rounds, met, report, without_code_01
from .shapes import TENSOR_ELEMENTS

QUANTIZE_LIMIT_ADDS = 1.15
UNPACK_LIMIT_FILLS = 1.2
UNPACK_LIMIT_ADDS_PER_RANK = 1.8
"""For each rank after the first."""

LEVELS = ("symmetrical", "asymmetrical", "by rank")


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel with one configuration.

    Attributes:
        kernel: name of the function.
        ranks: payloads that are read (``unpack_sum``) or written (``quantize_pack``, always 1).
        block: ``"one"`` or the elements of a block.
        data: share of elements that get a level (``quantize_pack``), or how ranks' levels relate (``unpack_sum``).
        scale: what sums are multiplied by.
        nbytes: bytes that must cross the memory bus; not counted: lines read only because they will be overwritten.
        limit_adds, limit_fills: the time allowed, in units of the baselines; both 0 where no limit is set.
    """

    kernel: str
    ranks: int
    block: str
    data: str
    scale: float
    nbytes: int
    limit_adds: float = 0.0
    limit_fills: float = 0.0


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What was measured of a case: medians over rounds. The last two are None where no limit is set."""

    case: Case
    milliseconds: float
    gigabytes_per_second: float
    ratio_to_add: float
    ratio_to_fill: float
    ratio_to_limit: float | None
    met: bool | None


class Workload:
    """The arrays that all cases share, touched once before anything is timed; about 3.5 gradients of memory.

    Args:
        elements: elements of the gradient.
    """

    def __init__(self, elements: int) -> None:
        random = np.random.default_rng(0)
        self.elements = elements
        self.gradient = random.standard_normal(elements, np.float32)
        self.residual = np.zeros(elements, np.float32)
        self.out = np.zeros(elements, np.float32)
        self.packed = without_code_01(random.integers(0, 256, (max(RANKS), packed_nbytes(elements)), np.uint8))
        self.backend = kernels.load(kernels.DEFAULT_BACKEND)

    def cases(self) -> list[tuple[Case, Callable[[], object]]]:
        """Every case that is measured and what runs it once, in the order of the tables."""
        sizes = blocks_of(self.elements)
        quantize = [self._quantize_case(name, block_elements, share)
                    for name, block_elements in sizes for share in THRESHOLDS]
        unpack = [self._unpack_case(name, block_elements, levels, ranks, scale)
                  for levels in LEVELS for name, block_elements in sizes for ranks in RANKS
                  for scale in sorted({1.0, 1.0 / ranks}) if levels == "symmetrical" or scale == 1.0 / ranks
                  if levels != "by rank" or ranks > 1]
        return quantize + unpack

    def add(self) -> None:
        """The baseline of ``quantize_pack``."""
        np.add(self.residual, self.gradient, out=self.residual)

    def fill(self) -> None:
        """The baseline of ``unpack_sum``."""
        self.out.fill(1.5)

    def _quantize_case(self, block: str, block_elements: int, share: str) -> tuple[Case, Callable[[], object]]:
        threshold = np.full(block_count(self.elements, block_elements), THRESHOLDS[share], np.float32)
        quantizer = Quantizer(block_elements, threshold, -threshold, threshold, -threshold)

        def call() -> None:
            self.backend.quantize_pack(self.gradient, self.residual, self.packed[0], quantizer)

        nbytes = 3 * self.gradient.nbytes + self.packed[0].nbytes
        return Case("quantize_pack", 1, block, share, 1.0, nbytes, limit_adds=QUANTIZE_LIMIT_ADDS), call

    def _unpack_case(self, block: str, block_elements: int, kind: str, ranks: int,
                     scale: float) -> tuple[Case, Callable[[], object]]:
        levels = np.empty((ranks, block_count(self.elements, block_elements), 2), np.float32)
        levels[:] = (0.5, -0.25) if kind == "asymmetrical" else (0.5, -0.5)
        if kind == "by rank":
            levels *= np.arange(1, ranks + 1, dtype=np.float32)[:, None, None]

        def call() -> None:
            self.backend.unpack_sum(self.packed[:ranks], levels, block_elements, self.out, scale)

        nbytes = self.out.nbytes + ranks * self.packed[0].nbytes
        case = Case("unpack_sum", ranks, block, kind, scale, nbytes)
        if kind == "symmetrical":
            case = dataclasses.replace(case, limit_adds=UNPACK_LIMIT_ADDS_PER_RANK * (ranks - 1),
                                       limit_fills=UNPACK_LIMIT_FILLS)
        return case, call


def run(elements: int | None, repeats: int, as_json: bool) -> None:
    """Measure with a gradient of so many elements, by default as many as ResNet-50 has, and print tables or JSON."""
    elements = elements or TENSOR_ELEMENTS
    with progress_bar(quiet=as_json) as progress:
        task = progress.add_task("preparing", total=None)
        workload = Workload(elements)
        progress.update(task, description="measuring", total=repeats * len(workload.cases()))
        measurements = measure(workload, repeats, lambda: progress.advance(task))
    report(machine_facts() | {"elements": elements, "repeats": repeats}, measurements, _COLUMNS, _LEGEND, as_json)


def measure(workload: Workload, repeats: int, advance: Callable[[], None]) -> list[Measurement]:
    """Time all cases in ``repeats`` rounds; ``advance`` is called after each case."""
    cases = workload.cases()
    for _, call in cases:
        call()

    def sample(call: Callable[[], object]) -> tuple[float, float, float]:
        add, fill = _seconds(workload.add), _seconds(workload.fill)
        workload.residual.fill(0)  # it decides how many elements get a level
        return add, fill, _seconds(call)

    samples = in_rounds([functools.partial(sample, call) for _, call in cases], repeats, advance)
    return [_measurement(case, of_case) for (case, _), of_case in zip(cases, samples)]


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _measurement(case: Case, samples: list[tuple[float, float, float]]) -> Measurement:
    """Medians of samples, each the seconds of add, fill and kernel in one round."""
    milliseconds = 1e3 * statistics.median(kernel for _, _, kernel in samples)
    ratio_to_limit = None
    if case.limit_adds or case.limit_fills:
        ratio_to_limit = statistics.median(kernel / (case.limit_adds * add + case.limit_fills * fill)
                                           for add, fill, kernel in samples)
    return Measurement(
        case=case,
        milliseconds=milliseconds,
        gigabytes_per_second=case.nbytes / milliseconds / 1e6,
        ratio_to_add=statistics.median(kernel / add for add, _, kernel in samples),
        ratio_to_fill=statistics.median(kernel / fill for _, fill, kernel in samples),
        ratio_to_limit=ratio_to_limit,
        met=None if ratio_to_limit is None else ratio_to_limit <= 1.0)


def _ratio_to_limit(measurement: Measurement) -> str:
    return "-" if measurement.ratio_to_limit is None else f"{measurement.ratio_to_limit:.2f}"


_COLUMNS: dict[str, Columns] = {
    "quantize_pack": {
        "block": lambda one: one.case.block,
        "codes not 00": lambda one: one.case.data,
        "ms": lambda one: f"{one.milliseconds:.2f}",
        "GB/s": lambda one: f"{one.gigabytes_per_second:.1f}",
        "/ add": lambda one: f"{one.ratio_to_add:.2f}",
        "required": lambda one: f"{one.case.limit_adds:.2f}",
        "met": lambda one: met(one.met),
    },
    "unpack_sum": {
        "ranks": lambda one: str(one.case.ranks),
        "block": lambda one: one.case.block,
        "levels": lambda one: one.case.data,
        "scale": lambda one: f"{one.case.scale:g}",
        "ms": lambda one: f"{one.milliseconds:.2f}",
        "GB/s": lambda one: f"{one.gigabytes_per_second:.1f}",
        "/ add": lambda one: f"{one.ratio_to_add:.2f}",
        "/ limit": _ratio_to_limit,
        "required": lambda one: "-" if one.met is None else "1.00",
        "met": lambda one: met(one.met),
    },
}

_LEGEND = f"""
/ add    ratio to np.add(residual, gradient, out=residual)
/ limit  ratio to {UNPACK_LIMIT_FILLS} out.fill(x) + {UNPACK_LIMIT_ADDS_PER_RANK} add for each rank after the first
Medians, on one thread; each kernel is timed right after an add and a fill."""

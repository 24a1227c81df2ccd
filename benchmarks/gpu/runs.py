"""Kernels that take all gradients of a payload in one launch, against the reference run by run; also on streams."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hvd_twobit import kernels
from hvd_twobit.bench.gpu_kernels import resnet50
from hvd_twobit.kernels import Quantizer, counts_nbytes
from tests import tensor_reference

from .checking import Setup, differences
from .kernels import SPECIAL, levels_of

RANKS = 3
STREAMS = 4
STREAMED_LAUNCHES = 64

_FIELDS = ("positive_threshold", "negative_threshold", "positive_level", "negative_level")
_BUSY_ELEMENTS = 1 << 24


class Tensors:
    """The same flat tensors on the host and on a device.

    Args:
        values: of each.
        device: where the others are.
        together: whether those lie in one piece of memory, so that most are not aligned to 16 bytes.
    """

    def __init__(self, values: Sequence[np.ndarray], device: torch.device, together: bool) -> None:
        self.host = [torch.from_numpy(one.copy()) for one in values]
        if together:
            sizes = [len(one) + 1 for one in self.host]
            pieces = torch.zeros(sum(sizes), device=device).split(sizes)
            self.device = [piece[1:] for piece in pieces]
            for piece, one in zip(self.device, self.host):
                piece.copy_(one)
        else:
            self.device = [one.to(device, copy=True) for one in self.host]

    def compared(self, name: str) -> list[tuple[str, np.ndarray, np.ndarray]]:
        """For ``differences``."""
        return [(f"{name} of run {run}", one.cpu().numpy(), other.numpy())
                for run, (one, other) in enumerate(zip(self.device, self.host))]


def model(setup: Setup) -> Iterator[str]:
    """The gradients of ResNet-50 with a level each and one per 1024 elements, apart and within one piece of memory."""
    backend, random = kernels.load("triton"), setup.random()
    elements = resnet50() if setup.full else [33, 0, 20]
    all_blocks, ways = ((0, 1024), (False, True)) if setup.full else ((0, 16), (True,))
    for block_elements, together in itertools.product(all_blocks, ways):
        runs = backend.Runs(elements, block_elements, setup.device)
        reference = tensor_reference.Runs(elements, block_elements, torch.device("cpu"))
        of = f"{len(elements)} runs, blocks of {block_elements or 'all'}, {'together' if together else 'each alone'}"
        for part in (_quantized(backend, random, runs, reference, together),
                     _unpacked(backend, random, runs, reference, together)):
            for kernel, text in part:
                yield text and f"{kernel} of {of}: {text}"


def streams(setup: Setup) -> Iterator[str]:
    """One ``Runs`` used on several streams in turn, with new gradients each time, and without any waiting."""
    setup.needs_gpu("streams")
    backend, random, device = kernels.load("triton"), setup.random(), setup.device
    elements = [70_000, 5, 4096, 1025]
    runs = backend.Runs(elements, 1024, device)
    reference = tensor_reference.Runs(elements, 1024, torch.device("cpu"))
    quantizer = _quantizer(random, runs.blocks)
    there = _on(device, quantizer)
    launches = [_Launch(random, elements, runs, device) for _ in range(STREAMED_LAUNCHES)]
    busy = torch.zeros((2, _BUSY_ELEMENTS), device=device)
    all_streams = [torch.cuda.Stream(device) for _ in range(STREAMS)]
    torch.cuda.synchronize(device)
    for number, launch in enumerate(launches):
        with torch.cuda.stream(all_streams[number % STREAMS]):
            busy[0].copy_(busy[1])  # So that launches wait on the device, and the next ones overtake them on the host.
            launch.quantize(backend, runs, there)
    torch.cuda.synchronize(device)
    for launch in launches:
        yield launch.compared(reference, quantizer)


class _Launch:
    """Gradients, residuals and what is made of them in one launch."""

    def __init__(self, random: np.random.Generator, elements: Sequence[int], runs: Any, device: torch.device) -> None:
        self.gradients = Tensors([random.standard_normal(one, np.float32) for one in elements], device, together=False)
        self.residuals = Tensors([np.zeros(one, np.float32) for one in elements], device, together=False)
        sizes = 4 * runs.words, 8 * runs.blocks
        self.host = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        self.device = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]

    def quantize(self, backend: Any, runs: Any, quantizer: Quantizer) -> None:
        packed, table = self.device
        backend.quantize_pack_runs(runs, self.gradients.device, self.residuals.device, packed, quantizer, table)

    def compared(self, reference: tensor_reference.Runs, quantizer: Quantizer) -> str:
        tensor_reference.quantize_pack_runs(reference, self.gradients.host, self.residuals.host, self.host[0],
                                            quantizer, self.host[1])
        return differences([*self.gradients.compared("gradient"), *self.residuals.compared("residual"),
                            *[(name, one.cpu().numpy(), other.numpy())
                              for name, one, other in zip(("codes", "table"), self.device, self.host)]])


def _quantized(backend: Any, random: np.random.Generator, runs: Any, reference: tensor_reference.Runs,
               together: bool) -> Iterator[tuple[str, str]]:
    device = runs.device
    gradients = Tensors([_with_special(random, one) for one in runs.elements], device, together)
    residuals = Tensors([random.standard_normal(one, np.float32) for one in runs.elements], device, together)
    quantizer = _quantizer(random, runs.blocks)
    packed = [torch.full((4 * runs.words,), 0x55, dtype=torch.uint8, device=place) for place in ("cpu", device)]
    tables = [torch.full((8 * runs.blocks,), 0x55, dtype=torch.uint8, device=place) if runs.block_elements else None
              for place in ("cpu", device)]
    wanted = tensor_reference.quantize_pack_runs(reference, gradients.host, residuals.host, packed[0], quantizer,
                                                 tables[0])
    found = backend.quantize_pack_runs(runs, gradients.device, residuals.device, packed[1], _on(device, quantizer),
                                       tables[1])
    pairs = [*gradients.compared("gradient"), *residuals.compared("residual"),
             ("codes", packed[1].cpu().numpy(), packed[0].numpy()),
             ("numbers of codes", found.cpu().numpy(), wanted.numpy())]
    if tables[0] is not None and tables[1] is not None:
        pairs.append(("table", tables[1].cpu().numpy(), tables[0].numpy()))
    yield "quantize_pack_runs", differences(pairs)


def _unpacked(backend: Any, random: np.random.Generator, runs: Any, reference: tensor_reference.Runs,
              together: bool) -> Iterator[tuple[str, str]]:
    """Payloads lie apart, as they were received, 8 bytes of something else before each."""
    device, padding = runs.device, 8
    values = np.zeros((RANKS, padding + 4 * runs.words), np.uint8)
    values[:, padding:] = random.integers(0, 256, (RANKS, 4 * runs.words), np.uint8)  # Codes, all equally often.
    received = [torch.from_numpy(values)[:, padding:], torch.from_numpy(values).to(device)[:, padding:]]
    for levels in _levels_of_runs(random, RANKS, runs.blocks):
        outs = Tensors([np.full(one, 7, np.float32) for one in runs.elements], device, together)
        tensor_reference.unpack_sum_runs(reference, received[0], levels, outs.host, 1 / RANKS)
        backend.unpack_sum_runs(runs, received[1], levels.to(device), outs.device, 1 / RANKS)
        yield "unpack_sum_runs", differences(outs.compared("sum"))
    for bits, planes in ((4, 1), (8, 2)):
        counted = torch.from_numpy(random.integers(0, 256, (planes, counts_nbytes(runs.words, bits)), np.uint8))
        levels = _levels_of_runs(random, 1, runs.blocks)[0][0]
        outs = Tensors([np.full(one, 7, np.float32) for one in runs.elements], device, together)
        tensor_reference.unpack_counts_runs(reference, counted, bits, levels, outs.host, 1 / RANKS)
        backend.unpack_counts_runs(runs, counted.to(device), bits, levels.to(device), outs.device, 1 / RANKS)
        yield "unpack_counts_runs", differences(outs.compared("sum"))


def _with_special(random: np.random.Generator, elements: int) -> np.ndarray:
    values = random.standard_normal(elements, np.float32)
    at = random.integers(0, max(elements, 1), elements // 10)
    values[at] = random.choice(SPECIAL, at.size)
    return values


def _quantizer(random: np.random.Generator, blocks: int) -> Quantizer:
    """Thresholds and levels of all blocks of all runs, tensors of the CPU."""
    up, down, higher, lower = random.uniform(0.5, 4, (4, blocks)).astype(np.float32)
    up[::7] = down[::7] = 1e30  # Nothing is selected there, so that tables tell of what is left.
    return Quantizer(16, *map(torch.from_numpy, (up, -down, higher, -lower)))


def _on(device: torch.device, quantizer: Quantizer) -> Quantizer:
    return Quantizer(quantizer.block_elements, *(getattr(quantizer, field).to(device) for field in _FIELDS))


def _levels_of_runs(random: np.random.Generator, ranks: int, blocks: int) -> list[torch.Tensor]:
    """Levels float32[ranks, blocks, 2]: the same for all ranks, and of each rank its own."""
    symmetrical, _, by_rank, _ = levels_of(random, ranks, 16 * blocks, 16)
    return [torch.from_numpy(symmetrical), torch.from_numpy(by_rank)]

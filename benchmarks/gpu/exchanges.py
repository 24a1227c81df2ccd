"""Exchanges of a bucket as PyTorch's front end makes them on a device, with all ranks in this process.

Codec, kernels, copies to pinned memory, streams and events are the front end's own; only the collectives are played
(``tests/coders.py``). What ranks receive, their residuals and their levels have to be those of ranks that compress on
the host, to the bit, where all send from the device, all from pinned memory, and where every rank does otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvd_twobit import kernels
from hvd_twobit.bench.gpu_kernels import resnet50
from hvd_twobit.buckets import Bucket, Part
from hvd_twobit.codec import Codec
from hvd_twobit.config import TRANSPORTS, TwoBitConfig
from hvd_twobit.residuals import ResidualRegistry
from hvd_twobit.torch.coder import Coder, DeviceCoder, HostCoder, StagedCoder
from hvd_twobit.torch.memory import DeviceMemory
from hvd_twobit.transports import Planned
from tests.coders import carry

from .checking import Setup, differences
from .kernels import SPECIAL

RANKS = 3
SCALE = 1 / RANKS
STEPS = 4
THRESHOLDS = ("auto", 0.5)
MIXED = "each rank otherwise"
WORLDS: dict[str, tuple[type[Coder], ...]] = {
    "sent from the device": (DeviceCoder,) * RANKS,
    "sent from pinned memory": (StagedCoder,) * RANKS,
    MIXED: (DeviceCoder, StagedCoder, HostCoder),
}
_BUSY_ELEMENTS = 1 << 24

Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Rank:
    """One rank: its coder and what it keeps."""

    coder: Coder
    residuals: ResidualRegistry

    @property
    def is_host(self) -> bool:
        """Whether gradients are arrays."""
        return type(self.coder) is HostCoder


def exchanges(setup: Setup) -> Iterator[str]:
    """All transports, adaptive and fixed levels: several steps of a bucket of gradients of all sizes.

    Residuals have to be on the device of their gradients, too.
    """
    shapes = _shapes(setup)
    worlds, thresholds = (WORLDS, THRESHOLDS) if setup.full else ({MIXED: WORLDS[MIXED]}, THRESHOLDS[:1])
    for transport, threshold, (world, kinds) in itertools.product(TRANSPORTS, thresholds, worlds.items()):
        wanted_ranks = _ranks(setup, (HostCoder,) * RANKS, shapes, transport, threshold)
        found_ranks = _ranks(setup, kinds, shapes, transport, threshold)
        for step in range(STEPS if setup.full else 2):
            wanted = _step(setup, wanted_ranks, shapes, transport, step)
            found = _step(setup, found_ranks, shapes, transport, step)
            for rank in range(RANKS):
                text = differences([(f"sum of {name}", found[rank][name], wanted[rank][name]) for name in shapes]
                                   + list(_kept(found_ranks[rank], wanted_ranks[rank], shapes)))
                text = text or _misplaced(setup, found_ranks[rank])
                yield text and f"{transport}, {threshold}, {world}, step {step}, rank {rank}: {text}"


def no_waiting(setup: Setup) -> Iterator[str]:
    """What gradient hooks do waits for the device nowhere: PyTorch raises an error where it would."""
    setup.needs_gpu("requests that a host could wait for")
    shapes = _shapes(setup)
    for kind, transport, threshold in itertools.product((DeviceCoder, StagedCoder), TRANSPORTS, THRESHOLDS):
        ranks = _ranks(setup, (kind,) * RANKS, shapes, transport, threshold)
        for step in range(STEPS):
            try:
                _step(setup, ranks, shapes, transport, step, _no_synchronization)
            except RuntimeError as error:
                yield f"{kind.__name__}, {transport}, {threshold}, step {step}: {error}"
                break
            yield ""


CHECKS = {"exchanges of all ranks": exchanges, "no waiting in gradient hooks": no_waiting}


def _shapes(setup: Setup) -> Shapes:
    """Tensors of all sizes: the first ones of ResNet-50, a million elements, and some that end within a word."""
    sizes = [*resnet50()[:60], 70 * 50, 33, 0] if setup.full else [35, 0]
    return {f"tensor {number}": (size,) for number, size in enumerate(sizes)}


def _ranks(setup: Setup, kinds: Sequence[type[Coder]], shapes: Shapes, transport: str,
           threshold: Any) -> list[Rank]:
    """Ranks that have exchanged once uncompressed, so that they have levels."""
    blocks = {} if setup.full or threshold != "auto" else {"block_elements": 16}
    config = TwoBitConfig.from_arguments(threshold=threshold, min_elements=0, transport=transport, **blocks)
    bucket = Bucket(tuple(Part(name, shape, 0, math.prod(shape)) for name, shape in shapes.items()))
    ranks = []
    for rank, kind in enumerate(kinds):
        residuals = ResidualRegistry()
        codec = Codec(config, residuals, warns=False)
        for name, shape in shapes.items():
            codec.observe(name, shape, np.full(math.prod(shape), 0.5, np.float32), RANKS, SCALE)
        there = () if kind is HostCoder else (DeviceMemory(setup.device), kernels.load("triton"))
        ranks.append(Rank(kind(Planned(bucket, transport, RANKS), codec, rank, SCALE, *there), residuals))
    return ranks


def _step(setup: Setup, ranks: Sequence[Rank], shapes: Shapes, transport: str, step: int,
          hooks: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
          ) -> list[dict[str, np.ndarray]]:
    """Exchange once; what every rank gets.

    Args:
        setup: where.
        ranks: all of them.
        shapes: of tensors, by name.
        transport: of the bucket.
        step: its number, which chooses gradients.
        hooks: what surrounds that which gradient hooks do.
    """
    outs: list[dict[str, Any]] = []
    for number, rank in enumerate(ranks):
        values = _gradients(shapes, RANKS * step + number)
        if rank.is_host:
            for name, value in values.items():
                rank.coder.put(name, value)
            rank.coder.seal()
            outs.append(values)
        else:
            outs.append(_put_on_device(setup, rank.coder, values, hooks))
    carry([rank.coder for rank in ranks], transport)
    for rank, out in zip(ranks, outs):
        for name in shapes:
            rank.coder.take(name, out[name])
        rank.coder.forget()
    return [{name: value if isinstance(value, np.ndarray) else value.cpu().numpy() for name, value in out.items()}
            for out in outs]


def _put_on_device(setup: Setup, coder: Coder, values: Mapping[str, np.ndarray],
                   hooks: Callable[[], contextlib.AbstractContextManager[Any]]) -> dict[str, torch.Tensor]:
    """Give a coder gradients that were made on streams which are still busy when it takes them up."""
    sources = {name: torch.from_numpy(value).to(setup.device) for name, value in values.items()}
    gradients = {name: torch.zeros_like(source) for name, source in sources.items()}
    if not setup.full:
        streams: list[Any] = [contextlib.nullcontext()]
        busy = torch.zeros((2, 1))
    else:
        busy = torch.zeros((2, _BUSY_ELEMENTS), device=setup.device)
        others = [torch.cuda.Stream(setup.device) for _ in range(2)]
        torch.cuda.synchronize(setup.device)
        streams = [torch.cuda.stream(stream) for stream in others]
    with hooks():
        for number, (name, source) in enumerate(sources.items()):
            with streams[number % len(streams)]:
                busy[0].copy_(busy[1])
                gradients[name].copy_(source)
                coder.put(name, gradients[name])
        coder.seal()
    return gradients


@contextlib.contextmanager
def _no_synchronization() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _gradients(shapes: Shapes, seed: int) -> dict[str, np.ndarray]:
    """Gradients of a rank, of which a few are not finite or subnormal."""
    random = np.random.default_rng(seed)
    values = {name: random.standard_normal(math.prod(shape), np.float32) for name, shape in shapes.items()}
    for value in values.values():
        at = random.integers(0, max(value.size, 1), value.size // 20)
        value[at] = random.choice(SPECIAL, at.size)
    return values


def _misplaced(setup: Setup, rank: Rank) -> str:
    """Which residual is not where its gradient is; nothing where all are."""
    if rank.is_host:
        return ""
    for name in rank.residuals:
        residual = rank.residuals[name]
        if not isinstance(residual, torch.Tensor) or residual.device != setup.device:
            return f"the residual of {name} is not on {setup.device}"
    return ""


def _kept(found: Rank, wanted: Rank, shapes: Shapes) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Residuals and levels of a rank, for ``differences``."""
    for name, shape in shapes.items():
        one, other = found.residuals.tensor(name, shape), wanted.residuals.tensor(name, shape)
        yield f"residual of {name}", np.array(one.values), np.array(other.values)
        if one.levels is not None and other.levels is not None:
            yield f"levels of {name}", one.levels, other.levels

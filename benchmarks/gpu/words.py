"""Single tensors as ``hvd.allreduce(compression=TwoBit)`` exchanges them on a device, with all ranks in this process.

Codec, kernels and copies are the front end's own; only the sum over ranks is played. Words, what ranks receive, their
residuals and their levels have to be those of ranks that compress on the host, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hvd_twobit.config import TwoBitConfig
from hvd_twobit.digit_codec import HOST_WORDS, quantize_once, sum_of
from hvd_twobit.named import NamedTensor
from hvd_twobit.torch.words import DeviceTensors
from hvd_twobit.words import WordBackend

from .checking import Setup, differences
from .kernels import SPECIAL

RANKS = 3
SIZES = (1, 35, 2100, 1 << 20)
STEPS = 4
CONFIGURATIONS = {"auto": TwoBitConfig(), "0.5": TwoBitConfig(0.5, -0.5), "0.5 and -0.25": TwoBitConfig(0.5, -0.25)}


def words(setup: Setup) -> Iterator[str]:
    """Tensors with a name and without, of which the second rank's lies on the device, adaptive and fixed levels."""
    backends = [HOST_WORDS, DeviceTensors(setup.device), HOST_WORDS]
    for name, config in CONFIGURATIONS.items():
        for size in SIZES if setup.full else SIZES[:3]:
            wanted, found = ([NamedTensor("t", config, warns=False) for _ in range(RANKS)] for _ in range(2))
            for step in range(STEPS if setup.full else 2):
                tensors = _tensors(setup, size, step)
                compared = [("without a name", one, other) for one, other in
                            zip(_once(config, tensors, backends), _once(config, tensors, [HOST_WORDS] * RANKS))]
                compared += [("with a name", one, other) for one, other in
                             zip(_exchanged(found, tensors, backends), _exchanged(wanted, tensors,
                                                                                  [HOST_WORDS] * RANKS))]
                compared += _kept(found[1], wanted[1], size)
                text = differences(compared)
                yield text and f"{name}, {size} elements, step {step}: {text}"


def _tensors(setup: Setup, size: int, step: int) -> list[np.ndarray]:
    """Of all ranks. Sums of them are exact: where a tensor has no name, a device adds magnitudes in its own order."""
    random = np.random.default_rng((setup.seed, size, step))
    found = [(np.round(random.standard_normal(size) * 64) / 64).astype(np.float32) for _ in range(RANKS)]
    at = random.integers(0, size, size // 50)
    found[1][at] = random.choice(SPECIAL, at.size)
    return found


def _once(config: TwoBitConfig, tensors: Sequence[np.ndarray], backends: Sequence[WordBackend]) -> list[np.ndarray]:
    """What each rank gets of the sum of tensors without a name."""
    total = np.sum([backend.read(quantize_once(config, backend.take(tensor.copy()), rank, RANKS, backend))
                    for rank, (tensor, backend) in enumerate(zip(tensors, backends))], axis=0)
    outs = []
    for rank, backend in enumerate(backends):
        outs.append(backend.take(np.zeros(tensors[rank].size, np.float32)))
        sum_of(config, backend.take(total), "t", rank, RANKS, outs[-1], backend)
    return [np.array(backend.read(out)) for backend, out in zip(backends, outs)]


def _exchanged(ranks: Sequence[NamedTensor], tensors: Sequence[np.ndarray],
               backends: Sequence[WordBackend]) -> list[np.ndarray]:
    """What each rank gets of the sum of tensors with a name."""
    sent: list[Any] = []
    begun = []
    for rank, (tensor, values, backend) in enumerate(zip(ranks, tensors, backends)):
        made, exchange = tensor.encode((values.size,), backend.take(values.copy()), rank, RANKS, backend)
        sent.append(np.array(backend.read(made)))
        begun.append(exchange)
    total, outs = np.sum(sent, axis=0), []
    for tensor, exchange, backend in zip(ranks, begun, backends):
        outs.append(backend.take(np.zeros(tensors[0].size, np.float32)))
        tensor.decode(exchange, backend.take(total), outs[-1], backend)
    return [np.array(backend.read(out)) for backend, out in zip(backends, outs)]


def _kept(found: NamedTensor, wanted: NamedTensor, size: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Residual and levels, where there are any yet."""
    one, other = (tensor.residuals.tensor("t", (size,)) for tensor in (found, wanted))
    if other.has_residual:
        yield "residual", np.array(one.values), np.array(other.values)
    if one.levels is not None and other.levels is not None:
        yield "levels", one.levels, other.levels

"""All ranks in one process: what Horovod with TwoBit has to return, from the NumPy kernels alone.

Nothing of codec, payload or front ends is used, so that a mistake there cannot hide here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_twobit import kernels
from hvd_twobit.checks.simulation import SimulatedAdaptiveTensor, exchange, reference, uncompressed


class SimulatedTensor:
    """One compressed tensor on all ranks, with fixed thresholds.

    Args:
        thresholds: positive and negative threshold of each rank.
        elements: elements of the tensor.
        warmup_steps: uncompressed exchanges at the beginning.
    """

    levels: Sequence[np.float32] = ()

    def __init__(self, thresholds: Sequence[tuple[float, float]], elements: int, warmup_steps: int = 0) -> None:
        self.residuals = [np.zeros(elements, np.float32) for _ in thresholds]
        self._uncompressed = warmup_steps
        self._quantizers = [kernels.Quantizer.fixed(*pair, elements) for pair in thresholds]
        self._levels = np.array([[pair] for pair in thresholds], np.float32)

    def step(self, gradients: Sequence[np.ndarray], scale: float, received: bool = True) -> np.ndarray:
        """One exchange: float32 gradients of all ranks in, or of the first few, the scaled sum out, flat float32."""
        if self.is_uncompressed:
            summed = uncompressed(gradients, scale).reshape(-1)
            self.observe(summed, scale)
            return summed
        out, _ = exchange(self._quantizers, self._levels[:len(gradients)], self.residuals, gradients, scale)
        return out

    @property
    def is_uncompressed(self) -> bool:
        """Whether the next exchange is."""
        return self._uncompressed > 0

    def observe(self, summed: np.ndarray, scale: float) -> None:
        """An exchange was uncompressed."""
        self._uncompressed -= 1


class SimulatedMachines:
    """One tensor on machines with equally many ranks each, whose gradients are added or averaged there in float32.

    Args:
        tensor: simulated on as many ranks as there are machines.
        averages: whether a machine compresses the mean of its ranks' gradients or their sum.
        scale: factor of the sum over all ranks, for what travels uncompressed.
    """

    def __init__(self, tensor: SimulatedTensor | SimulatedAdaptiveTensor, averages: bool, scale: float) -> None:
        self._tensor = tensor
        self._averages = averages
        self._scale = scale

    @property
    def machines(self) -> int:
        return len(self._tensor.residuals)

    @property
    def residuals(self) -> list[np.ndarray]:
        """One per machine."""
        return self._tensor.residuals

    @property
    def levels(self) -> Sequence[np.float32]:
        return self._tensor.levels

    def step(self, gradients: Sequence[np.ndarray], scale: float, received: bool = True) -> np.ndarray:
        """One exchange: gradients of all ranks in, machine by machine, the scaled sum over machines out."""
        if self._tensor.is_uncompressed:
            summed = uncompressed(gradients, self._scale).reshape(-1)
            self._tensor.observe(summed, scale)
            return summed
        local_size = len(gradients) // self.machines
        of_machines = []
        for first in range(0, len(gradients), local_size):
            total = gradients[first].astype(np.float32)
            for other in gradients[first + 1:first + local_size]:
                total = total + other
            of_machines.append(total / np.float32(local_size) if self._averages else total)
        return self._tensor.step(of_machines, scale, received)


def summed_once(compression: Any, tensors: Sequence[np.ndarray], scale: float, most_ranks: int) -> np.ndarray:
    """What ``hvd.allreduce`` returns for float32 tensors of all ranks that are exchanged once, flat float32.

    Args:
        compression: arguments of TwoBit; None for the class itself.
        tensors: one of each rank.
        scale: factor of the sum.
        most_ranks: ranks of the job; they determine which elements share a word.
    """
    flat = [np.ascontiguousarray(tensor, np.float32).reshape(-1) for tensor in tensors]
    elements = flat[0].size
    residuals = [np.zeros(elements, np.float32) for _ in flat]
    if is_adaptive(compression):
        block_elements = (compression or {}).get("block_elements", 1024)
        starts = range(0, max(elements, 1), block_elements)
        means = [np.array([np.mean(np.abs(tensor[start:start + block_elements], dtype=np.float64))
                           for start in starts], np.float32) for tensor in flat]
        quantizers = [kernels.Quantizer(block_elements, mean, -mean, mean, -mean) for mean in means]
        packed = np.zeros((len(flat), kernels.packed_nbytes(elements)), np.uint8)
        selected = [reference.quantize_pack(*parts) for parts in zip(flat, residuals, packed, quantizers)]
        total = np.sum([sums.astype(np.float64) for sums, _ in selected], axis=0)
        count = np.sum([counts for _, counts in selected], axis=0)
        level = np.array(total / np.maximum(count, 1), np.float32)
        levels = np.array([np.stack([level, -level], axis=1)] * len(flat))
        out = np.empty(elements, np.float32)
        reference.unpack_sum(packed, levels, block_elements, out, scale)
        return out
    thresholds = thresholds_of(compression, 0)
    symmetric = thresholds[0] == -thresholds[1]
    quantizer = kernels.Quantizer.fixed(*thresholds, elements)
    levels = np.array([[thresholds]] * len(flat), np.float32)
    out, _ = exchange([quantizer] * len(flat), levels, residuals, flat, scale)
    group = 16 * kernels.Digits(most_ranks, symmetric).per_word
    for element in np.flatnonzero(np.isnan(out)):
        start = element // group * group
        out[start + element % 16:min(start + group, elements):16] = np.nan
    return out


def gradient(seed: int, rank: int, step: int, name: str, shape: Sequence[int], dyadic: bool = False) -> np.ndarray:
    """A reproducible float32 gradient with a heavy tail.

    ``dyadic`` ones are multiples of 1/8 up to 8: four ranks' add up and average exactly, in any order and in bfloat16.
    """
    generator = np.random.default_rng([seed, rank, step, *name.encode()])
    values = generator.standard_normal(tuple(shape)) * np.exp(generator.standard_normal(tuple(shape)))
    return np.asarray(np.clip(np.round(values * 8) / 8, -8, 8) + 0.0 if dyadic else values * 0.3, np.float32)


def assert_same_bits(found: np.ndarray, wanted: np.ndarray, what: str) -> None:
    """Equal dtype, shape and bits; NaNs equal one another."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), what
    same = (found.view(f"u{found.itemsize}") == wanted.view(f"u{wanted.itemsize}")) if found.ndim else found == wanted
    different = ~(same | (np.isnan(found) & np.isnan(wanted)))
    assert not different.any(), f"{what}: {np.count_nonzero(different)} of {found.size} elements differ, " \
                                f"first {found[different].flat[0]!r} instead of {wanted[different].flat[0]!r}"


def assert_same_steps(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray], what: str) -> None:
    """As many steps, each with the same bits."""
    assert len(found) == len(wanted), what
    for number, pair in enumerate(zip(found, wanted)):
        assert_same_bits(*pair, f"{what}, step {number}")


def assert_same_state(states: Sequence[Mapping[str, Any]], tensors: Mapping[str, Any], block_elements: int = 1024,
                      unit: float = 1.0) -> None:
    """The residuals and levels of ranks are those of simulated tensors, or shares of those of their machine.

    Args:
        states: of each rank, ``residuals`` and ``levels`` by name.
        tensors: by name; all of them with machines, or none.
        block_elements: elements that share a level.
        unit: by what the gradients were multiplied from which the states come.
    """
    if not any(isinstance(tensor, SimulatedMachines) for tensor in tensors.values()):
        for rank, state in enumerate(states):
            assert state["residuals"].keys() == tensors.keys()
            assert state["levels"].keys() == {name for name, tensor in tensors.items() if len(tensor.levels)}
            for name, found in state["residuals"].items():
                assert_same_bits(found.reshape(-1) / np.float32(unit), tensors[name].residuals[rank],
                                 f"residual {name}, rank {rank}")
            for name, found in state["levels"].items():
                assert_same_bits(found / np.float32(unit), np.array(tensors[name].levels),
                                 f"levels {name}, rank {rank}")
        return
    local_size = len(states) // next(iter(tensors.values())).machines
    covered: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for rank, state in enumerate(states):
        for entry, found in state["residuals"].items():
            name, bounds = entry[:-1].rsplit("[", 1)
            start, stop = map(int, bounds.split(":"))
            covered.setdefault((rank // local_size, name), []).append((start, stop))
            assert_same_bits(found / np.float32(unit), tensors[name].residuals[rank // local_size][start:stop],
                             f"residual {entry}, rank {rank}")
            if len(tensors[name].levels) and start < stop:
                blocks = slice(start // block_elements, -(-stop // block_elements))
                assert_same_bits(state["levels"][entry] / np.float32(unit), np.array(tensors[name].levels[blocks]),
                                 f"levels {entry}, rank {rank}")
    for name, tensor in tensors.items():
        for machine, residual in enumerate(tensor.residuals):
            shares = sorted(covered.get((machine, name), []))
            assert [0, *(stop for _, stop in shares)] == [*(start for start, _ in shares), residual.size], name


def is_adaptive(compression: Any) -> bool:
    """Whether levels adapt in a TwoBit made of these arguments (None: the class itself; a list: one per rank)."""
    return not isinstance(compression, list) and not any(
        "threshold" in name or name in ("compress", "type") for name in compression or {})


def simulated(compression: Any, ranks: Sequence[int], elements: int) -> SimulatedTensor | SimulatedAdaptiveTensor:
    """A tensor that these ranks exchange with a TwoBit made of these arguments."""
    if is_adaptive(compression):
        arguments = compression or {}
        return SimulatedAdaptiveTensor(len(ranks), elements, arguments.get("warmup_steps", 0),
                                       arguments.get("block_elements", 1024))
    warmup_steps = 0 if isinstance(compression, list) else compression.get("warmup_steps", 0)
    return SimulatedTensor([thresholds_of(compression, rank) for rank in ranks], elements, warmup_steps)


def uncompressed_steps(compression: Any) -> int:
    """Steps in which every gradient travels uncompressed with a TwoBit made of these arguments."""
    warmup_steps = 0 if isinstance(compression, list) else (compression or {}).get("warmup_steps", 0)
    return warmup_steps + is_adaptive(compression)


def thresholds_of(compression: Any, rank: int) -> tuple[float, float]:
    """Positive and negative threshold of a rank whose TwoBit is made of these arguments (a list: one per rank)."""
    if isinstance(compression, list):
        compression = compression[rank % len(compression)]
    arguments = compression
    symmetric = arguments.get("threshold", 0.5)
    return arguments.get("positive_threshold", symmetric), arguments.get("negative_threshold", -symmetric)

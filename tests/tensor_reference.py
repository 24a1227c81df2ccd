"""The NumPy kernels with the interface of the Triton ones, for tensors of the CPU.

Front ends' ways of a device are tested with it in every configuration, faster than Triton's interpreter allows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hvd_twobit import kernels
from hvd_twobit.kernels import Digits, Quantizer, Tallies
from hvd_twobit.payload import BLOCK_TABLE, Layout

reference = kernels.load("numpy")

_FIELDS = ("positive_threshold", "negative_threshold", "positive_level", "negative_level")


class Runs:
    """As ``kernels.triton.Runs``."""

    def __init__(self, elements: Sequence[int], block_elements: int, device: torch.device) -> None:
        self.elements, self.block_elements, self.device = tuple(elements), block_elements, device
        layout = Layout(self.elements, block_elements)
        self.words = layout.words
        self.run_words = layout.run_words
        self.run_blocks = layout.run_blocks if block_elements else tuple(
            slice(run, run + 1) for run in range(len(self.elements)))
        self.blocks = self.run_blocks[-1].stop if self.elements else 0

    def of(self, run: int) -> tuple[slice, slice, int]:
        """Bytes of codes, blocks, and the elements of a block."""
        words = self.run_words[run]
        return (slice(4 * words.start, 4 * words.stop), self.run_blocks[run],
                self.block_elements or kernels.whole_tensor(self.elements[run]))


def quantize_pack_runs(runs: Runs, gradients: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor],
                       packed: torch.Tensor, quantizer: Quantizer, table: torch.Tensor | None) -> torch.Tensor:
    nonzero = torch.zeros(len(runs.elements), dtype=torch.int64)
    for run, (gradient, residual) in enumerate(zip(gradients, residuals)):
        codes, blocks, block_elements = runs.of(run)
        one = Quantizer(block_elements, *(getattr(quantizer, field).numpy()[blocks] for field in _FIELDS))
        sums, counts = reference.quantize_pack(gradient.numpy(), residual.numpy(), packed.numpy()[codes], one)
        nonzero[run] = int(counts.sum())
        if table is not None:
            entries = table.numpy().view(BLOCK_TABLE)[blocks]
            for number, count in enumerate(counts):
                left = np.abs(residual.numpy()[number * block_elements:(number + 1) * block_elements])
                found = sums[number] if count else reference.sum_in_lanes(left)
                entries[number] = min(found, np.finfo(np.float32).max), count
    return nonzero


def unpack_sum_runs(runs: Runs, packed: torch.Tensor, levels: torch.Tensor, outs: Sequence[torch.Tensor],
                    scale: float) -> None:
    for run, out in enumerate(outs):
        codes, blocks, block_elements = runs.of(run)
        reference.unpack_sum(packed.numpy()[:, codes], np.ascontiguousarray(levels.numpy()[:, blocks]), block_elements,
                             out.numpy(), scale)


def unpack_counts_runs(runs: Runs, counts: torch.Tensor, bits: int, levels: torch.Tensor, outs: Sequence[torch.Tensor],
                       scale: float) -> None:
    for run, out in enumerate(outs):
        _, blocks, block_elements = runs.of(run)
        words = runs.run_words[run]
        part = counts.numpy()[:, kernels.counts_nbytes(words.start, bits):kernels.counts_nbytes(words.stop, bits)]
        reference.unpack_counts(part, bits, levels.numpy()[blocks], block_elements, out.numpy(), scale)


def quantize_pack(gradient: torch.Tensor, residual: torch.Tensor, packed: torch.Tensor,
                  quantizer: Quantizer) -> tuple[torch.Tensor, torch.Tensor]:
    one = Quantizer(quantizer.block_elements, *(getattr(quantizer, field).numpy() for field in _FIELDS))
    sums, counts = reference.quantize_pack(gradient.numpy(), residual.numpy(), packed.numpy(), one)
    return torch.from_numpy(sums), torch.from_numpy(counts.view(np.int32))


def unpack_sum(packed: torch.Tensor, levels: torch.Tensor, block_elements: int, out: torch.Tensor,
               scale: float = 1.0) -> None:
    reference.unpack_sum(packed.numpy(), levels.numpy(), block_elements, out.numpy(), scale)


def pack_counts(packed: torch.Tensor, bits: int, counts: torch.Tensor) -> None:
    reference.pack_counts(packed.numpy(), bits, counts.numpy())


def pack_tallies(packed: torch.Tensor, tallies: Tallies, words: torch.Tensor) -> torch.Tensor:
    return torch.tensor(reference.pack_tallies(packed.numpy(), tallies, words.numpy().view(np.uint32)))


def unpack_tallies(words: torch.Tensor, tallies: Tallies, contributors: int, bits: int, counts: torch.Tensor) -> None:
    reference.unpack_tallies(words.numpy().view(np.uint32), tallies, contributors, bits, counts.numpy())


def pack_digits(packed: torch.Tensor, digits: Digits, words: torch.Tensor) -> None:
    reference.pack_digits(packed.numpy(), digits, words.numpy())


def unpack_digits(words: torch.Tensor, digits: Digits, divisor: float, levels: torch.Tensor, block_elements: int,
                  out: torch.Tensor, scale: float = 1.0) -> None:
    reference.unpack_digits(words.numpy(), digits, divisor, levels.numpy(), block_elements, out.numpy(), scale)

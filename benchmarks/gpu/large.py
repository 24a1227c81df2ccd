"""Tensors whose bytes, or elements, no 32-bit number tells.

What the reference would need minutes for is a pattern here that is repeated all over the tensor: where the reference
knows what becomes of the pattern, every repetition on the device has to become that, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from hvd_twobit import kernels
from hvd_twobit.bench.devices import free_nbytes
from hvd_twobit.kernels import Quantizer, packed_nbytes, whole_tensor

from .arranging import REFERENCE
from .checking import LeftOut, Setup, difference
from .kernels import levels_of, quantized

PERIOD = 48 * 1024
"""Elements of the pattern: whole blocks, and no power of two."""

TAIL = 37
MORE_THAN_2_31_BYTES = (2**29 // PERIOD + 1) * PERIOD + TAIL
MORE_THAN_2_31_ELEMENTS = (2**31 // PERIOD + 1) * PERIOD + TAIL
"""Elements: whole patterns and a rest."""

_BLOCK_ELEMENTS = 1024
_PERIODS_AT_ONCE = 1024
_FIELDS = ("positive_threshold", "negative_threshold", "positive_level", "negative_level")
_BYTES_PER_ELEMENT = 10
"""Gradient, residual, codes of two ranks, and what quantizing takes besides; the result of unpacking has the gradient's
memory."""


def bytes_beyond_32_bits(setup: Setup) -> Iterator[str]:
    """More than 2^31 bytes."""
    return _large(setup, MORE_THAN_2_31_BYTES)


def elements_beyond_32_bits(setup: Setup) -> Iterator[str]:
    """More than 2^31 elements."""
    return _large(setup, MORE_THAN_2_31_ELEMENTS)


def _large(setup: Setup, elements: int) -> Iterator[str]:
    """Quantize a tensor of whole patterns and ``TAIL`` elements, in blocks and as one, and add up codes of it."""
    setup.needs_gpu("tensors of gigabytes")
    free, nbytes = free_nbytes(setup.device), _BYTES_PER_ELEMENT * elements + (1 << 30)
    if free is not None and free < nbytes:
        raise LeftOut(f"takes {nbytes / 2**30:.0f} GiB, but {free / 2**30:.0f} GiB are free")
    random, device, backend = setup.random(), setup.device, kernels.load("triton")
    values, residuals, quantizer = quantized(random, PERIOD, _BLOCK_ELEMENTS)
    gradient = repeated(values, elements, device)
    residual = repeated(residuals, elements, device)
    packed = torch.full((2, packed_nbytes(elements)), 0x55, dtype=torch.uint8, device=device)

    blocks = -(-elements // _BLOCK_ELEMENTS)
    wanted, tail = _references(values, residuals, quantizer)
    sums, counts = backend.quantize_pack(gradient, residual, packed[0], _each(
        quantizer, lambda field: torch.from_numpy(np.resize(field, blocks)).to(device)))
    yield _told("codes in blocks", packed[0], wanted.codes, tail.codes)
    yield _told("residual in blocks", residual, wanted.residual, tail.residual)
    yield _told("sums in blocks", sums, wanted.sums, tail.sums)
    yield _told("counts in blocks", counts, wanted.counts, tail.counts)
    del sums, counts

    one = Quantizer(whole_tensor(elements), *(np.array([value], np.float32) for value in (0.75, -0.5, 1.0, -0.25)))
    wanted, tail = _references(values, residuals, dataclasses.replace(
        _each(one, lambda field: np.resize(field, PERIOD // _BLOCK_ELEMENTS)), block_elements=_BLOCK_ELEMENTS))
    fill(residual, residuals)
    sums, counts = backend.quantize_pack(gradient, residual, packed[1], _each(
        one, lambda field: torch.from_numpy(field).to(device)))
    yield _told("codes in one block", packed[1], wanted.codes, tail.codes)
    yield _told("residual in one block", residual, wanted.residual, tail.residual)
    periods = elements // PERIOD
    chunks = np.concatenate([np.tile(wanted.sums, periods), tail.sums]).astype(np.float64)
    yield difference(sums.cpu().numpy(), np.cumsum(chunks)[-1:].astype(np.float32))  # One after the other, in float64.
    number = int(wanted.counts.sum()) * periods + int(tail.counts.sum())
    yield "" if counts.item() % 2**32 == number else f"count of one block: {counts.item()} instead of {number}"

    del residual
    symmetrical, *_ = levels_of(random, 2, 16, 0)
    out = gradient
    backend.unpack_sum(packed, torch.from_numpy(symmetrical).to(device), one.block_elements, out, 0.75)
    of_pattern, of_tail = np.empty(PERIOD, np.float32), np.empty(TAIL, np.float32)
    both = [_codes_of(packed, 0, PERIOD), _codes_of(packed, periods * PERIOD, TAIL)]
    for codes, into in zip(both, (of_pattern, of_tail)):
        REFERENCE.unpack_sum(codes, symmetrical, whole_tensor(into.size), into, 0.75)
    yield _told("sums of codes", out, of_pattern, of_tail)


def repeated(pattern: np.ndarray, elements: int, device: torch.device) -> torch.Tensor:
    """A tensor of so many elements, filled with a pattern over and over."""
    tensor = torch.empty(elements, dtype=torch.from_numpy(pattern).dtype, device=device)
    fill(tensor, pattern)
    return tensor


def fill(tensor: torch.Tensor, pattern: np.ndarray) -> None:
    """Overwrite a tensor with a pattern, over and over."""
    periods = tensor.numel() // pattern.size
    there = torch.from_numpy(pattern).to(tensor.device)
    tensor[:periods * pattern.size].view(periods, pattern.size).copy_(there)
    tensor[periods * pattern.size:].copy_(there[:tensor.numel() - periods * pattern.size])


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """What the reference makes of a gradient in blocks of 1024, which are also chunks of sums; counts are int32."""

    codes: np.ndarray
    residual: np.ndarray
    sums: np.ndarray
    counts: np.ndarray


def _references(values: np.ndarray, residuals: np.ndarray, quantizer: Quantizer) -> tuple[_Wanted, _Wanted]:
    """What becomes of the pattern, and of what follows its last repetition."""
    found = []
    for elements, of_blocks in ((values.size, quantizer), (TAIL, _each(quantizer, lambda field: field[:1]))):
        residual, packed = residuals[:elements].copy(), np.zeros(packed_nbytes(elements), np.uint8)
        sums, counts = REFERENCE.quantize_pack(values[:elements], residual, packed, of_blocks)
        found.append(_Wanted(packed, residual, sums, counts.view(np.int32)))
    return found[0], found[1]


def _each(quantizer: Quantizer, change: Callable[[np.ndarray], Any]) -> Quantizer:
    """A quantizer with other arrays."""
    return Quantizer(quantizer.block_elements, *(change(getattr(quantizer, field)) for field in _FIELDS))


def _codes_of(packed: torch.Tensor, first: int, elements: int) -> np.ndarray:
    return packed[:, first // 4:first // 4 + packed_nbytes(elements)].cpu().numpy()


def _told(name: str, found: torch.Tensor, pattern: np.ndarray, tail: np.ndarray) -> str:
    """What differs from a pattern that is repeated, and from what follows the last repetition; or nothing."""
    periods = (found.numel() - tail.size) // pattern.size
    wanted = _bits(torch.from_numpy(pattern).to(found.device))
    whole = found[:periods * pattern.size].view(periods, pattern.size)
    wrong = sum(int((_bits(part) != wanted).sum()) for part in whole.split(_PERIODS_AT_ONCE))
    rest = difference(found[periods * pattern.size:].cpu().numpy(), tail)
    return f"{name}: {wrong} of {whole.numel()} differ, and of the rest {rest or 'none'}" if wrong or rest else ""


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Numbers as integers of the same bits, but that all NaNs are one."""
    if not values.is_floating_point():
        return values
    return torch.where(values.isnan(), torch.nan, values).view(torch.int32)

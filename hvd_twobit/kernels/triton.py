"""The kernels in Triton: gradients are compressed on the GPU where they are. Bit-equal to ``reference.py``.

Functions take torch tensors where the interface has arrays, all on one device: int32 where it has uint32 (the bits are
the same), and a ``Quantizer`` of tensors. They launch on the current stream and do not wait for the device; what they
return is on the device too. ``quantize_pack_runs``, ``unpack_sum_runs`` and ``unpack_counts_runs`` do for all runs of a
payload, in one launch, what ``quantize_pack``, ``unpack_sum`` and ``unpack_counts`` do for one tensor, by the same
programs (``tiles.py``; digits of integers and doubles are in ``tile_digits.py``). This file checks arguments and
launches.

Fastest where tensors of float32 are aligned to 16 bytes, and blocks are of 1024 elements or a multiple. Codes, counts
and words that are not aligned to 4 bytes go through a copy.

Without a GPU: TRITON_INTERPRET=1 in the environment, before this module is imported, runs all on tensors of the CPU.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from . import (
    COUNT_BITS,
    ELEMENTS_PER_WORD,
    Digits,
    Quantizer,
    Tallies,
    block_count,
    check_block_elements,
    check_planes,
    check_symmetry,
    check_tallied,
    count_bits,
    counts_nbytes,
    packed_nbytes,
    tile_digits,
    tiles,
)
from .runs import SPAN_ROWS, SPAN_WORDS, Runs, rows_of

_TILE_WORDS = 64
_SUM_TILE = 1024
OPTIONS = {"num_warps": 2, "enable_fp_fusion": False}
"""Of every launch: products and sums are rounded one by one, as NumPy does."""

_DIM_TYPE_AND_DEVICE = operator.attrgetter("ndim", "dtype", "device")
_ONE_BLOCK = 2**31 - 1
"""Words of a block that no tensor fills."""


def quantize_pack(gradient: torch.Tensor, residual: torch.Tensor, packed: torch.Tensor,
                  quantizer: Quantizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``gradient`` to ``residual``, take out what two bits can say of it, and pack the codes.

    Args:
        gradient: float32[n], not changed.
        residual: float32[n], updated in place. Where the sum is not finite it keeps its value.
        packed: uint8[4 * ceil(n / 16)], overwritten; bits beyond element n are zero.
        quantizer: thresholds and levels, one per block.

    Returns:
        ``(selected_sum, selected_count)``, float32[blocks] and int32[blocks], as ``reference.quantize_pack``.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    elements, device = gradient.numel(), gradient.device
    rows = rows_of(elements, quantizer.block_elements)
    _check("gradient", gradient, torch.float32, (elements,), device)
    _check("residual", residual, torch.float32, (elements,), device)
    _check("packed", packed, torch.uint8, (packed_nbytes(elements),), device)
    of_blocks = _quantizer_tensors(quantizer, rows.blocks, device)
    selected_sum = torch.empty(rows.blocks, dtype=torch.float32, device=device)
    selected_count = torch.empty(rows.blocks, dtype=torch.int32, device=device)
    sums, counts = selected_sum, selected_count
    if rows.per_block > 1:
        sums = torch.empty(rows.total, dtype=torch.float32, device=device)
        counts = torch.empty(rows.total, dtype=torch.int32, device=device)
    words = _word_aligned(packed)
    _launch(tiles.quantize, -(-rows.total // SPAN_ROWS), device,
            gradient, residual, elements, None, None, None, 0, words, *of_blocks, sums, None, counts, None,
            _words_per_block(rows.block_elements), rows.per_block, ROWS=SPAN_ROWS,
            ALIGNED=_are_aligned(gradient, residual), ONE_BLOCK=rows.one_block, TABLE=False)
    if rows.per_block > 1:
        _launch(tiles.add_rows, rows.blocks, device, sums, None, counts, None, rows.total, rows.per_block,
                selected_sum, selected_count, TABLE=False, TILE=_SUM_TILE)
    if words is not packed:
        packed.copy_(words)
    return selected_sum, selected_count


def quantize_pack_runs(runs: Runs, gradients: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor],
                       packed: torch.Tensor, quantizer: Quantizer, table: torch.Tensor | None = None) -> torch.Tensor:
    """Do what ``quantize_pack`` does for every run.

    Args:
        runs: where they lie.
        gradients: float32[n] of each run, not changed.
        residuals: float32[n] of each run, updated in place.
        packed: uint8[4 * runs.words], overwritten with the codes.
        quantizer: thresholds and levels, float32[runs.blocks]; its ``block_elements`` are not looked at.
        table: uint8[8 * runs.blocks], overwritten with the entries of ``payload.BLOCK_TABLE``: sum and number of the
            magnitudes that were selected or, where none was, the sum of all magnitudes of the new residual, added in
            the same order; no sum is above the largest float32. None: no sums are made.

    Returns:
        int64[runs], how many elements of each run got code 11 or 10.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    device, one_block = runs.device, runs.block_elements == 0
    _check_runs("gradients", gradients, runs)
    _check_runs("residuals", residuals, runs)
    _check("packed", packed, torch.uint8, (4 * runs.words,), device)
    of_blocks = _quantizer_tensors(quantizer, runs.blocks, device)
    sums = silents = counts = entries = None
    direct = runs.rows == runs.blocks
    if table is not None:
        _check("table", table, torch.uint8, (8 * runs.blocks,), device)
        sums = entries = _word_aligned(table)
        if not direct:
            sums, silents = torch.empty((2, runs.rows), dtype=torch.float32, device=device)
            counts = torch.empty(runs.rows, dtype=torch.int32, device=device)
    words = _word_aligned(packed)
    selected = torch.zeros(len(runs.elements), dtype=torch.int64, device=device)
    addresses = runs.addresses(gradients, residuals)
    _launch(tiles.quantize, len(runs.row_programs), device,
            None, None, 0, runs.row_programs, runs.table, addresses.table, len(gradients), words, *of_blocks,
            sums, silents, counts, selected, _words_per_block(runs.block_elements),
            rows_of(runs.block_elements, 0).per_block, ROWS=SPAN_ROWS, ALIGNED=addresses.aligned, ONE_BLOCK=one_block,
            TABLE=table is not None and direct)
    addresses.release()
    if table is not None and not direct:
        _launch(tiles.add_rows, runs.blocks, device, sums, silents, counts, runs.first_rows, 0, 0, entries, None,
                TABLE=True, TILE=_SUM_TILE)
    if words is not packed:
        packed.copy_(words)
    if table is not None and entries is not None and entries is not table:
        table.copy_(entries)
    return selected


def unpack_sum(packed: torch.Tensor, levels: torch.Tensor, block_elements: int, out: torch.Tensor,
               scale: float = 1.0) -> None:
    """Overwrite ``out`` with the sum of k ranks' codes times their levels, then scaled.

    Args:
        packed: uint8[k, 4 * ceil(n / 16)]; rows may lie apart.
        levels: float32[k, blocks, 2], the positive and the negative level of each rank.
        block_elements: elements of a block, a multiple of 16.
        out: float32[n], overwritten.
        scale: what the float32 sum is multiplied by, in float64 and rounded to float32 once, as Horovod scales.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    check_block_elements(block_elements)
    elements, device = out.numel(), out.device
    _check("out", out, torch.float32, (elements,), device)
    _check_rows("packed", packed, packed_nbytes(elements), device)
    _check_levels(levels, (len(packed), block_count(elements, block_elements), 2), device)
    if len(packed) == 0:
        out.fill_(0.0 * scale)
        return
    _unpack(-(-packed.shape[1] // (4 * SPAN_WORDS)), device, out, elements, None, None, None, packed, levels,
            block_elements, scale, _are_aligned(out))


def unpack_sum_runs(runs: Runs, packed: torch.Tensor, levels: torch.Tensor, outs: Sequence[torch.Tensor],
                    scale: float = 1.0) -> None:
    """Do what ``unpack_sum`` does for every run.

    Args:
        runs: where they lie.
        packed: uint8[k, 4 * runs.words]; rows may lie apart.
        levels: float32[k, runs.blocks, 2].
        outs: float32[n] of each run, overwritten.
        scale: as for ``unpack_sum``.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    _check_runs("outs", outs, runs)
    _check_rows("packed", packed, 4 * runs.words, runs.device)
    _check_levels(levels, (len(packed), runs.blocks, 2), runs.device)
    if len(packed) == 0:
        for out in outs:
            out.fill_(0.0 * scale)
        return
    addresses = runs.addresses(outs)
    _unpack(len(runs.word_programs), runs.device, None, 0, runs.word_programs, runs.table, addresses.table, packed,
            levels, runs.block_elements, scale, addresses.aligned)
    addresses.release()


def _unpack(programs: int, device: torch.device, out: torch.Tensor | None, elements: int,
            of_programs: torch.Tensor | None, table: torch.Tensor | None, addresses: torch.Tensor | None,
            packed: torch.Tensor, levels: torch.Tensor, block_elements: int, scale: float, aligned: bool) -> None:
    words = _word_aligned(packed, copied=True)
    _launch(tiles.unpack, programs, device, out, elements, of_programs, table, addresses, words, words.stride(0) // 4,
            len(words), levels, levels.stride(0), _words_per_block(block_elements), float(scale), ALIGNED=aligned,
            UNIFORM=_is_uniform(block_elements), SINGLE=len(words) == 1)


def pack_counts(packed: torch.Tensor, bits: int, counts: torch.Tensor) -> None:
    """Count the codes that k ranks sent for each element; see ``reference.pack_counts``.

    Args:
        packed: uint8[k, 4 * words]; rows may lie apart.
        bits: 4, 8 or 16.
        counts: uint8[1 or 2, 2 * bits * words], overwritten; rows may lie apart.

    Raises:
        ValueError: the tensors do not fit each other, or the bits are too few for k ranks.
    """
    device = packed.device
    if bits not in COUNT_BITS or bits < count_bits(len(packed)):
        raise ValueError(f"counts of {len(packed)} ranks cannot have {bits} bits")
    words = packed.shape[-1] // 4
    _check_rows("packed", packed, 4 * words, device)
    _check_rows("counts", counts, counts_nbytes(words, bits), device)
    check_planes(len(counts))
    codes, into = _word_aligned(packed, copied=True), _word_aligned(counts)
    _launch(tiles.count, -(-words // _TILE_WORDS), device, codes, codes.stride(0) // 4, len(codes), words, into,
            into.stride(0) // 4, BITS=bits, PLANES=len(into))
    if into is not counts:
        counts.copy_(into)


def unpack_counts(counts: torch.Tensor, bits: int, levels: torch.Tensor, block_elements: int, out: torch.Tensor,
                  scale: float = 1.0) -> None:
    """Overwrite ``out`` with what counts stand for; see ``reference.unpack_counts``.

    Args:
        counts: uint8[1 or 2, 2 * bits * ceil(n / 16)]; rows may lie apart.
        bits: bits of a count.
        levels: float32[blocks, 2], the positive and the negative level of all ranks.
        block_elements: elements of a block, a multiple of 16.
        out: float32[n], overwritten.
        scale: as for ``unpack_sum``.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    check_block_elements(block_elements)
    elements, device = out.numel(), out.device
    words = packed_nbytes(elements) // 4
    _check("out", out, torch.float32, (elements,), device)
    _check_counts(counts, bits, words, device)
    _check("levels", levels, torch.float32, (block_count(elements, block_elements), 2), device)
    _weigh(-(-words // SPAN_WORDS), device, out, elements, None, None, None, counts, bits, levels, block_elements,
           scale, _are_aligned(out))


def unpack_counts_runs(runs: Runs, counts: torch.Tensor, bits: int, levels: torch.Tensor,
                       outs: Sequence[torch.Tensor], scale: float = 1.0) -> None:
    """Do what ``unpack_counts`` does for every run.

    Args:
        runs: where they lie.
        counts: uint8[1 or 2, 2 * bits * runs.words]; rows may lie apart.
        bits: bits of a count.
        levels: float32[runs.blocks, 2].
        outs: float32[n] of each run, overwritten.
        scale: as for ``unpack_sum``.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    _check_runs("outs", outs, runs)
    _check_counts(counts, bits, runs.words, runs.device)
    _check("levels", levels, torch.float32, (runs.blocks, 2), runs.device)
    addresses = runs.addresses(outs)
    _weigh(len(runs.word_programs), runs.device, None, 0, runs.word_programs, runs.table, addresses.table, counts, bits,
           levels, runs.block_elements, scale, addresses.aligned)
    addresses.release()


def _weigh(programs: int, device: torch.device, out: torch.Tensor | None, elements: int,
           of_programs: torch.Tensor | None, table: torch.Tensor | None, addresses: torch.Tensor | None,
           counts: torch.Tensor, bits: int, levels: torch.Tensor, block_elements: int, scale: float,
           aligned: bool) -> None:
    planes = _word_aligned(counts, copied=True)
    _launch(tiles.weigh, programs, device, out, elements, of_programs, table, addresses, planes,
            planes.stride(0) // 4, levels, _words_per_block(block_elements), float(scale), ALIGNED=aligned,
            UNIFORM=_is_uniform(block_elements), BITS=bits, PLANES=len(planes))


def pack_tallies(packed: torch.Tensor, tallies: Tallies, words: torch.Tensor) -> torch.Tensor:
    """Overwrite ``words`` with the digits of packed codes; see ``reference.pack_tallies``.

    Args:
        packed: uint8[4 * n].
        tallies: see ``Tallies``.
        words: int32[tallies.planes, tallies.integers(n)].

    Returns:
        Whether code 01 is among the codes: bool[], on the device.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    device, codes = packed.device, packed.numel() // 4
    _check("packed", packed, torch.uint8, (4 * codes,), device)
    _check("words", words, torch.int32, (tallies.planes, tallies.integers(codes)), device)
    found = torch.zeros((), dtype=torch.uint8, device=device)
    _launch(tile_digits.tally, _tiles_of_groups(words.shape[1]), device, _word_aligned(packed, copied=True), codes,
            tallies.per_integer, tallies.radix, words, words.stride(0), found, PLANES=tallies.planes)
    return found.view(torch.bool)


def unpack_tallies(words: torch.Tensor, tallies: Tallies, contributors: int, bits: int, counts: torch.Tensor) -> None:
    """Overwrite ``counts`` with those of the codes whose digits were added up; see ``reference.unpack_tallies``.

    Args:
        words: int32[tallies.planes, tallies.integers(n)].
        tallies: those of ``pack_tallies``.
        contributors: number of ranks whose words were added.
        bits: bits of a count.
        counts: uint8[tallies.planes, 2 * bits * n], overwritten; rows may lie apart.

    Raises:
        ValueError: the tensors do not fit each other, or the bits are too few for the ranks.
    """
    check_tallied(tallies, contributors, bits, len(counts))
    device, codes = words.device, counts.shape[-1] // counts_nbytes(1, bits)
    _check_rows("counts", counts, counts_nbytes(codes, bits), device)
    _check("words", words, torch.int32, (tallies.planes, tallies.integers(codes)), device)
    into = _word_aligned(counts)
    for plane in range(tallies.planes):
        _launch(tile_digits.count_tallies, _tiles_of_groups(words.shape[1]), device, words[plane], codes,
                tallies.per_integer, tallies.radix, tallies.multiplier, tallies.shift,
                contributors if tallies.planes == 1 else 0, into[plane], BITS=bits)
    if into is not counts:
        counts.copy_(into)


def pack_digits(packed: torch.Tensor, digits: Digits, words: torch.Tensor) -> None:
    """Overwrite ``words`` with the digits of packed codes.

    Args:
        packed: uint8[4 * ceil(n / 16)].
        digits: see ``Digits``.
        words: float64[digits.word_count(n)], overwritten with whole numbers, or NaN where code 01 is among them.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    device = packed.device
    if packed.numel() % 4:
        raise ValueError(f"packed is of {packed.numel()} bytes, but codes fill whole words of 4 bytes")
    _check("packed", packed, torch.uint8, (packed.numel(),), device)
    _check("words", words, torch.float64, (digits.word_count(4 * packed.numel()),), device)
    _launch(tile_digits.push_digits, _tiles_of_groups(words.numel()), device, _word_aligned(packed, copied=True),
            packed.numel() // 4, digits.per_word, float(digits.radix), float(digits.negative), words)


def unpack_digits(words: torch.Tensor, digits: Digits, divisor: float, levels: torch.Tensor, block_elements: int,
                  out: torch.Tensor, scale: float = 1.0) -> None:
    """Overwrite ``out`` with the sum of levels that the sum of the ranks' words tells, then scaled.

    Args:
        words: float64[digits.word_count(n)]: what the ranks' words add up to, times ``divisor``.
        digits: those of ``pack_digits``.
        divisor: what is taken out of the words before they are rounded to whole numbers.
        levels: float32[blocks, 2], the positive and the negative level.
        block_elements: elements of a block, a multiple of 16.
        out: float32[n], overwritten.
        scale: what the float32 sum is multiplied by, in float64 and rounded to float32 once.

    Raises:
        ValueError: the tensors do not fit each other, or (on the CPU: a GPU would have to be waited for) levels are not
            symmetric but the digits are.
    """
    check_block_elements(block_elements)
    elements, device = out.numel(), out.device
    _check("out", out, torch.float32, (elements,), device)
    _check("words", words, torch.float64, (digits.word_count(elements),), device)
    _check("levels", levels, torch.float32, (block_count(elements, block_elements), 2), device)
    if device.type == "cpu":
        check_symmetry(levels.numpy(), digits)
    middles = sum(digits.middle * digits.radix ** digit for digit in range(digits.per_word))
    _launch(tile_digits.pop_digits, _tiles_of_groups(words.numel()), device, words, elements, digits.per_word,
            float(digits.radix), 1 / digits.radix, float(digits.negative), float(digits.middle), float(middles),
            float(divisor), levels, _words_per_block(block_elements), out, float(scale), SYMMETRIC=digits.symmetric)


# ---- launching ------------------------------------------------------------------------------------------------------

def _launch(kernel: Any, programs: int, device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Launch so many programs, on the current stream of a device."""
    if programs == 0:
        return
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[(programs,)](*arguments, **constants, **OPTIONS)
    else:
        kernel[(programs,)](*arguments, **constants, **OPTIONS)


def _word_aligned(rows: torch.Tensor, copied: bool = False) -> torch.Tensor:
    """Bytes whose rows begin at multiples of 4 bytes: the same tensor, or memory of the same size.

    Args:
        rows: uint8[n] or uint8[rows, n].
        copied: whether other memory has to have the same content.
    """
    if rows.data_ptr() % 4 == 0 and (rows.dim() == 1 or len(rows) < 2 or rows.stride(0) % 4 == 0):
        return rows
    aligned = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    return aligned.copy_(rows) if copied else aligned


def _are_aligned(*tensors: torch.Tensor) -> bool:
    """Whether all begin at multiples of 16 bytes."""
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _is_uniform(block_elements: int) -> bool:
    """Whether no tile that is unpacked is of two blocks."""
    return block_elements % (_TILE_WORDS * ELEMENTS_PER_WORD) == 0


def _tiles_of_groups(numbers: int) -> int:
    """Tiles of so many numbers, 16 in a group."""
    return -(-numbers // (ELEMENTS_PER_WORD * _TILE_WORDS))


def _words_per_block(block_elements: int) -> int:
    """Words of a block; 0 elements, or more than there are, mean one block."""
    return min(block_elements // ELEMENTS_PER_WORD or _ONE_BLOCK, _ONE_BLOCK)


# ---- arguments ------------------------------------------------------------------------------------------------------

def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.device != device:
        raise _unfit(name, tensor, f"contiguous {_name_of(dtype)}{list(shape)}", device)


def _check_rows(name: str, rows: torch.Tensor, nbytes: int, device: torch.device) -> None:
    if rows.dtype is not torch.uint8 or rows.dim() != 2 or rows.shape[1] != nbytes or rows.device != device:
        raise _unfit(name, rows, f"uint8[rows, {nbytes}]", device)
    if rows.stride(1) != 1 and rows.numel() and nbytes > 1:
        raise ValueError(f"the rows of {name} must be contiguous")


def _check_levels(levels: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Levels of ranks: those of each are contiguous, and may be the same memory, as ``expand`` makes them."""
    if (levels.dtype is not torch.float32 or levels.shape != shape or levels.device != device
            or not levels[:1].is_contiguous()):
        raise _unfit("levels", levels, f"float32{list(shape)}, contiguous of each rank", device)


def _unfit(name: str, tensor: torch.Tensor, wanted: str, device: torch.device) -> ValueError:
    found = f"{_name_of(tensor.dtype)}{list(tensor.shape)}"
    if tensor.device != device:
        return ValueError(f"{name} is {found} on {tensor.device}, but must be {wanted} on {device}")
    return ValueError(f"{name} is {found}, but must be {wanted}")


def _check_counts(counts: torch.Tensor, bits: int, words: int, device: torch.device) -> None:
    if bits not in COUNT_BITS:
        raise ValueError(f"bits must be one of {COUNT_BITS}, not {bits}")
    _check_rows("counts", counts, counts_nbytes(words, bits), device)
    check_planes(len(counts))


def _check_runs(name: str, tensors: Sequence[torch.Tensor], runs: Runs) -> None:
    """Tensors of float32, one for each run; checked by few calls, as a bucket may have hundreds."""
    if len(tensors) != len(runs.elements):
        raise ValueError(f"{name} are of {len(tensors)} runs, but there are {len(runs.elements)}")
    if (tuple(map(torch.Tensor.numel, tensors)) != runs.elements
            or set(map(_DIM_TYPE_AND_DEVICE, tensors)) - {(1, torch.float32, runs.device)}
            or not all(map(torch.Tensor.is_contiguous, tensors))):
        for run, (tensor, elements) in enumerate(zip(tensors, runs.elements)):
            _check(f"{name}[{run}]", tensor, torch.float32, (elements,), runs.device)


def _quantizer_tensors(quantizer: Quantizer, blocks: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """The fields of a quantizer of tensors, checked."""
    of_blocks: Any = {"positive_threshold": quantizer.positive_threshold,
                      "negative_threshold": quantizer.negative_threshold,
                      "positive_level": quantizer.positive_level, "negative_level": quantizer.negative_level}
    for name, tensor in of_blocks.items():
        _check(name, tensor, torch.float32, (blocks,), device)
    return tuple(of_blocks.values())


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

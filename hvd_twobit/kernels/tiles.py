"""The programs of the Triton backend that quantize gradients and sum codes; ``triton.py`` launches them.

A program takes one span of a run of elements, tile by tile. A tile has a word of 16 codes per row and an element per
column, so that a thread holds four consecutive elements, one access of 16 bytes, and four threads a word. Which run and
span are a program's is looked up in tables that ``runs.py`` made, or, where there is one run only, follows from the
program's number.

What all programs keep to, as results are those of ``reference.py`` to the bit: sums of floats are added in the order
that is written here, never by a reduction whose order the compiler chooses (but for two numbers, or where all numbers
but one are zero); nothing multiplies and adds in one rounding (``enable_fp_fusion=False``), flushes subnormal numbers
or rounds a ``scale``, which is float64, to float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

WORD = tl.constexpr(16)  # ELEMENTS_PER_WORD
CHUNK = tl.constexpr(1024)  # SUM_CHUNK_ELEMENTS
SPAN_WORDS = tl.constexpr(256)  # of a program that unpacks
AT_ONCE = tl.constexpr(4)  # words of a row whose loads are under way together
TILE_WORDS = tl.constexpr(64)  # of a tile that is unpacked
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)

launched = triton.jit(do_not_specialize=[
    "elements", "run_count", "rows_per_block", "rows", "rank_stride", "ranks", "levels_stride",
    "words_per_block", "words", "plane_stride", "per_integer", "radix", "multiplier", "shift", "offset", "per_word"])
"""Decorates what is launched, not called: compiled once for all numbers that tensors and ranks can have."""


# ---- where things lie -----------------------------------------------------------------------------------------------

@triton.jit
def place_of_program(elements, programs, runs):
    """Which part of which run is this program's.

    Args:
        elements: of the only run, if the other two are None.
        programs: i64[programs, 2], the run and the number of the span within it.
        runs: i64[runs, 4], elements, and how many words, blocks and rows (chunks of sums) come before.

    Returns:
        run, span, elements of the run, words, blocks and rows before it.
    """
    program = tl.program_id(0).to(tl.int64)
    if programs is None:
        nothing = program * 0
        return nothing, program, elements, nothing, nothing, nothing
    else:
        run = tl.load(programs + 2 * program)
        of_run = runs + 4 * run
        return (run, tl.load(programs + 2 * program + 1), tl.load(of_run), tl.load(of_run + 1), tl.load(of_run + 2),
                tl.load(of_run + 3))


@triton.jit
def floats_of_run(only, addresses, run, ALIGNED: tl.constexpr):
    """Pointer to the float32 elements of a run: ``only``, or what ``addresses`` i64 says of it."""
    if addresses is None:
        pointer = only
    else:
        pointer = tl.load(addresses + run).to(tl.pointer_type(tl.float32), bitcast=True)
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def integers(pointer):
    """The same pointer, to 32-bit integers."""
    return pointer.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def shifts(columns):
    """Where in a 32-bit word, little-endian, the code of each column is: the first of a byte in its highest bits."""
    return 8 * (columns // 4) + 6 - 2 * (columns % 4)


# ---- quantize_pack --------------------------------------------------------------------------------------------------

@triton.jit
def _quantize_tile(loaded, residuals, at, inside, thresholds, levels, shift):
    """Quantize one word per row.

    Args:
        loaded: gradient and residual, float32[ROWS, 16].
        residuals, at: pointer and offsets of what is overwritten with the new residual.
        inside: which elements are there.
        thresholds, levels: the positive and the negative one.
        shift: see ``shifts``.

    Returns:
        The words, i32[ROWS]; the magnitudes of what was selected and of the new residual, 0 elsewhere.
    """
    gradient, residual = loaded
    total = residual + gradient
    magnitude = tl.abs(total)
    finite = magnitude <= FLOAT32_MAX
    positive = finite & (total >= thresholds[0]) & inside
    negative = finite & (total <= thresholds[1]) & inside
    kept = tl.where(positive, total - levels[0], tl.where(negative, total - levels[1], total))
    kept = tl.where(finite, kept, residual)
    tl.store(residuals + at, kept, mask=inside)
    codes = tl.where(positive, 3, tl.where(negative, 2, tl.where(finite, 0, 1)))
    words = tl.sum(codes << shift, axis=1)
    return words, tl.where(positive | negative, magnitude, 0.0), tl.abs(kept)


@triton.jit
def _ones(words):
    """How many codes 11 and 10 are in each of the words."""
    pairs = (words >> 1) & 0x55555555
    nibbles = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    octets = (nibbles + (nibbles >> 4)) & 0x0F0F0F0F
    return (octets * 0x01010101) >> 24


@triton.jit
def _quantize_rows(gradients, residuals, packed, offsets, limits, last_words, thresholds, levels, ROWS: tl.constexpr,
                   STEP: tl.constexpr, SUMS: tl.constexpr, SILENT: tl.constexpr):
    """Quantize rows word by word.

    Args:
        gradients, residuals, packed: pointers to the program's first elements and word.
        offsets: i32[ROWS], the first element of each row.
        limits: i32[ROWS], where the whole words of each row end, in elements.
        last_words: i32[ROWS], how many elements the word has that begins there; 0: there is none.
        thresholds, levels: the positive and the negative one.
        STEP: elements from a word of a row to the next.

    Returns:
        How many elements were selected, i32[ROWS], and the lanes, float32[ROWS, 16], of two sums: of the magnitudes
        that were selected, and of all magnitudes of the new residual. A sum that was not asked for is zero.
    """
    columns = tl.arange(0, 16)[None, :]
    shift = shifts(columns)
    selected = tl.zeros([ROWS, 16], tl.float32)
    silent = tl.zeros([ROWS, 16], tl.float32)
    counts = offsets * 0
    for first in range(0, tl.cdiv(tl.max(limits - offsets), STEP), 16):
        words = tl.zeros([ROWS, 16], tl.int32)
        for word in range(0, 16, AT_ONCE):
            # All loads before the first store: nothing tells the compiler that it may change their order.
            loaded = ()
            for i in tl.static_range(AT_ONCE):
                starts = (offsets + (first + word + i) * STEP)[:, None]
                gradient = tl.load(gradients + (starts + columns), mask=starts < limits[:, None], other=0.0)
                residual = tl.load(residuals + (starts + columns), mask=starts < limits[:, None], other=0.0)
                loaded = loaded + ((gradient, residual),)
            for i in tl.static_range(AT_ONCE):
                starts = (offsets + (first + word + i) * STEP)[:, None]
                tile, of_selected, of_residual = _quantize_tile(loaded[i], residuals, starts + columns,
                                                                starts < limits[:, None], thresholds, levels, shift)
                words = tl.where(columns == word + i, tile[:, None], words)
                if SUMS:
                    selected += of_selected
                if SILENT:
                    silent += of_residual
        counts += tl.sum(_ones(words), axis=1)
        starts = offsets[:, None] + (first + columns) * STEP
        tl.store(packed + starts // WORD, words, mask=starts < limits[:, None])
    if tl.max(last_words) > 0:
        at = limits[:, None] + columns
        inside = columns < last_words[:, None]
        gradient = tl.load(gradients + at, mask=inside, other=0.0)
        residual = tl.load(residuals + at, mask=inside, other=0.0)
        words, of_selected, of_residual = _quantize_tile((gradient, residual), residuals, at, inside, thresholds,
                                                         levels, shift)
        tl.store(packed + limits // WORD, words, mask=last_words > 0)
        counts += _ones(words)
        if SUMS:
            selected += of_selected
        if SILENT:
            silent += of_residual
    return counts, selected, silent


@triton.jit
def _added_lanes(lanes, ROWS: tl.constexpr):
    """Sum of the 16 lanes of each row by halving: lane 0 and 8, 1 and 9, and so on. Two numbers have one order."""
    eight = tl.sum(tl.reshape(lanes, [ROWS, 2, 8]), axis=1)
    four = tl.sum(tl.reshape(eight, [ROWS, 2, 4]), axis=1)
    two = tl.sum(tl.reshape(four, [ROWS, 2, 2]), axis=1)
    return tl.sum(two, axis=1)


@triton.jit
def _store_entries(table, blocks, selected, silent, counts, there):
    """Write entries of a block table: the sum of what was selected or, where that is nothing, of the new residual."""
    told = tl.where(counts == 0, silent, selected)
    at = table.to(tl.pointer_type(tl.float32), bitcast=True) + 2 * blocks
    tl.store(at, tl.where(told > FLOAT32_MAX, FLOAT32_MAX, told), mask=there)
    tl.store(integers(at + 1), counts, mask=there)


@triton.jit
def _start_of(row, words_per_block, rows_per_block, ONE_BLOCK: tl.constexpr):
    """The block of a row and the word that the row begins with."""
    if ONE_BLOCK:
        return row * 0, row * (CHUNK // WORD)
    else:
        block = row // rows_per_block
        return block, block * words_per_block + (row - block * rows_per_block) * (CHUNK // WORD)


@launched
def quantize(only_gradient, only_residual, elements: tl.int64, programs, runs, addresses, run_count: tl.int64, packed,
             positive_thresholds, negative_thresholds, positive_levels, negative_levels, sums, silents, counts,
             run_counts, words_per_block: tl.int64, rows_per_block: tl.int64, ROWS: tl.constexpr, ALIGNED: tl.constexpr,
             ONE_BLOCK: tl.constexpr, TABLE: tl.constexpr):
    """Quantize and pack a span of ``ROWS`` rows. A row is a chunk that ``selected_sum`` adds in lanes: 1024 elements,
    or what is left of a block.

    Args:
        only_gradient, only_residual, elements: the only run; or, of many runs,
        programs, runs, addresses, run_count: see ``place_of_program``; the gradients' addresses, then the residuals'.
        packed: bytes of the words of all runs.
        positive_thresholds, negative_thresholds, positive_levels, negative_levels: float32, per block of all runs.
        sums, silents, counts: float32, float32 and i32, per row of all runs; or None where no sums are made, or only
            those of what was selected.
        run_counts: i64[runs], to which the number of selected elements is added; or None.
        words_per_block, rows_per_block: of a whole block.
        ONE_BLOCK: each run is one block, whatever these say.
        TABLE: a block is one row, and ``sums`` a block table, in bytes, that has silents and counts as well.
    """
    SUMS: tl.constexpr = sums is not None
    SILENT: tl.constexpr = TABLE or silents is not None
    # Where nothing is added row by row, a tile has words that lie side by side.
    SIDE_BY_SIDE: tl.constexpr = ONE_BLOCK and not SUMS
    STEP: tl.constexpr = ROWS * WORD if SIDE_BY_SIDE else WORD
    run, span, elements, words_before, blocks_before, rows_before = place_of_program(elements, programs, runs)
    _, first_word = _start_of(span * ROWS, words_per_block, rows_per_block, ONE_BLOCK)
    # A product with 16 is what the compiler can see to be a multiple of 16.
    gradient = floats_of_run(only_gradient, addresses, run, ALIGNED) + first_word * WORD
    residual = floats_of_run(only_residual, addresses, run_count + run, ALIGNED) + first_word * WORD
    packed = integers(packed) + words_before + first_word
    row = span * ROWS + tl.arange(0, ROWS)
    there = row == row
    block = blocks_before
    if SIDE_BY_SIDE:
        offsets = tl.arange(0, ROWS) * WORD
        length = tl.minimum(elements - first_word * WORD, ROWS * CHUNK).to(tl.int32)
        limits = length // WORD * WORD + offsets * 0
        last_words = tl.where(offsets == 0, length % WORD, 0)
    else:
        blocks, words = _start_of(row, words_per_block, rows_per_block, ONE_BLOCK)
        there = (words * WORD < elements) | (row == 0)
        lengths = tl.minimum(elements - words * WORD, CHUNK)
        if not ONE_BLOCK:
            lengths = tl.minimum(lengths, ((blocks + 1) * words_per_block - words) * WORD)
            block = blocks_before + blocks
        lengths = tl.maximum(lengths, 0).to(tl.int32)
        offsets = (words - first_word).to(tl.int32) * WORD
        limits = offsets + lengths // WORD * WORD
        last_words = lengths % WORD
    if ONE_BLOCK:
        thresholds = (tl.load(positive_thresholds + block), tl.load(negative_thresholds + block))
        levels = (tl.load(positive_levels + block), tl.load(negative_levels + block))
    else:
        thresholds = (tl.load(positive_thresholds + block, mask=there, other=0.0)[:, None],
                      tl.load(negative_thresholds + block, mask=there, other=0.0)[:, None])
        levels = (tl.load(positive_levels + block, mask=there, other=0.0)[:, None],
                  tl.load(negative_levels + block, mask=there, other=0.0)[:, None])
    count, selected, silent = _quantize_rows(gradient, residual, packed, offsets, limits, last_words, thresholds,
                                             levels, ROWS, STEP, SUMS, SILENT)
    if run_counts is not None:
        tl.atomic_add(run_counts + run, tl.sum(count).to(tl.int64), sem="relaxed")
    if SUMS:
        row_sum = _added_lanes(selected, ROWS)
        if TABLE:
            _store_entries(sums, rows_before + row, row_sum, _added_lanes(silent, ROWS), count, there)
        else:
            tl.store(sums + rows_before + row, row_sum, mask=there)
            tl.store(counts + rows_before + row, count, mask=there)
            if SILENT:
                tl.store(silents + rows_before + row, _added_lanes(silent, ROWS), mask=there)


@triton.jit
def _sum_in_order(values, first, last, TILE: tl.constexpr):
    """Sum of ``values[first:last]``, float32 and not negative, as if they were added one after the other in float64.

    While a sum of multiples of u stays below 2**53 * u, no addition rounds, and their order is free. So all are added
    as it is fastest, and in order only if the sum is too large for the last place of the smallest one.
    """
    total = tl.zeros((), tl.float64)
    lowest = tl.full((), 255, tl.int32)
    for start in range(first, last, TILE):
        at = start + tl.arange(0, TILE)
        tile = tl.load(values + at, mask=at < last, other=0.0)
        total += tl.sum(tile.to(tl.float64))
        exponents = tl.maximum(tile.to(tl.int32, bitcast=True) >> 23, 1)
        lowest = tl.minimum(lowest, tl.min(tl.where(tile == 0, 255, exponents)))
    limit = ((lowest + 926).to(tl.int64) << 52).to(tl.float64, bitcast=True)  # 2**53 * 2**(lowest - 150)
    if (total < limit) == 0:
        total = tl.zeros((), tl.float64)
        for at in range(first, last):
            total += tl.load(values + at).to(tl.float64)
    return total.to(tl.float32)


@launched
def add_rows(row_sums, row_silents, row_counts, first_rows, rows: tl.int64, rows_per_block: tl.int64, sums, counts,
             TABLE: tl.constexpr, TILE: tl.constexpr):
    """Add up the rows of a block.

    Args:
        row_sums, row_silents, row_counts: what ``quantize`` made, per row.
        first_rows: i64[blocks + 1], the first row of each block and their number; or None if there is but one run,
        rows, rows_per_block: of this many rows.
        sums, counts: float32 and i32, per block; with ``TABLE``, ``sums`` is a block table, in bytes.
    """
    block = tl.program_id(0).to(tl.int64)
    if first_rows is None:
        first = block * rows_per_block
        last = tl.minimum(first + rows_per_block, rows)
    else:
        first = tl.load(first_rows + block)
        last = tl.load(first_rows + block + 1)
    number = tl.zeros((), tl.int32)
    for start in range(first, last, TILE):
        at = start + tl.arange(0, TILE)
        number += tl.sum(tl.load(row_counts + at, mask=at < last, other=0))
    total = _sum_in_order(row_sums, first, last, TILE)
    if TABLE:
        _store_entries(sums, block, total, _sum_in_order(row_silents, first, last, TILE), number, True)
    else:
        tl.store(sums + block, total)
        tl.store(counts + block, number)


# ---- sums of codes --------------------------------------------------------------------------------------------------

@triton.jit
def weighed(positives, negatives, positive_level, negative_level):
    """What so many codes 11 and 10, float32, stand for where all ranks have the same levels."""
    return tl.where(positive_level == -negative_level, (positives - negatives) * positive_level,
                    positives * positive_level + negatives * negative_level)


@triton.jit
def scaled(total, scale):
    """A float32 times a float64, rounded to float32 once."""
    return (total.to(tl.float64) * scale).to(tl.float32)


@triton.jit
def _store(out, values, left):
    """Store a tile of elements that lie side by side, of which ``left`` are there."""
    offsets = tl.arange(0, TILE_WORDS)[:, None] * WORD + tl.arange(0, 16)[None, :]
    if left >= TILE_WORDS * WORD:
        tl.store(out + offsets, values)
    else:
        tl.store(out + offsets, values, mask=offsets < left)


@triton.jit
def _blocks_of_tile(word, words_left, words_per_block, UNIFORM: tl.constexpr):
    """The block of a tile that begins with ``word`` or, as a column, of each of its words; beyond the last, of that."""
    if UNIFORM:
        return word // words_per_block
    else:
        words = word + tl.minimum(tl.arange(0, TILE_WORDS), words_left - 1)
        return (words // words_per_block)[:, None]


@triton.jit
def _counted(packed, rank_stride, ranks, words, inside):
    """How many ranks sent code 11, 10 and 01: three i32 tiles.

    Counts of all four codes are bytes of one number, for up to 255 ranks at a time.

    Args:
        packed: i32, the words of the first rank; those of the next are ``rank_stride`` words further.
        words, inside: which words, and which of them are there.
    """
    shift = shifts(tl.arange(0, 16))[None, :]
    positives = tl.zeros([TILE_WORDS, 16], tl.int32)
    negatives = tl.zeros([TILE_WORDS, 16], tl.int32)
    not_finite = tl.zeros([TILE_WORDS, 16], tl.int32)
    for first in range(0, ranks, 255):
        counts = tl.zeros([TILE_WORDS, 16], tl.int32)
        for rank in range(first, tl.minimum(first + 255, ranks)):
            codes = tl.load(packed + rank * rank_stride + words, mask=inside, other=0)[:, None]
            counts += 1 << (((codes >> shift) & 3) * 8)
        positives += (counts >> 24) & 255
        negatives += (counts >> 16) & 255
        not_finite += (counts >> 8) & 255
    return positives, negatives, not_finite


@triton.jit
def _decoded(packed, words, inside, levels, scale):
    """What the codes of one rank stand for, scaled; ``levels`` points to a pair or to a column of them."""
    positive_level = tl.load(levels)
    negative_level = tl.load(levels + 1)
    are_numbers = (positive_level == positive_level) & (negative_level == negative_level)
    zero = tl.where(are_numbers, weighed(0.0, 0.0, positive_level, negative_level), 0.0)
    positive = tl.where(are_numbers, weighed(1.0, 0.0, positive_level, negative_level), 0.0 + positive_level)
    negative = tl.where(are_numbers, weighed(0.0, 1.0, positive_level, negative_level), 0.0 + negative_level)
    codes = (tl.load(packed + words, mask=inside, other=0)[:, None] >> shifts(tl.arange(0, 16))[None, :]) & 3
    selected = tl.where(codes == 3, scaled(positive, scale), scaled(negative, scale))
    return tl.where(codes >= 2, selected, tl.where(codes == 1, float("nan"), scaled(zero, scale)))


@triton.jit
def _summed(packed, rank_stride, ranks, words, inside, levels, levels_stride, scale):
    """The sum of all ranks' codes times their levels, scaled; ``levels`` as for ``_decoded``, of the first rank."""
    positive_level = tl.load(levels)
    negative_level = tl.load(levels + 1)
    differ = tl.where((positive_level == positive_level) & (negative_level == negative_level), 0, 1)
    for rank in range(1, ranks):
        of_rank = levels + rank * levels_stride
        same = (tl.load(of_rank) == positive_level) & (tl.load(of_rank + 1) == negative_level)
        differ = tl.where(same, differ, 1)
    positives, negatives, not_finite = _counted(packed, rank_stride, ranks, words, inside)
    total = weighed(positives.to(tl.float32), negatives.to(tl.float32), positive_level, negative_level)
    if tl.max(tl.broadcast_to(differ, [TILE_WORDS, 1])) > 0:
        in_order = tl.zeros([TILE_WORDS, 16], tl.float32)
        for rank in range(0, ranks):
            of_rank = levels + rank * levels_stride
            codes = tl.load(packed + rank * rank_stride + words, mask=inside, other=0)[:, None]
            codes = (codes >> shifts(tl.arange(0, 16))[None, :]) & 3
            in_order += tl.where(codes == 3, tl.load(of_rank), tl.where(codes == 2, tl.load(of_rank + 1), 0.0))
        total = tl.where(differ > 0, in_order, total)
    return tl.where(not_finite > 0, float("nan"), scaled(total, scale))


@launched
def unpack(only_out, elements: tl.int64, programs, runs, addresses, packed, rank_stride: tl.int64, ranks: tl.int32,
           levels, levels_stride: tl.int64, words_per_block: tl.int32, scale: tl.float64, ALIGNED: tl.constexpr,
           UNIFORM: tl.constexpr, SINGLE: tl.constexpr):
    """Overwrite a span with the scaled sum of the ranks' codes times their levels.

    Args:
        only_out, elements: the only run; or, of many runs,
        programs, runs, addresses: see ``place_of_program`` and ``floats_of_run``.
        packed: bytes of the words of all runs of the first rank, those of the next ``rank_stride`` words further.
        ranks: 1 or more.
        levels: float32, pairs per block of all runs, those of the next rank ``levels_stride`` further.
        words_per_block: of a whole block.
        UNIFORM: no tile is of two blocks.
        SINGLE: there is one rank.
    """
    run, span, elements, words_before, blocks_before, _ = place_of_program(elements, programs, runs)
    out = floats_of_run(only_out, addresses, run, ALIGNED) + span * (SPAN_WORDS * WORD)
    left = tl.minimum(elements - span * (SPAN_WORDS * WORD), SPAN_WORDS * WORD).to(tl.int32)
    words_left = tl.cdiv(left, WORD)
    packed = integers(packed) + words_before + span * SPAN_WORDS
    levels += 2 * blocks_before
    rows = tl.arange(0, TILE_WORDS)
    for first in range(0, words_left, TILE_WORDS):
        blocks = _blocks_of_tile((span * SPAN_WORDS).to(tl.int32) + first, words_left - first, words_per_block, UNIFORM)
        inside = rows < words_left - first
        if SINGLE:
            values = _decoded(packed, first + rows, inside, levels + 2 * blocks, scale)
        else:
            values = _summed(packed, rank_stride, ranks, first + rows, inside, levels + 2 * blocks, levels_stride,
                             scale)
        _store(out + first * WORD, values, left - first * WORD)


# ---- counts of codes ------------------------------------------------------------------------------------------------

@triton.jit
def store_counts(counts, values, words, inside, BITS: tl.constexpr):
    """Store a tile of i32 as counts of so many bits."""
    PER_INTEGER: tl.constexpr = 32 // BITS
    INTEGERS: tl.constexpr = BITS // 2
    places = BITS * tl.arange(0, PER_INTEGER)[None, None, :]
    fields = tl.reshape(values & ((1 << BITS) - 1), [TILE_WORDS, INTEGERS, PER_INTEGER]) << places
    at = words[:, None] * INTEGERS + tl.arange(0, INTEGERS)[None, :]
    tl.store(counts + at, tl.sum(fields, axis=2), mask=inside[:, None])


@triton.jit
def _loaded_counts(counts, words, inside, BITS: tl.constexpr):
    """A tile of counts, i32."""
    PER_INTEGER: tl.constexpr = 32 // BITS
    INTEGERS: tl.constexpr = BITS // 2
    at = words[:, None] * INTEGERS + tl.arange(0, INTEGERS)[None, :]
    integers = tl.load(counts + at, mask=inside[:, None], other=0)[:, :, None]
    places = BITS * tl.arange(0, PER_INTEGER)[None, None, :]
    return tl.reshape((integers << (32 - BITS - places)) >> (32 - BITS), [TILE_WORDS, 16])


@launched
def count(packed, rank_stride: tl.int64, ranks: tl.int32, words: tl.int64, counts, plane_stride: tl.int64,
          BITS: tl.constexpr, PLANES: tl.constexpr):
    """Count the codes of all ranks, one tile per program; ``plane_stride`` is of 32-bit integers."""
    first = tl.program_id(0).to(tl.int64) * TILE_WORDS
    rows = tl.arange(0, TILE_WORDS)
    inside = rows < words - first
    counts = integers(counts) + first * (BITS // 2)
    positives, negatives, not_finite = _counted(integers(packed) + first, rank_stride, ranks, rows, inside)
    LOWEST: tl.constexpr = -(1 << (BITS - 1))
    if PLANES == 1:
        positives -= negatives
    else:
        store_counts(counts + plane_stride, tl.where(not_finite > 0, LOWEST, negatives), rows, inside, BITS)
    store_counts(counts, tl.where(not_finite > 0, LOWEST, positives), rows, inside, BITS)


@launched
def weigh(only_out, elements: tl.int64, programs, runs, addresses, counts, plane_stride: tl.int64, levels,
          words_per_block: tl.int32, scale: tl.float64, ALIGNED: tl.constexpr, UNIFORM: tl.constexpr,
          BITS: tl.constexpr, PLANES: tl.constexpr):
    """Overwrite a span with what counts stand for; arguments as for ``unpack`` and ``count``."""
    run, span, elements, words_before, blocks_before, _ = place_of_program(elements, programs, runs)
    out = floats_of_run(only_out, addresses, run, ALIGNED) + span * (SPAN_WORDS * WORD)
    left = tl.minimum(elements - span * (SPAN_WORDS * WORD), SPAN_WORDS * WORD).to(tl.int32)
    words_left = tl.cdiv(left, WORD)
    counts = integers(counts) + (words_before + span * SPAN_WORDS) * (BITS // 2)
    levels += 2 * blocks_before
    rows = tl.arange(0, TILE_WORDS)
    LOWEST: tl.constexpr = -(1 << (BITS - 1))
    for first in range(0, words_left, TILE_WORDS):
        blocks = _blocks_of_tile((span * SPAN_WORDS).to(tl.int32) + first, words_left - first, words_per_block, UNIFORM)
        inside = rows < words_left - first
        positive_level = tl.load(levels + 2 * blocks)
        positives = _loaded_counts(counts, first + rows, inside, BITS)
        if PLANES == 1:
            is_nan = positives == LOWEST
            total = positives.to(tl.float32) * positive_level
        else:
            negatives = _loaded_counts(counts + plane_stride, first + rows, inside, BITS)
            is_nan = (positives == LOWEST) | (negatives == LOWEST)
            total = weighed(positives.to(tl.float32), negatives.to(tl.float32), positive_level,
                            tl.load(levels + 2 * blocks + 1))
        _store(out + first * WORD, tl.where(is_nan, float("nan"), scaled(total, scale)), left - first * WORD)

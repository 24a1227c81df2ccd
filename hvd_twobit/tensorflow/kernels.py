"""The kernels as TensorFlow's operations: gradients are compressed on the device on which they lie.

What ``kernels`` describes, for float32 tensors of any device: ``quantize_pack``, ``unpack_sum``, ``unpack_counts``, and
``scaled`` for sums that other ranks have made. Functions return what the others write; shapes may be unknown until the
step. Bits are those of ``kernels/reference.py``, but for the payload of a NaN. ``traced`` can have XLA compile
them, so that a gradient is read and written once; without it each operation is one pass.

TensorFlow's CPU threads flush subnormal numbers: they read them as zeros and write zeros in their place, and what other
devices do is up to those who compiled for them; XLA may also fuse a product and a sum, and drop the rounding between
two casts. Nothing here depends on any of that:

- A number below 2^-95 is also held *lifted*, multiplied by 2^64, where nothing of float32 is subnormal. Where both
  addends are that small they are added there, which rounds alike, as a power of two changes no rounding. Elsewhere a
  subnormal addend is below a quarter of the last place of the other one, so it changes no sum and may be flushed. The
  way from subnormal numbers to lifted ones and back goes through integers, products being exact.
- Sums of magnitudes, which only grow, are carried as a pair, as they are and lifted (``_add_pairs``).
- Comparisons with thresholds are of the numbers' bits, which are in their order.
- Sums of ranks are computed in float64, where a product of a count and a level is exact, and a sum of two float32
  numbers that is rounded to float32 has been rounded once in effect (S. Figueroa, "When is double rounding
  innocuous?", 1995). ``_rounded`` rounds through integers, which no compiler takes for a cast that it may drop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ..kernels import CODE_NEGATIVE, CODE_NOT_FINITE, CODE_POSITIVE, CODE_ZERO, ELEMENTS_PER_WORD, SUM_CHUNK_ELEMENTS

_SIGN = -0x80000000
_EXPONENT = 0x7F800000
_MANTISSA = 0x007FFFFF
_MAGNITUDE = 0x7FFFFFFF

_SMALL = 1 << 28
"""The bits of 2^-95; those of smaller magnitudes are below."""

_LIFT = 2.0 ** 64
_LIFTED_SMALL = 2.0 ** (64 - 95)
_LIFTED_NORMAL = 2.0 ** (64 - 126)
_LIFTED_ULP = 2.0 ** (64 - 149)
"""What stands for the smallest subnormal number."""

_and, _or = tf.bitwise.bitwise_and, tf.bitwise.bitwise_or


def quantize_pack(gradient: tf.Tensor, residual: tf.Tensor, thresholds: tf.Tensor, levels: tf.Tensor, *,
                  block_elements: int, with_sums: bool = True) -> tuple[tf.Tensor, ...]:
    """Add a gradient to its residual, take out what two bits can say of it, and pack the codes.

    Args:
        gradient: float32[n].
        residual: float32[n].
        thresholds: float32[blocks, 2], the positive one, above zero, and the negative one, below.
        levels: float32[blocks, 2], likewise.
        block_elements: elements of a block, a multiple of 16; n or more means one block.
        with_sums: whether sums are wanted; they are zeros otherwise.

    Returns:
        Codes uint8[4 * ceil(n / 16)]; the new residual float32[n]; and of each block: the sum float32 and the number
        uint32 of the magnitudes that were selected, as ``kernels.quantize_pack`` returns them, and the sum float32 of
        all magnitudes of the new residual where none was selected, else zero, added in the same order.
    """
    elements = tf.size(gradient)
    blocks, width = _blocks(elements, block_elements)
    gradient, residual = _in_blocks(gradient, blocks, width), _in_blocks(residual, blocks, width)
    threshold_bits = tf.bitcast(thresholds, tf.int32)
    total = _added(gradient, residual)
    bits = tf.bitcast(total, tf.int32)
    magnitude_bits = _and(bits, _MAGNITUDE)
    finite = magnitude_bits < _EXPONENT
    positive = tf.logical_and(finite, bits >= threshold_bits[:, 0, None])
    negative = tf.logical_and(tf.logical_and(finite, bits < 0),
                              magnitude_bits >= _and(threshold_bits[:, 1, None], _MAGNITUDE))
    selected = tf.logical_or(positive, negative)
    codes = tf.where(positive, CODE_POSITIVE, tf.where(negative, CODE_NEGATIVE, CODE_ZERO))
    codes = tf.where(finite, codes, CODE_NOT_FINITE)
    taken = tf.where(positive, levels[:, 0, None], levels[:, 1, None])
    left = tf.where(finite, tf.where(selected, _added(total, -taken), total), residual)
    count = tf.reduce_sum(tf.cast(selected, tf.int32), axis=1)
    if with_sums:
        both = tf.stack([tf.where(selected, tf.abs(total), 0.0), tf.abs(left)])
        selected_sum, left_sum = tf.unstack(_narrow(_sums_in_lanes(both, width, block_elements)), 2)
        unselected_sum = tf.where(tf.equal(count, 0), left_sum, 0.0)
    else:
        selected_sum = unselected_sum = tf.zeros([blocks])
    words = -(-elements // ELEMENTS_PER_WORD)
    return (_packed(tf.reshape(codes, [-1])[:ELEMENTS_PER_WORD * words]), tf.reshape(left, [-1])[:elements],
            selected_sum, tf.cast(count, tf.uint32), unselected_sum)


def quantized(gradient: tf.Tensor, residual: tf.Tensor, thresholds: tf.Tensor, levels: tf.Tensor, *,
              block_elements: int, with_table: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """As ``quantize_pack``: what is sent of a gradient, in one piece, and the new residual.

    Returns:
        uint8: codes and, if wanted, behind them a ``payload.BLOCK_TABLE`` entry for each block: its sum, not above the
        largest float32, and number of selected magnitudes, or the sum of all where none was selected; and the residual.
    """
    codes, left, selected_sum, count, unselected_sum = quantize_pack(
        gradient, residual, thresholds, levels, block_elements=block_elements, with_sums=with_table)
    if not with_table:
        return codes, left
    sums = tf.where(tf.equal(tf.cast(count, tf.int64), 0), unselected_sum, selected_sum)
    sums = tf.where(tf.math.is_inf(sums), tf.float32.max, sums)
    table = tf.concat([tf.bitcast(sums, tf.uint8), tf.bitcast(count, tf.uint8)], axis=1)
    return tf.concat([codes, tf.reshape(table, [-1])], axis=0), left


def unpack_sum(packed: tf.Tensor, levels: tf.Tensor, elements: Any, scale: Any, *, block_elements: int,
               levels_of_all: bool = False) -> tf.Tensor:
    """The sum of k ranks' codes times their levels, then scaled, by the rule of ``kernels.unpack_sum``.

    Args:
        packed: uint8[k, 4 * ceil(n / 16)], k > 0.
        levels: float32[k, blocks, 2], the positive and the negative level of each rank.
        elements: n.
        scale: float64, what the float32 sum is multiplied by; rounded to float32 once.
        block_elements: elements of a block, a multiple of 16; n or more means one block.
        levels_of_all: whether all ranks have the same levels; then they may be given as float32[1, blocks, 2].

    Returns:
        float32[n].
    """
    blocks, width = _blocks(elements, block_elements)
    codes = _in_blocks(_unpacked(packed)[:, :elements], blocks, width)
    levels = _widened(levels)
    positives = tf.reduce_sum(tf.cast(tf.equal(codes, CODE_POSITIVE), tf.int32), axis=0)
    negatives = tf.reduce_sum(tf.cast(tf.equal(codes, CODE_NEGATIVE), tf.int32), axis=0)
    not_finite = tf.reduce_any(tf.equal(codes, CODE_NOT_FINITE), axis=0)
    total = _sum_of_counts(positives, negatives, levels[0], _are_symmetric(levels[0]))
    if not levels_of_all:
        equal = tf.reduce_all(tf.equal(levels, levels[:1]), axis=[0, 2])
        total = tf.cond(tf.reduce_all(equal), lambda: total,
                        lambda: tf.where(equal[:, None], total, _sum_in_rank_order(codes, levels)))
    return _reduced(total, not_finite, elements, scale)


def unpack_counts(counts: tf.Tensor, levels: tf.Tensor, elements: Any, scale: Any, *, bits: int,
                  block_elements: int) -> tf.Tensor:
    """What counts of codes stand for: the bits of ``unpack_sum``.

    Args:
        counts: uint8[1 or 2, 2 * bits * ceil(n / 16)], see ``kernels.pack_counts``.
        levels: float32[blocks, 2], the positive and the negative level of all ranks.
        elements: n.
        scale: as for ``unpack_sum``.
        bits: 4, 8 or 16, of a count.
        block_elements: elements of a block, a multiple of 16; n or more means one block.

    Returns:
        float32[n].
    """
    blocks, width = _blocks(elements, block_elements)
    values = _in_blocks(_counts(counts, bits)[:, :elements], blocks, width)
    not_finite = tf.reduce_any(tf.equal(values, -(1 << (bits - 1))), axis=0)
    levels = _widened(levels)
    two_planes = tf.equal(tf.shape(values)[0], 2)
    negatives = tf.where(two_planes, values[-1], 0)
    # One plane tells differences, which are of symmetric levels.
    symmetric = tf.logical_or(tf.logical_not(two_planes), _are_symmetric(levels))
    total = _sum_of_counts(values[0], negatives, levels, symmetric)
    return _reduced(total, not_finite, elements, scale)


def scaled(sums: tf.Tensor, scale: Any) -> tf.Tensor:
    """float32 sums multiplied by a float64 factor and rounded once."""
    return _narrow(_widened(sums) * tf.cast(scale, tf.float64))


def norm_and_mean(values: tf.Tensor) -> tf.Tensor:
    """Euclidean norm and mean magnitude of float32[n], added in float64: float64[2]; zeros where there are none."""
    exact = tf.abs(tf.cast(values, tf.float64))
    count = tf.cast(tf.maximum(1, tf.size(values)), tf.float64)
    return tf.stack([tf.sqrt(tf.reduce_sum(exact * exact)), tf.reduce_sum(exact) / count])


_FLOATS, _BYTES = tf.TensorSpec([None], tf.float32), tf.TensorSpec([None, None], tf.uint8)
_LEVELS, _RANKS_LEVELS = tf.TensorSpec([None, 2], tf.float32), tf.TensorSpec([None, None, 2], tf.float32)
_ELEMENTS, _SCALE = tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.float64)

_SIGNATURES: dict[Callable[..., Any], tuple[tf.TensorSpec, ...]] = {
    quantize_pack: (_FLOATS, _FLOATS, _LEVELS, _LEVELS), quantized: (_FLOATS, _FLOATS, _LEVELS, _LEVELS),
    unpack_sum: (_BYTES, _RANKS_LEVELS, _ELEMENTS, _SCALE), unpack_counts: (_BYTES, _LEVELS, _ELEMENTS, _SCALE),
    scaled: (_FLOATS, _SCALE), norm_and_mean: (_FLOATS,)}


@functools.cache
def traced(function: Callable[..., Any], by_xla: bool, device: str | None = None, **options: Any) -> Any:
    """One of the functions above as a graph of its own, for all shapes, which takes a second to build; built once.

    Args:
        function: which one.
        by_xla: whether XLA compiles it for the device on which it is called, once for every shape, at the first call.
        device: where its operations are placed, if not by XLA.
        options: those of its arguments that are numbers of Python.
    """
    def on_device(*inputs: tf.Tensor) -> Any:
        with tf.device(None if by_xla else device):
            return function(*inputs, **options)

    with tf.init_scope():
        # Of hundreds of operations, which TensorFlow would put in the place of every call and optimize anew.
        return tf.function(on_device, input_signature=_SIGNATURES[function], autograph=False, jit_compile=by_xla,
                           experimental_attributes={"_noinline": True}).get_concrete_function()


# Blocks.

def _blocks(elements: Any, block_elements: int) -> tuple[Any, Any]:
    """Number of blocks of a tensor, and the elements of each when the last one is filled up."""
    blocks = tf.maximum(1, -(-elements // block_elements))
    whole_words = ELEMENTS_PER_WORD * tf.maximum(1, -(-elements // ELEMENTS_PER_WORD))
    return blocks, tf.minimum(block_elements, whole_words)


def _in_blocks(values: tf.Tensor, blocks: Any, width: Any) -> tf.Tensor:
    """[.., n] as [.., blocks, width], filled up with zeros."""
    before = tf.shape(values)[:-1]
    filled = _filled(values, blocks * width)
    return tf.reshape(filled, tf.concat([before, [blocks, width]], axis=0))


def _filled(values: tf.Tensor, length: Any) -> tf.Tensor:
    """The last axis with zeros behind."""
    nothing = [[0, 0]] * (values.shape.rank - 1)
    return tf.pad(values, [*nothing, [0, length - tf.shape(values)[-1]]])


# Codes and counts.

def _packed(codes: tf.Tensor) -> tf.Tensor:
    """int32 codes of whole words to bytes: the first of four in the two highest bits."""
    four = tf.reshape(codes, [-1, 4])
    return tf.cast(four[:, 0] * 64 + four[:, 1] * 16 + four[:, 2] * 4 + four[:, 3], tf.uint8)


def _unpacked(packed: tf.Tensor) -> tf.Tensor:
    """The inverse of ``_packed`` for k rows: uint8[k, bytes] to int32[k, 4 * bytes]."""
    codes = _and(tf.bitwise.right_shift(tf.cast(packed, tf.int32)[:, :, None], [6, 4, 2, 0]), 3)
    return tf.reshape(codes, [tf.shape(packed)[0], 4 * tf.shape(packed)[1]])


def _counts(counts: tf.Tensor, bits: int) -> tf.Tensor:
    """Counts of ``bits`` bits as int32."""
    planes, nbytes = tf.shape(counts)[0], tf.shape(counts)[1]
    if bits == 4:
        nibbles = _and(tf.bitwise.right_shift(tf.cast(counts, tf.int32)[:, :, None], [0, 4]), 15)
        return tf.reshape(tf.bitwise.bitwise_xor(nibbles, 8) - 8, [planes, 2 * nbytes])
    if bits == 8:
        return tf.cast(tf.bitcast(counts, tf.int8), tf.int32)
    return tf.cast(tf.bitcast(tf.reshape(counts, [planes, nbytes // 2, 2]), tf.int16), tf.int32)


# Sums of ranks, in float64.

def _are_symmetric(levels: tf.Tensor) -> tf.Tensor:
    return tf.equal(levels[:, 0], -levels[:, 1])


def _sum_of_counts(positives: tf.Tensor, negatives: tf.Tensor, levels: tf.Tensor, symmetric: tf.Tensor) -> tf.Tensor:
    """Counts int32[blocks, width] times levels float64[blocks, 2], as float32 sums, float64."""
    together = _product(positives - negatives, levels[:, 0])
    apart = _rounded(_product(positives, levels[:, 0]) + _product(negatives, levels[:, 1]))
    return tf.where(symmetric[:, None], together, apart)


def _product(counts: tf.Tensor, level: tf.Tensor) -> tf.Tensor:
    return _rounded(tf.cast(counts, tf.float64) * level[:, None])


def _sum_in_rank_order(codes: tf.Tensor, levels: tf.Tensor) -> tf.Tensor:
    """Codes int32[k, blocks, width] times levels float64[k, blocks, 2], added up as float32 numbers."""
    def add(rank: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        level = levels[rank]
        zero = tf.zeros([], tf.float64)
        value = tf.where(tf.equal(codes[rank], CODE_POSITIVE), level[:, 0, None],
                         tf.where(tf.equal(codes[rank], CODE_NEGATIVE), level[:, 1, None], zero))
        return rank + 1, _rounded(total + value)

    beginning = 0, tf.zeros(tf.shape(codes)[1:], tf.float64)
    return tf.while_loop(lambda rank, _: rank < tf.shape(codes)[0], add, beginning,
                         shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, None])))[1]


def _reduced(total: tf.Tensor, not_finite: tf.Tensor, elements: Any, scale: Any) -> tf.Tensor:
    """Sums [blocks, width] as a tensor's values, float32[elements]."""
    values = tf.where(not_finite, float("nan"), _narrow(total * tf.cast(scale, tf.float64)))
    return tf.reshape(values, [-1])[:elements]


def _rounded(value: tf.Tensor) -> tf.Tensor:
    """float64 rounded to float32, as float64.

    Below 2^-126 it has to be a multiple of 2^-149, as sums of float32 numbers and whole multiples of them are.
    """
    bits = tf.bitcast(value, tf.int64)
    odd = _and(tf.bitwise.right_shift(bits, tf.constant(29, tf.int64)), tf.constant(1, tf.int64))
    rounded = tf.bitcast(_and(bits + 0x0FFFFFFF + odd, tf.constant(-1 << 29, tf.int64)), tf.float64)
    # From here on float32 is infinite; a NaN stays one, too.
    return tf.where(tf.abs(value) < 2.0 ** 128 - 2.0 ** 103, rounded, value * float("inf"))


def _widened(value: tf.Tensor) -> tf.Tensor:
    """float32 as float64, subnormal numbers included."""
    bits = tf.bitcast(value, tf.int32)
    subnormal = tf.cast(_and(bits, _MANTISSA), tf.float64) * 2.0 ** -149
    subnormal = tf.where(bits < 0, -subnormal, subnormal)
    return tf.where(tf.equal(_and(bits, _EXPONENT), 0), subnormal, tf.cast(value, tf.float64))


def _narrow(value: tf.Tensor) -> tf.Tensor:
    """float64 rounded to float32, subnormal numbers included."""
    magnitude = tf.abs(value)
    is_subnormal = magnitude < 2.0 ** -126
    ulps = tf.round(tf.where(is_subnormal, magnitude, 0.0) * 2.0 ** 149)  # Half to even.
    bits = tf.where(is_subnormal, tf.cast(ulps, tf.int32), tf.bitcast(tf.cast(magnitude, tf.float32), tf.int32))
    high = tf.cast(tf.bitwise.right_shift(tf.bitcast(value, tf.int64), tf.constant(32, tf.int64)), tf.int32)
    return tf.bitcast(_or(bits, _and(high, _SIGN)), tf.float32)


# Sums of a rank, in float32.

def _added(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """The float32 sum, subnormal numbers included."""
    one_bits, other_bits = tf.bitcast(one, tf.int32), tf.bitcast(other, tf.int32)
    are_small = _and(_or(one_bits, other_bits), _MAGNITUDE) < _SMALL
    return tf.where(are_small, _lowered(_lifted(one) + _lifted(other)), one + other)


def _lifted(value: tf.Tensor) -> tf.Tensor:
    """The value times 2^64, infinite where that is too large."""
    bits = tf.bitcast(value, tf.int32)
    subnormal = tf.cast(_and(bits, _MANTISSA), tf.float32) * _LIFTED_ULP
    subnormal = tf.where(bits < 0, -subnormal, subnormal)
    return tf.where(tf.equal(_and(bits, _EXPONENT), 0), subnormal, value * _LIFT)


def _lowered(lifted: tf.Tensor) -> tf.Tensor:
    """The inverse of ``_lifted``, of finite values."""
    magnitude = tf.abs(lifted)
    is_subnormal = magnitude < _LIFTED_NORMAL
    ulps = tf.cast(tf.where(is_subnormal, magnitude, 0.0) * (1 / _LIFTED_ULP), tf.int32)
    bits = tf.where(is_subnormal, ulps, tf.bitcast(magnitude * (1 / _LIFT), tf.int32))
    return tf.bitcast(_or(bits, _and(tf.bitcast(lifted, tf.int32), _SIGN)), tf.float32)


_Pair = tuple[tf.Tensor, tf.Tensor]
"""A magnitude, or zero in place of a subnormal one; and lifted, where nothing is flushed, infinite where too large."""


def _add_pairs(one: _Pair, other: _Pair) -> _Pair:
    """The float32 sum of magnitudes.

    While it is small, what is lifted is right, and the other follows it. When it no longer is, the other is right, as
    what was flushed until then changes no sum of that size.
    """
    lifted = one[1] + other[1]
    return tf.where(lifted < _LIFTED_SMALL, lifted * (1 / _LIFT), one[0] + other[0]), lifted


def _sums_in_lanes(magnitudes: tf.Tensor, width: Any, block_elements: int) -> tf.Tensor:
    """Sums of float32 magnitudes[.., blocks, width], in the order of ``kernels.quantize_pack``: float64[.., blocks]."""
    chunk = min(SUM_CHUNK_ELEMENTS, block_elements)
    chunks = -(-width // chunk)
    before = tf.shape(magnitudes)[:-1]
    words = tf.reshape(_filled(magnitudes, chunks * chunk),
                       tf.concat([before, [chunks, chunk // ELEMENTS_PER_WORD, ELEMENTS_PER_WORD]], axis=0))
    lanes, lifted = (tf.unstack(part, chunk // ELEMENTS_PER_WORD, axis=-2) for part in (words, _lifted(words)))
    pair = functools.reduce(_add_pairs, zip(lanes, lifted))
    for half in (8, 4, 2, 1):
        pair = _add_pairs((pair[0][..., :half], pair[1][..., :half]), (pair[0][..., half:], pair[1][..., half:]))
    one, lifted = pair[0][..., 0], pair[1][..., 0]
    sums = tf.where(lifted < _LIFTED_SMALL, tf.cast(lifted, tf.float64) * (1 / _LIFT), tf.cast(one, tf.float64))
    if block_elements <= SUM_CHUNK_ELEMENTS:
        return sums[..., 0]
    return tf.while_loop(lambda number, _: number < chunks,
                         lambda number, total: (number + 1, total + sums[..., number]),
                         (0, tf.zeros(before, tf.float64)),
                         shape_invariants=(tf.TensorShape([]), tf.TensorShape([None] * (magnitudes.shape.rank - 1))))[1]

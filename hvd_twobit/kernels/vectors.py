"""What ``cpu.py`` says in LLVM's vectors instead of Numba's Python: one word of 16 elements, and the rounding mode.

A *word* is 16 elements of a gradient and the 4 bytes of their codes. A vector of 16 floats is legal on every CPU;
LLVM splits it into registers of the width it prefers. Written out because a loop over scalars depends on the mood of
LLVM's vectorizer: with the test for finite sums and the statistics it took 1.6 to 4.7 times as long as ``np.add``,
this takes 0.9 to 1.0 times (Ice Lake, 25.6 M elements, with AVX-512 or AVX2).

Nothing here checks bounds. Indices and offsets are int64, machine words are little-endian.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from . import ELEMENTS_PER_WORD

SHIFTS = tuple(8 * (element // 4) + 6 - 2 * (element % 4) for element in range(ELEMENTS_PER_WORD))
"""Where the code of each element begins in a word read as a little-endian integer."""

_PREFETCH_BYTES = 2048
"""How far ahead of the loops memory is asked for: the hardware's own prefetching stops at each 4 KiB page.
Measured (quantize_pack on Ice Lake, ratio to np.add): none 1.11, 512 bytes 1.01, 1024 0.97, 2048 0.92, 4096 0.92."""

_IEEE_MXCSR = 0x1F80
"""x86's control word as a process starts: round to nearest, subnormal numbers kept, no traps."""

intrinsic: Any = extending.intrinsic  # its annotations do not know that Numba passes the typing context by itself

_I8, _I32, _I64, _F32, _F64 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()
_FLOATS = ir.VectorType(_F32, ELEMENTS_PER_WORD)
_DOUBLES = ir.VectorType(_F64, ELEMENTS_PER_WORD)
_WORDS = ir.VectorType(_I32, ELEMENTS_PER_WORD)
_FLOAT_ALIGNMENT = 1  # bytes: a gradient may lie anywhere in a receive buffer; unaligned loads are as fast
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_ROUNDS = 1.5 * 2.0**52
"""Added to a double of at most 2**51 and taken off again, it leaves the nearest whole number."""


def _splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """``scalar`` in each of 16 lanes."""
    undefined = ir.Constant(ir.VectorType(scalar.type, ELEMENTS_PER_WORD), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(undefined, scalar, _I32(0)), undefined,
                                  _WORDS([0] * ELEMENTS_PER_WORD))


def _address(context: Any, builder: ir.IRBuilder, array_type: types.Array, array: ir.Value,
             offset: ir.Value) -> ir.Value:
    """Pointer to the byte ``offset`` bytes behind the beginning of an array's data."""
    data = cgutils.create_struct_proxy(array_type)(context, builder, value=array).data
    return builder.gep(builder.bitcast(data, _I8.as_pointer()), [offset])


def _load_floats(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.load(builder.bitcast(address, _FLOATS.as_pointer()), align=_FLOAT_ALIGNMENT)


def _store_floats(builder: ir.IRBuilder, floats: ir.Value, address: ir.Value) -> None:
    builder.store(floats, builder.bitcast(address, _FLOATS.as_pointer()), align=_FLOAT_ALIGNMENT)


def _prefetch(builder: ir.IRBuilder, address: ir.Value, for_writing: bool) -> None:
    """Ask for the cache line ``_PREFETCH_BYTES`` behind ``address``; never faults, so it may lie beyond the array."""
    signature = ir.FunctionType(ir.VoidType(), [address.type, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    keep_in_all_levels, data_cache = _I32(3), _I32(1)
    builder.call(function, [builder.gep(address, [_I64(_PREFETCH_BYTES)]), _I32(int(for_writing)),
                            keep_in_all_levels, data_cache])


@intrinsic
def quantize_word(typing_context, gradient, residual, start, packed, byte, valid, thresholds, levels, lanes):
    """Quantize elements ``start`` to ``start + 15``; returns how many were selected (code 11 or 10), uint32.

    Updates ``residual``, overwrites ``packed[byte:byte + 4]`` but for bits that are not in the uint32 ``valid``, which
    become zero, and adds selected magnitudes to ``lanes`` f32[16]. ``thresholds`` and ``levels`` are tuples
    ``(positive, negative)``.
    """
    def generate(context, builder, signature, arguments):
        offset = builder.shl(arguments[2], _I64(2))
        gradient_at = _address(context, builder, signature.args[0], arguments[0], offset)
        residual_at = _address(context, builder, signature.args[1], arguments[1], offset)
        packed_at = _address(context, builder, signature.args[3], arguments[3], arguments[4])
        lanes_at = _address(context, builder, signature.args[8], arguments[8], _I64(0))
        positive_threshold, negative_threshold, positive_level, negative_level = (
            _splat(builder, builder.extract_value(arguments[pair], side)) for pair in (6, 7) for side in (0, 1))
        zero = _FLOATS([0.0] * ELEMENTS_PER_WORD)

        _prefetch(builder, gradient_at, for_writing=False)
        _prefetch(builder, residual_at, for_writing=True)
        before = _load_floats(builder, residual_at)
        total = builder.fadd(before, _load_floats(builder, gradient_at))
        fabs = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_FLOATS, [_FLOATS]), "llvm.fabs.v16f32")
        magnitude = builder.call(fabs, [total])
        finite = builder.fcmp_ordered("<=", magnitude, _splat(builder, _F32(_FLOAT32_MAX)))
        positive = builder.and_(finite, builder.fcmp_ordered(">=", total, positive_threshold))
        negative = builder.and_(finite, builder.fcmp_ordered("<=", total, negative_threshold))
        selected = builder.or_(positive, negative)
        # Between the residual's load and its store: else LLVM makes them a masked store, which AMD's AVX2 is slow at.
        lanes = builder.fadd(_load_floats(builder, lanes_at), builder.select(selected, magnitude, zero))
        _store_floats(builder, lanes, lanes_at)
        level = builder.select(positive, positive_level, builder.select(negative, negative_level, zero))
        _store_floats(builder, builder.select(finite, builder.fsub(total, level), before), residual_at)

        low_bits = builder.or_(positive, builder.not_(finite))
        source_of_bit = [0] * (2 * ELEMENTS_PER_WORD)
        for element, shift in enumerate(SHIFTS):
            source_of_bit[shift], source_of_bit[shift + 1] = element, ELEMENTS_PER_WORD + element
        bits = builder.shuffle_vector(low_bits, selected, ir.VectorType(_I32, len(source_of_bit))(source_of_bit))
        word = builder.and_(builder.bitcast(bits, _I32), arguments[5])
        builder.store(word, builder.bitcast(packed_at, _I32.as_pointer()), align=1)
        return builder.ctpop(builder.and_(word, _I32(0xAAAAAAAA)))

    return types.uint32(gradient, residual, start, packed, byte, types.uint32, thresholds, levels, lanes), generate


def _load_word_values(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
    """Sixteen floats: what the codes of ``packed[rank, 4 * word:4 * word + 4]`` stand for.

    The first four arguments of the caller are packed, rank, word and the tuple of floats for (00, 10, 11).
    """
    packed = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=arguments[0])
    row = builder.mul(arguments[1], builder.extract_value(packed.strides, 0))
    at = builder.gep(builder.bitcast(packed.data, _I8.as_pointer()),
                     [builder.add(row, builder.shl(arguments[2], _I64(2)))])
    return _values_of_word(builder, at, arguments[3])


def _values_of_word(builder: ir.IRBuilder, at: ir.Value, values: ir.Value) -> ir.Value:
    """Sixteen numbers: what the codes of the 4 bytes behind an address stand for.

    ``values`` is the tuple of numbers for (00, 10, 11); 01 stands for NaN.
    """
    word = _splat(builder, builder.load(builder.bitcast(at, _I32.as_pointer()), align=1))
    nothing = _WORDS([0] * ELEMENTS_PER_WORD)
    low = builder.icmp_unsigned("!=", builder.and_(word, _WORDS([1 << shift for shift in SHIFTS])), nothing)
    high = builder.icmp_unsigned("!=", builder.and_(word, _WORDS([2 << shift for shift in SHIFTS])), nothing)
    zero, negative, positive = (_splat(builder, builder.extract_value(values, i)) for i in range(3))
    not_finite = _splat(builder, ir.Constant(values.type.element, float("nan")))
    return builder.select(high, builder.select(low, positive, negative), builder.select(low, not_finite, zero))


@intrinsic
def store_word(typing_context, packed, rank, word, values, out, start):
    """``out[start:start + 16] = `` the values of one word."""
    def generate(context, builder, signature, arguments):
        at = _address(context, builder, signature.args[4], arguments[4], builder.shl(arguments[5], _I64(2)))
        _prefetch(builder, at, for_writing=True)
        decoded = _load_word_values(context, builder, signature, arguments)
        _store_floats(builder, decoded, at)
        return context.get_dummy_value()

    return types.void(packed, rank, word, values, out, start), generate


@intrinsic
def add_word(typing_context, packed, rank, word, values, out, start):
    """``out[start:start + 16] += `` the values of one word."""
    def generate(context, builder, signature, arguments):
        at = _address(context, builder, signature.args[4], arguments[4], builder.shl(arguments[5], _I64(2)))
        decoded = _load_word_values(context, builder, signature, arguments)
        _store_floats(builder, builder.fadd(_load_floats(builder, at), decoded), at)
        return context.get_dummy_value()

    return types.void(packed, rank, word, values, out, start), generate


# ---- counts of codes ------------------------------------------------------------------------------------------------

def _count_type(bits: int) -> ir.VectorType:
    """Sixteen counts as they are converted: those of 4 bits are bytes before they are put together."""
    return ir.VectorType(ir.IntType(max(bits, 8)), ELEMENTS_PER_WORD)


def _row_address(context: Any, builder: ir.IRBuilder, array_type: types.Array, array: ir.Value, row: ir.Value,
                 byte: ir.Value) -> ir.Value:
    """Pointer to a byte of a row of a two-dimensional array of bytes."""
    rows = cgutils.create_struct_proxy(array_type)(context, builder, value=array)
    offset = builder.add(builder.mul(row, builder.extract_value(rows.strides, 0)), byte)
    return builder.gep(builder.bitcast(rows.data, _I8.as_pointer()), [offset])


def _store_narrowed(builder: ir.IRBuilder, integers: ir.Value, bits: int, at: ir.Value) -> None:
    """Store sixteen int32 as counts of so many bits."""
    narrow = builder.trunc(integers, _count_type(bits))
    if bits == 4:
        half = ELEMENTS_PER_WORD // 2
        indices = ir.VectorType(_I32, half)
        undefined = ir.Constant(narrow.type, ir.Undefined)
        even = builder.shuffle_vector(narrow, undefined, indices([2 * i for i in range(half)]))
        odd = builder.shuffle_vector(narrow, undefined, indices([2 * i + 1 for i in range(half)]))
        narrow = builder.or_(builder.and_(even, even.type([15] * half)), builder.shl(odd, odd.type([4] * half)))
    builder.store(narrow, builder.bitcast(at, narrow.type.as_pointer()), align=1)


def _store_counts(bits: int) -> Any:
    lowest = -(1 << (bits - 1))

    @intrinsic
    def store_counts(typing_context, values, start, counts, plane, byte):
        """``counts[plane, byte:byte + 2 * bits] = values[start:start + 16]``; NaN becomes the lowest integer."""
        def generate(context, builder, signature, arguments):
            at = _row_address(context, builder, signature.args[2], *arguments[2:])
            floats = _load_floats(builder, _address(context, builder, signature.args[0], arguments[0],
                                                    builder.shl(arguments[1], _I64(2))))
            is_nan = builder.fcmp_unordered("uno", floats, floats)
            integers = builder.fptosi(builder.select(is_nan, _splat(builder, _F32(lowest)), floats), _WORDS)
            _store_narrowed(builder, integers, bits, at)
            return context.get_dummy_value()

        return types.void(values, start, counts, plane, byte), generate

    return store_counts


def _load_counts(bits: int) -> Any:
    lowest = -(1 << (bits - 1))

    @intrinsic
    def load_counts(typing_context, counts, plane, byte, out, start):
        """``out[start:start + 16] = counts[plane, byte:byte + 2 * bits]``, integers as float32; the lowest as NaN."""
        def generate(context, builder, signature, arguments):
            at = _row_address(context, builder, signature.args[0], *arguments[:3])
            out_at = _address(context, builder, signature.args[3], arguments[3], builder.shl(arguments[4], _I64(2)))
            _prefetch(builder, out_at, for_writing=True)
            if bits == 4:
                half = ELEMENTS_PER_WORD // 2
                both = builder.load(builder.bitcast(at, ir.VectorType(_I8, half).as_pointer()), align=1)
                low = builder.ashr(builder.shl(both, both.type([4] * half)), both.type([4] * half))
                high = builder.ashr(both, both.type([4] * half))
                interleaved = [lane for i in range(half) for lane in (i, half + i)]
                narrow = builder.shuffle_vector(low, high, _WORDS(interleaved))
            else:
                narrow = builder.load(builder.bitcast(at, _count_type(bits).as_pointer()), align=1)
            integers = builder.sext(narrow, _WORDS)
            is_nan = builder.icmp_signed("==", integers, _WORDS([lowest] * ELEMENTS_PER_WORD))
            floats = builder.select(is_nan, _splat(builder, _F32(float("nan"))), builder.sitofp(integers, _FLOATS))
            _store_floats(builder, floats, out_at)
            return context.get_dummy_value()

        return types.void(counts, plane, byte, out, start), generate

    return load_counts


store_counts_4, store_counts_8, store_counts_16 = _store_counts(4), _store_counts(8), _store_counts(16)
load_counts_4, load_counts_8, load_counts_16 = _load_counts(4), _load_counts(8), _load_counts(16)


# ---- digits of integers --------------------------------------------------------------------------------------------

def _code_bits(builder: ir.IRBuilder, word: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The high and the low bit of 16 codes, from one word."""
    words, nothing = _splat(builder, word), _WORDS([0] * ELEMENTS_PER_WORD)
    return tuple(builder.icmp_unsigned("!=", builder.and_(words, _WORDS([bit << shift for shift in SHIFTS])), nothing)
                 for bit in (2, 1))


@intrinsic
def append_digits(typing_context, packed, byte, digits, radix, integers, start):
    """``integers[start:start + 16] = integers[start:start + 16] * radix + `` the digits of one word of codes.

    ``digits`` is a tuple of uint32 for codes (00 and 01, 10, 11).
    """
    def generate(context, builder, signature, arguments):
        at = _address(context, builder, signature.args[0], arguments[0], arguments[1])
        word = builder.load(builder.bitcast(at, _I32.as_pointer()), align=1)
        high, low = _code_bits(builder, word)
        zero, negative, positive = (_splat(builder, builder.extract_value(arguments[2], i)) for i in range(3))
        digit = builder.select(high, builder.select(low, positive, negative), zero)
        integers_at = builder.bitcast(_address(context, builder, signature.args[4], arguments[4],
                                               builder.shl(arguments[5], _I64(2))), _WORDS.as_pointer())
        before = builder.mul(builder.load(integers_at, align=1), _splat(builder, arguments[3]))
        builder.store(builder.add(before, digit), integers_at, align=1)
        return context.get_dummy_value()

    return types.void(packed, byte, digits, types.uint32, integers, start), generate


def _take_digits(bits: int) -> Any:
    @intrinsic
    def take_digits(typing_context, integers, multiplier, shift, radix, offset, counts, plane, byte):
        """Take the lowest digits out of ``integers[:16]`` and store them, less ``offset``, as counts.

        ``x * multiplier >> shift`` has to be ``x // radix``.
        """
        def generate(context, builder, signature, arguments):
            wide = ir.VectorType(_I64, ELEMENTS_PER_WORD)
            at = builder.bitcast(_address(context, builder, signature.args[0], arguments[0], _I64(0)),
                                 _WORDS.as_pointer())
            before = builder.load(at, align=1)
            product = builder.mul(builder.zext(before, wide), builder.zext(_splat(builder, arguments[1]), wide))
            shift = builder.zext(_splat(builder, arguments[2]), wide)
            higher = builder.trunc(builder.lshr(product, shift), _WORDS)
            builder.store(higher, at, align=1)
            digits = builder.sub(before, builder.mul(higher, _splat(builder, arguments[3])))
            counts_at = _row_address(context, builder, signature.args[5], *arguments[5:])
            _store_narrowed(builder, builder.sub(digits, _splat(builder, arguments[4])), bits, counts_at)
            return context.get_dummy_value()

        return types.void(integers, *[types.uint32] * 4, counts, plane, byte), generate

    return take_digits


take_digits_4, take_digits_8, take_digits_16 = _take_digits(4), _take_digits(8), _take_digits(16)


# ---- digits of doubles ---------------------------------------------------------------------------------------------

def _load_doubles(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.load(builder.bitcast(address, _DOUBLES.as_pointer()), align=_FLOAT_ALIGNMENT)


def _store_doubles(builder: ir.IRBuilder, doubles: ir.Value, address: ir.Value) -> None:
    builder.store(doubles, builder.bitcast(address, _DOUBLES.as_pointer()), align=_FLOAT_ALIGNMENT)


def _rounded(builder: ir.IRBuilder, doubles: ir.Value) -> ir.Value:
    """The nearest whole numbers of doubles that are at most 2**51."""
    rounds = _splat(builder, _F64(_ROUNDS))
    return builder.fsub(builder.fadd(doubles, rounds), rounds)


@intrinsic
def push_digits(typing_context, packed, word, digits, radix, words, start):
    """``words[start:start + 16] *= radix``, then the digits of ``packed[4 * word:4 * word + 4]`` are added.

    ``digits`` are the doubles for (00, 10, 11).
    """
    def generate(context, builder, signature, arguments):
        at = _address(context, builder, signature.args[4], arguments[4], builder.shl(arguments[5], _I64(3)))
        codes = _address(context, builder, signature.args[0], arguments[0], builder.shl(arguments[1], _I64(2)))
        higher = builder.fmul(_load_doubles(builder, at), _splat(builder, arguments[3]))
        _store_doubles(builder, builder.fadd(higher, _values_of_word(builder, codes, arguments[2])), at)
        return context.get_dummy_value()

    return types.void(packed, word, digits, types.float64, words, start), generate


@intrinsic
def open_words(typing_context, words, start, divisor, middle, rest):
    """``rest[:16] = round(words[start:start + 16] / divisor) - middle``; rest is float64[16]."""
    def generate(context, builder, signature, arguments):
        at = _address(context, builder, signature.args[0], arguments[0], builder.shl(arguments[1], _I64(3)))
        rest_at = _address(context, builder, signature.args[4], arguments[4], _I64(0))
        _prefetch(builder, at, for_writing=False)
        whole = _rounded(builder, builder.fdiv(_load_doubles(builder, at), _splat(builder, arguments[2])))
        _store_doubles(builder, builder.fsub(whole, _splat(builder, arguments[3])), rest_at)
        return context.get_dummy_value()

    return types.void(words, start, types.float64, types.float64, rest), generate


@intrinsic
def pop_digits(typing_context, rest, radix, inverse, middle, out, start):
    """Take the lowest digits off ``rest`` float64[16]; with ``middle`` added they go to ``out[start:start + 16]``."""
    def generate(context, builder, signature, arguments):
        rest_at = _address(context, builder, signature.args[0], arguments[0], _I64(0))
        at = _address(context, builder, signature.args[4], arguments[4], builder.shl(arguments[5], _I64(2)))
        radix, inverse, middle = (_splat(builder, arguments[i]) for i in (1, 2, 3))
        rest = _load_doubles(builder, rest_at)
        higher = _rounded(builder, builder.fmul(rest, inverse))
        digits = builder.fadd(builder.fsub(rest, builder.fmul(higher, radix)), middle)
        _store_doubles(builder, higher, rest_at)
        _prefetch(builder, at, for_writing=True)
        _store_floats(builder, builder.fptrunc(digits, _FLOATS), at)
        return context.get_dummy_value()

    return types.void(rest, types.float64, types.float64, types.float64, out, start), generate


# ---- the floating-point environment --------------------------------------------------------------------------------

def _move_mxcsr(builder: ir.IRBuilder, direction: str, slot: ir.Value) -> None:
    """Load ("ld") or store ("st") x86's floating-point control word from or to memory."""
    signature = ir.FunctionType(ir.VoidType(), [_I8.as_pointer()])
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.x86.sse.{direction}mxcsr")
    builder.call(function, [builder.bitcast(slot, _I8.as_pointer())])


def _is_x86(builder: ir.IRBuilder) -> bool:
    return builder.module.triple.startswith("x86_64")


@intrinsic
def enter_ieee(typing_context):
    """Make this thread keep subnormal numbers and round to nearest; return what ``leave_ieee`` restores, uint32.

    TensorFlow's threads and ``torch.set_flush_denormal`` flush subnormal numbers to zero, which would make residuals
    depend on the thread that calls. x86 only; elsewhere the thread's mode is used as it is. The fence costs nothing:
    it keeps the compiler from moving loads and stores, and with them the arithmetic, to the other side.
    """
    def generate(context, builder, signature, arguments):
        if not _is_x86(builder):
            return _I32(0)
        slot = cgutils.alloca_once(builder, _I32)
        _move_mxcsr(builder, "st", slot)
        before = builder.load(slot)
        builder.store(_I32(_IEEE_MXCSR), slot)
        _move_mxcsr(builder, "ld", slot)
        builder.fence("seq_cst", "singlethread")
        return before

    return types.uint32(), generate


@intrinsic
def leave_ieee(typing_context, before):
    """Give the thread its floating-point environment back."""
    def generate(context, builder, signature, arguments):
        if _is_x86(builder):
            builder.fence("seq_cst", "singlethread")
            slot = cgutils.alloca_once_value(builder, arguments[0])
            _move_mxcsr(builder, "ld", slot)
        return context.get_dummy_value()

    return types.void(types.uint32), generate

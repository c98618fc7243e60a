"""Conversion between float32 lanes and memory, by the element type of the array.

=======  =========================  ================================================
NumPy    holds                      load and store
=======  =========================  ================================================
float32  float32                    unchanged
uint32   a pair of bfloat16         unchanged: these lanes are moved, or multiplied as pairs
uint16   the bits of a bfloat16     shift by 16; round to nearest even
int16    the bits of a float16      convert
int8     int8                       convert; round to nearest even, ±127 at most
uint8    the bits of a float8 e4m3  by way of float16; likewise, ±448 at most
bool     the bits of a float8 e5m2  shift to float16; likewise, ±57344 at most
=======  =========================  ================================================

NumPy has no bfloat16 or float8 and Numba no float16, so other types of their size hold their bits.
These functions emit LLVM code; ``simd`` makes Numba functions of them.
"""

from __future__ import annotations

import platform

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils

from ...device import cpu_features

_F32, _F16 = ir.FloatType(), ir.HalfType()
_I32, _I16, _I8 = ir.IntType(32), ir.IntType(16), ir.IntType(8)


def load_lanes(builder, dtype, pointer, lanes):
    """Load ``lanes`` elements as a vector of float32."""
    return _LOADS[dtype](builder, pointer, lanes)


def store_lanes(builder, dtype, pointer, value):
    """Store a vector of float32, converted to the element type."""
    _write(builder, pointer, _ENCODINGS[dtype](builder, value))


def _read(builder, pointer, element, lanes):
    vector = ir.VectorType(element, lanes)
    align = 1 if element == _I8 else 2 if element in (_I16, _F16) else 4
    return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=align)


def _write(builder, pointer, value):
    align = {_I8: 1, _I16: 2, _F16: 2, _F32: 4}[value.type.element]
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=align)


def _all(like, value):
    """A constant in every lane of a vector like ``like``, or of such a type."""
    vector = getattr(like, "type", like)
    return ir.Constant(vector, [value] * vector.count)


# --- 32 and 16 bits ------------------------------------------------------------------------


def _load_f32(builder, pointer, lanes):
    return _read(builder, pointer, _F32, lanes)


def _load_f16(builder, pointer, lanes):
    return _widen_half(builder, _read(builder, pointer, _I16, lanes))


def _converts_halves():
    """Whether the target has instructions for float16; else LLVM calls a library function."""
    return platform.machine() not in ("x86_64", "AMD64") or "f16c" in cpu_features()


def _widen_half(builder, bits):
    """float32 from the bits of float16, exactly."""
    floats, ints = (ir.VectorType(kind, bits.type.count) for kind in (_F32, _I32))
    if _converts_halves():
        return builder.fpext(builder.bitcast(bits, ir.VectorType(_F16, bits.type.count)), floats)
    wide = builder.sext(bits, ints)
    sign = builder.and_(wide, _all(ints, -1 << 31))
    size = builder.and_(builder.shl(wide, _all(ints, 13)), _all(ints, 0x0FFFE000))
    # The exponents' biases, 15 and 127, differ by 112. Multiplying is right for subnormals too.
    moved = builder.fmul(builder.bitcast(size, floats), _all(floats, 2.0**112))
    moved = builder.bitcast(moved, ints)
    is_special = builder.icmp_signed(">=", size, _all(ints, 0x1F << 23))  # infinity or NaN
    moved = builder.select(is_special, builder.or_(size, _all(ints, 0xFF << 23)), moved)
    return builder.bitcast(builder.or_(moved, sign), floats)


def _load_bf16(builder, pointer, lanes):
    bits = builder.zext(_read(builder, pointer, _I16, lanes), ir.VectorType(_I32, lanes))
    return builder.bitcast(builder.shl(bits, _all(bits, 16)), ir.VectorType(_F32, lanes))


def _encode_f32(builder, value):
    return value


def _encode_f16(builder, value):
    halves = ir.VectorType(_F16, value.type.count)
    if _converts_halves():
        return builder.fptrunc(value, halves)
    ints, shorts = (ir.VectorType(kind, value.type.count) for kind in (_I32, _I16))
    bits = builder.bitcast(value, ints)
    sign = builder.and_(builder.lshr(bits, _all(ints, 16)), _all(ints, 0x8000))
    size = builder.and_(bits, _all(ints, 0x7FFFFFFF))
    odd = builder.and_(builder.lshr(size, _all(ints, 13)), _all(ints, 1))
    rounded = builder.add(size, builder.add(odd, _all(ints, 0xFFF - (112 << 23))))
    code = builder.lshr(rounded, _all(ints, 13))
    # Subnormal numbers are multiples of 2 ** -24, the last bit of 0.5 in float32.
    steps = _all(value, 0.5)
    count = builder.fadd(builder.bitcast(size, value.type), steps)
    count = builder.sub(builder.bitcast(count, ints), builder.bitcast(steps, ints))
    code = builder.select(builder.icmp_signed("<", size, _all(ints, 113 << 23)), count, code)
    code = builder.select(
        builder.icmp_signed(">=", size, _all(ints, 143 << 23)), _all(ints, 0x7C00), code
    )
    is_nan = builder.fcmp_unordered("uno", value, value)
    code = builder.or_(builder.select(is_nan, _all(ints, 0x7E00), code), sign)
    return builder.bitcast(builder.trunc(code, shorts), halves)


def _encode_bf16(builder, value):
    bits = builder.bitcast(value, ir.VectorType(_I32, value.type.count))
    odd = builder.and_(builder.lshr(bits, _all(bits, 16)), _all(bits, 1))
    rounded = builder.add(bits, builder.add(odd, _all(bits, 0x7FFF)))
    # Rounding would carry a NaN's payload into the exponent and turn it into an infinity.
    quiet = builder.or_(bits, _all(bits, 0x400000))
    is_nan = builder.fcmp_unordered("uno", value, value)
    high = builder.lshr(builder.select(is_nan, quiet, rounded), _all(bits, 16))
    return builder.trunc(high, ir.VectorType(_I16, value.type.count))


# --- 8 bits --------------------------------------------------------------------------------


def _load_int8(builder, pointer, lanes):
    return builder.sitofp(_read(builder, pointer, _I8, lanes), ir.VectorType(_F32, lanes))


def _load_e5m2(builder, pointer, lanes):
    """The upper half of a float16."""
    wide = builder.zext(_read(builder, pointer, _I8, lanes), ir.VectorType(_I16, lanes))
    return _widen_half(builder, builder.shl(wide, _all(wide, 8)))


def _load_e4m3(builder, pointer, lanes):
    """Shift exponent and mantissa to a float16's place, and multiply by 256.

    The biases, 7 and 15, differ by 8. This is right for subnormal numbers too. NaN, which would
    give 480, is handled apart.
    """
    codes = _read(builder, pointer, _I8, lanes)
    is_nan = builder.icmp_unsigned("==", builder.or_(codes, _all(codes, 0x80)), _all(codes, 0xFF))
    wide = builder.sext(codes, ir.VectorType(_I16, lanes))
    bits = builder.and_(builder.shl(wide, _all(wide, 7)), _all(wide, 0xBFFF))
    bits = builder.select(is_nan, _all(wide, 0x7E00), bits)
    value = _widen_half(builder, bits)
    return builder.fmul(value, _all(value, 256.0))


def _encode_int8(builder, value):
    value = builder.select(builder.fcmp_unordered("uno", value, value), _all(value, 0.0), value)
    # Adding 1.5 * 2^23 leaves no bits for the fraction, so it rounds; the low bits are the integer.
    shifted = builder.fadd(_clamp(builder, value, 127.0), _all(value, 12582912.0))
    bits = builder.bitcast(shifted, ir.VectorType(_I32, value.type.count))
    return builder.trunc(bits, ir.VectorType(_I8, value.type.count))


def _clamp(builder, value, largest):
    """Clamp to ±largest; NaN stays NaN."""
    for sign, end in (("<", -largest), (">", largest)):
        outside = builder.fcmp_ordered(sign, value, _all(value, end))
        value = builder.select(outside, _all(value, end), value)
    return value


def _encode_e4m3(builder, value):
    return _encode_float8(builder, value, mantissa=3, bias=7, largest=448.0)


def _encode_e5m2(builder, value):
    return _encode_float8(builder, value, mantissa=2, bias=15, largest=57344.0)


def _encode_float8(builder, value, mantissa, bias, largest):
    """Drop the lower bits of the mantissa, rounding by the carry of an addition."""
    dropped = 23 - mantissa
    ints = ir.VectorType(_I32, value.type.count)
    sign = builder.and_(builder.lshr(builder.bitcast(value, ints), _all(ints, 24)), _all(ints, 128))
    bits = builder.bitcast(_clamp(builder, value, largest), ints)
    bits = builder.and_(bits, _all(ints, 0x7FFFFFFF))
    odd = builder.and_(builder.lshr(bits, _all(ints, dropped)), _all(ints, 1))
    half = (1 << (dropped - 1)) - 1
    rounded = builder.add(bits, builder.add(odd, _all(ints, half - ((127 - bias) << 23))))
    code = builder.lshr(rounded, _all(ints, dropped))
    # Subnormal values are multiples of one step, the last bit of this number in float32.
    steps = _all(value, 2.0 ** (1 - bias + dropped))
    size = builder.bitcast(bits, value.type)
    count = builder.sub(
        builder.bitcast(builder.fadd(size, steps), ints), builder.bitcast(steps, ints)
    )
    is_subnormal = builder.fcmp_ordered("<", size, _all(size, 2.0 ** (1 - bias)))
    code = builder.select(is_subnormal, count, code)
    is_nan = builder.fcmp_unordered("uno", value, value)
    code = builder.or_(builder.select(is_nan, _all(ints, 0x7F), code), sign)
    return builder.trunc(code, ir.VectorType(_I8, value.type.count))


# --- pairs of bfloat16 ---------------------------------------------------------------------


class _BFloatType(ir.Type):
    """LLVM's bfloat, which llvmlite 0.50 has no class for: only its name is needed."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, type(self))

    def __hash__(self):
        return hash(type(self))


SHORTS, BFLOATS = ir.VectorType(_I16, 32), ir.VectorType(_BFloatType(), 32)
_BYTES = ir.VectorType(_I8, 64)
_FLOAT8 = {types.uint8: torch.float8_e4m3fn, types.boolean: torch.float8_e5m2}


def load_bf16_bits(builder, dtype, pointer):
    """Thirty-two bfloat16, exactly, from as many elements of that type or of 8 bits."""
    if dtype == types.uint16:
        return _read(builder, pointer, _I16, 32)
    if dtype in _FLOAT8 and "avx512vbmi" in cpu_features():
        return _look_up(builder, pointer, _bf16_table(_FLOAT8[dtype]))
    low, high = (load_lanes(builder, dtype, builder.gep(pointer, [_I32(at)]), 16) for at in (0, 16))
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    return builder.bitcast(_call(builder, name, BFLOATS, high, low), SHORTS)


def _call(builder, name, result, *operands):
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), operands)


def _bf16_table(dtype):
    """The bfloat16 bits of the 128 positive 8-bit values: their lower bytes, their upper bytes."""
    codes = torch.arange(128, dtype=torch.uint8, device="cpu").view(dtype)
    numbers = codes.to(torch.bfloat16).view(torch.uint8).view(-1, 2)
    return numbers[:, 0].tolist(), numbers[:, 1].tolist()


def _look_up(builder, pointer, table):
    """Look up each value's two bytes in tables of 128 bytes, two registers each; keep the sign."""
    codes = _read(builder, pointer, _I8, 32)
    twice = ir.Constant(ir.VectorType(_I32, 64), [*range(32), *range(32)])
    codes = builder.shuffle_vector(codes, codes, twice)
    low, high = (
        _call(
            builder,
            "llvm.x86.avx512.vpermi2var.qi.512",
            _BYTES,
            ir.Constant(_BYTES, half[:64]),
            codes,
            ir.Constant(_BYTES, half[64:]),
        )
        for half in table
    )
    high = builder.or_(high, builder.and_(codes, _all(codes, 0x80)))
    order = [byte for i in range(32) for byte in (i, 64 + i)]
    whole = builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_I32, 64), order))
    return builder.bitcast(whole, SHORTS)


_LOADS = {
    types.float32: _load_f32,
    types.uint32: _load_f32,
    types.uint16: _load_bf16,
    types.int16: _load_f16,
    types.int8: _load_int8,
    types.uint8: _load_e4m3,
    types.boolean: _load_e5m2,
}

_ENCODINGS = {
    types.float32: _encode_f32,
    types.uint32: _encode_f32,
    types.uint16: _encode_bf16,
    types.int16: _encode_f16,
    types.int8: _encode_int8,
    types.uint8: _encode_e4m3,
    types.boolean: _encode_e5m2,
}

"""Thirty-two bfloat16 lanes as a Numba value: the sixteen pairs that AVX512-BF16 multiplies.

The functions at the end choose by the element type of a product's left operand: bfloat16 (uint16)
is multiplied in pairs, others as float32.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model
from numba.np.arrayobj import populate_array

from .formats import BFLOATS, SHORTS, load_bf16_bits, load_lanes, store_lanes
from .simd import LANES, VECTOR, _muladd, _splat, f32x16, pointer_to

_I32 = ir.IntType(32)


class Bf16x32(types.Type):
    """The Numba type of thirty-two bfloat16 lanes, as sixteen pairs."""

    def __init__(self):
        super().__init__(name="Bf16x32")


bf16x32 = Bf16x32()


@register_model(Bf16x32)
class _Bf16x32Model(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, SHORTS)


@intrinsic
def load_pairs(typingctx, array, index):
    """``array[index : index + 32]`` as bfloat16: of that type, or 8 bits wide."""

    def codegen(context, builder, sig, args):
        pointer = pointer_to(context, builder, sig.args[0], args[0], args[1])
        return load_bf16_bits(builder, sig.args[0].dtype, pointer)

    return bf16x32(array, types.intp), codegen


@intrinsic
def splat_pair(typingctx, array, index):
    """Repeat the pair ``array[index : index + 2]`` (uint16) sixteen times."""

    def codegen(context, builder, sig, args):
        return _splat_pair(context, builder, sig.args[0], *args)

    return bf16x32(array, types.intp), codegen


def _splat_pair(context, builder, array_type, array, index):
    two = ir.VectorType(ir.IntType(16), 2)
    pair = builder.load(pointer_to(context, builder, array_type, array, index, two), align=2)
    return builder.shuffle_vector(pair, pair, ir.Constant(ir.VectorType(_I32, 32), [0, 1] * LANES))


def _zip(builder, a, b, first):
    """The pairs (a[i], b[i]) for sixteen indices from ``first`` on."""
    order = [lane for i in range(first, first + LANES) for lane in (i, 2 * LANES + i)]
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, 32), order))


def _zip_halves(name, first, doc):
    def op(typingctx, a, b):
        def codegen(context, builder, sig, args):
            return _zip(builder, args[0], args[1], first)

        return bf16x32(bf16x32, bf16x32), codegen

    op.__name__, op.__qualname__, op.__doc__ = name, name, doc
    return intrinsic(op)


zip_low = _zip_halves("zip_low", 0, "The pairs (a[i], b[i]) for i from 0 to 15.")
zip_high = _zip_halves("zip_high", LANES, "The pairs (a[i], b[i]) for i from 16 to 31.")


@intrinsic
def dot_pairs(typingctx, acc, a, b):
    """Lane i: ``acc[i] + a[2i] * b[2i] + a[2i + 1] * b[2i + 1]``; needs AVX512-BF16."""

    def codegen(context, builder, sig, args):
        acc, a, b = args
        return dot_pairs_of(builder, a, b, acc)

    return f32x16(f32x16, bf16x32, bf16x32), codegen


def dot_pairs_of(builder, a, b, acc):
    """Emit ``dot_pairs`` of sixteen pairs as lanes of any type."""
    fn = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(VECTOR, [VECTOR, BFLOATS, BFLOATS]),
        "llvm.x86.avx512bf16.dpbf16ps.512",
    )
    return builder.call(fn, [acc, builder.bitcast(a, BFLOATS), builder.bitcast(b, BFLOATS)])


@intrinsic
def round_pairs(typingctx, a, b):
    """The lanes of ``a``, then those of ``b``, rounded to bfloat16; needs AVX512-BF16."""

    def codegen(context, builder, sig, args):
        return _round(builder, *args)

    return bf16x32(f32x16, f32x16), codegen


def _round(builder, a, b):
    kind = ir.FunctionType(BFLOATS, [VECTOR, VECTOR])
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.bitcast(builder.call(function, [b, a]), SHORTS)


@intrinsic
def interleave(typingctx, a):
    """The pairs (a[i], a[16 + i])."""

    def codegen(context, builder, sig, args):
        order = [lane for i in range(LANES) for lane in (i, LANES + i)]
        return builder.shuffle_vector(*args, *args, ir.Constant(ir.VectorType(_I32, 32), order))

    return bf16x32(bf16x32), codegen


@intrinsic
def store_pairs(typingctx, array, index, value):
    """``array[index : index + 32] = value`` (uint16)."""

    def codegen(context, builder, sig, args):
        pointer = pointer_to(context, builder, sig.args[0], args[0], args[1], SHORTS)
        builder.store(args[2], pointer, align=2)
        return context.get_dummy_value()

    return types.void(array, types.intp, bf16x32), codegen


@intrinsic
def copy_as(typingctx, into, to, array, index):
    """Copy ``size_of(into)`` elements, converted to the type of ``into``, bfloat16 or float32."""
    of_pairs = are_pairs(into)

    def codegen(context, builder, sig, args):
        into, to, array, index = args
        value = _load(context, builder, of_pairs, sig.args[2], array, index)
        pointer = pointer_to(context, builder, sig.args[0], into, to, value.type)
        builder.store(value, pointer, align=2 if of_pairs else 4)
        return context.get_dummy_value()

    return types.void(into, types.intp, array, types.intp), codegen


@intrinsic
def as_operand(typingctx, array):
    """An array as ``gemm.multiply`` takes it: float32, or bfloat16 (uint16) as pairs (uint32)."""
    if not are_pairs(array):
        return array(array), lambda context, builder, sig, args: args[0]
    pairs = types.Array(types.uint32, 1, "C")

    def codegen(context, builder, sig, args):
        before = context.make_array(array)(context, builder, args[0])
        made = context.make_array(pairs)(context, builder)
        data = builder.bitcast(before.data, made.data.type)
        many, size = builder.lshr(before.nitems, ir.IntType(64)(1)), ir.IntType(64)(4)
        populate_array(made, data, [many], [size], size, None)
        return made._getvalue()

    return pairs(array), codegen


# --- by the type of the left operand ---------------------------------------------------------


def are_pairs(left):
    """Whether products with an array of this Numba type are of pairs."""
    return left.dtype == types.uint16


def _constant_of(name, of_pairs, of_float32, doc):
    def op(typingctx, left):
        number = of_pairs if are_pairs(left) else of_float32
        return types.intp(left), lambda context, builder, sig, args: ir.IntType(64)(number)

    op.__name__, op.__qualname__, op.__doc__ = name, name, doc
    return intrinsic(op)


size_of = _constant_of("size_of", 2 * LANES, LANES, "Elements in one vector of the left operand.")
keys_of = _constant_of("keys_of", 2, 1, "Keys whose weights are multiplied at once.")


@intrinsic
def load_as(typingctx, left, array, index):
    """Load elements from ``array[index]`` on as an operand for products with ``left``."""
    of_pairs = are_pairs(left)

    def codegen(context, builder, sig, args):
        return _load(context, builder, of_pairs, sig.args[1], args[1], args[2])

    return (bf16x32 if of_pairs else f32x16)(left, array, types.intp), codegen


@intrinsic
def load_values(typingctx, p, v, first, last):
    """Load thirty-two columns of a key's values, or of two keys' in pairs: two vectors."""
    of_pairs = are_pairs(p)
    vector = bf16x32 if of_pairs else f32x16

    def codegen(context, builder, sig, args):
        array, (_, v, first, last) = sig.args[1], args
        if not of_pairs:
            last = builder.add(first, first.type(LANES))
        left, right = (
            _load(context, builder, of_pairs, array, v, index) for index in (first, last)
        )
        if of_pairs:
            left, right = (_zip(builder, left, right, half) for half in (0, LANES))
        return context.make_tuple(builder, sig.return_type, (left, right))

    return types.UniTuple(vector, 2)(p, v, types.intp, types.intp), codegen


def _load(context, builder, of_pairs, array_type, array, index):
    pointer = pointer_to(context, builder, array_type, array, index)
    if of_pairs:
        return load_bf16_bits(builder, array_type.dtype, pointer)
    return load_lanes(builder, array_type.dtype, pointer, LANES)


@intrinsic
def load_weights(typingctx, p, index):
    """``p[index]`` in every lane, or ``p[index]`` and ``p[index + 1]`` in every pair."""
    of_pairs = are_pairs(p)

    def codegen(context, builder, sig, args):
        if of_pairs:
            return _splat_pair(context, builder, sig.args[0], *args)
        return _splat(builder, builder.load(pointer_to(context, builder, sig.args[0], *args)))

    return (bf16x32 if of_pairs else f32x16)(p, types.intp), codegen


@intrinsic
def store_weights(typingctx, p, index, low, high):
    """``p[index : index + 32]`` = both vectors, rounded to the type of ``p``.

    Subnormal numbers become 0 in bfloat16, as products take them.
    """
    of_pairs = are_pairs(p)

    def codegen(context, builder, sig, args):
        p, index, low, high = args
        pointer = pointer_to(context, builder, sig.args[0], p, index)
        if of_pairs:
            pairs = _round(builder, low, high)
            builder.store(pairs, builder.bitcast(pointer, SHORTS.as_pointer()), align=2)
        else:
            store_lanes(builder, sig.args[0].dtype, pointer, low)
            store_lanes(builder, sig.args[0].dtype, builder.gep(pointer, [_I32(LANES)]), high)
        return context.get_dummy_value()

    return types.void(p, types.intp, f32x16, f32x16), codegen


@intrinsic
def dot(typingctx, a, b, total):
    """``a * b + total``, or the sum of both products of each pair and ``total``."""
    multiply = dot_pairs_of if a == bf16x32 else _muladd

    def codegen(context, builder, sig, args):
        return multiply(builder, *args)

    return f32x16(a, a, f32x16), codegen

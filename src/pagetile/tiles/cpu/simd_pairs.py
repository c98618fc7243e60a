"""Thirty-two bfloat16 lanes as a Numba value: the sixteen pairs that AVX512-BF16 multiplies."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from .formats import BFLOATS, SHORTS, load_bf16_bits
from .simd import LANES, VECTOR, f32x16, pointer_to

_I32 = ir.IntType(32)


class Bf16x32(types.Type):
    """The Numba type of thirty-two bfloat16 lanes, seen as sixteen pairs."""

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
    """The pair ``array[index : index + 2]`` (uint16) sixteen times."""

    def codegen(context, builder, sig, args):
        two = ir.VectorType(ir.IntType(16), 2)
        pair = builder.load(
            pointer_to(context, builder, sig.args[0], args[0], args[1], two), align=2
        )
        return builder.shuffle_vector(
            pair, pair, ir.Constant(ir.VectorType(_I32, 32), [0, 1] * LANES)
        )

    return bf16x32(array, types.intp), codegen


def _zip_halves(name, first, doc):
    order = [lane for i in range(first, first + LANES) for lane in (i, 2 * LANES + i)]

    def op(typingctx, a, b):
        def codegen(context, builder, sig, args):
            return builder.shuffle_vector(*args, ir.Constant(ir.VectorType(_I32, 32), order))

        return bf16x32(bf16x32, bf16x32), codegen

    op.__name__, op.__qualname__, op.__doc__ = name, name, doc
    return intrinsic(op)


zip_low = _zip_halves("zip_low", 0, "The pairs (a[i], b[i]) for i from 0 to 15.")
zip_high = _zip_halves("zip_high", LANES, "The pairs (a[i], b[i]) for i from 16 to 31.")


@intrinsic
def dot_pairs(typingctx, acc, a, b):
    """Lane i: ``acc[i] + a[2i] * b[2i] + a[2i + 1] * b[2i + 1]``; needs AVX512-BF16."""

    def codegen(context, builder, sig, args):
        fn = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(VECTOR, [VECTOR, BFLOATS, BFLOATS]),
            "llvm.x86.avx512bf16.dpbf16ps.512",
        )
        acc, a, b = args
        return builder.call(fn, [acc, builder.bitcast(a, BFLOATS), builder.bitcast(b, BFLOATS)])

    return f32x16(f32x16, bf16x32, bf16x32), codegen

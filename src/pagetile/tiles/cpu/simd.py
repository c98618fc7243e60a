"""Sixteen float32 lanes as a Numba value.

LLVM does not keep array elements in registers over loops, so the micro-kernels use these vectors as
variables. ``<16 x float>`` is one AVX-512 register; on narrower machines LLVM splits it into two
AVX2 or four NEON registers, with the same results except for fused multiply-adds.

Arrays are one-dimensional and contiguous. ``formats`` converts lanes from and to their element
type.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model
from numba.np.arrayobj import populate_array

from .compile import inner
from .formats import load_lanes, store_lanes

LANES = 16
LOG2_E = np.float32(1.4426950408889634)
LN_2 = np.float32(0.6931471805599453)

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
VECTOR = ir.VectorType(_F32, LANES)
_INTS = ir.VectorType(_I32, LANES)


class F32x16(types.Type):
    """The Numba type of sixteen float32 lanes."""

    def __init__(self):
        super().__init__(name="F32x16")


f32x16 = F32x16()


@register_model(F32x16)
class _F32x16Model(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, VECTOR)


def _constant(value, vector=VECTOR):
    return ir.Constant(vector, [value] * LANES)


def _splat(builder, scalar):
    one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, one, ir.Constant(_INTS, [0] * LANES))


def pointer_to(context, builder, array_type, array, index, element=None):
    """The address of ``array[index]``, as a pointer to ``element`` if that is another type."""
    data = context.make_array(array_type)(context, builder, array).data
    pointer = builder.gep(data, [index])
    return pointer if element is None else builder.bitcast(pointer, element.as_pointer())


# --- making vectors ------------------------------------------------------------------------


@intrinsic
def zeros(typingctx):
    """Sixteen zeros."""
    return f32x16(), lambda context, builder, sig, args: _constant(0.0)


@intrinsic
def splat(typingctx, x):
    """``x`` in every lane."""

    def codegen(context, builder, sig, args):
        return _splat(builder, args[0])

    return f32x16(types.float32), codegen


@intrinsic
def lane_numbers(typingctx):
    """The lanes 0, 1, … 15."""
    lanes = ir.Constant(VECTOR, [float(i) for i in range(LANES)])
    return f32x16(), lambda context, builder, sig, args: lanes


@intrinsic
def load(typingctx, array, index):
    """Lanes ``array[index : index + 16]``, converted to float32."""

    def codegen(context, builder, sig, args):
        pointer = pointer_to(context, builder, sig.args[0], args[0], args[1])
        return load_lanes(builder, sig.args[0].dtype, pointer, LANES)

    return f32x16(array, types.intp), codegen


@intrinsic
def load_half(typingctx, array, index):
    """Lanes 0 to 7 from ``array[index : index + 8]``; the others are 0."""

    def codegen(context, builder, sig, args):
        pointer = pointer_to(context, builder, sig.args[0], args[0], args[1])
        low = load_lanes(builder, sig.args[0].dtype, pointer, 8)
        rest = ir.Constant(low.type, [0.0] * 8)
        return builder.shuffle_vector(low, rest, ir.Constant(_INTS, list(range(LANES))))

    return f32x16(array, types.intp), codegen


@intrinsic
def load_one(typingctx, array, index):
    """``array[index]``, converted to float32; ``index`` must not be negative."""

    def codegen(context, builder, sig, args):
        pointer = pointer_to(context, builder, sig.args[0], args[0], args[1])
        one = load_lanes(builder, sig.args[0].dtype, pointer, 1)
        return builder.extract_element(one, ir.Constant(_I32, 0))

    return types.float32(array, types.intp), codegen


@intrinsic
def load_splat(typingctx, array, index):
    """``array[index]`` in every lane, as ``load_one`` loads it."""

    def codegen(context, builder, sig, args):
        pointer = pointer_to(context, builder, sig.args[0], args[0], args[1])
        one = load_lanes(builder, sig.args[0].dtype, pointer, 1)
        return _splat(builder, builder.extract_element(one, ir.Constant(_I32, 0)))

    return f32x16(array, types.intp), codegen


@intrinsic
def store_one(typingctx, array, index, value):
    """``array[index] = value``, rounded to the array's element type."""

    def codegen(context, builder, sig, args):
        none = ir.Constant(ir.VectorType(_F32, 1), ir.Undefined)
        one = builder.insert_element(none, args[2], ir.Constant(_I32, 0))
        pointer = pointer_to(context, builder, sig.args[0], args[0], args[1])
        store_lanes(builder, sig.args[0].dtype, pointer, one)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), codegen


@intrinsic
def store(typingctx, array, index, value):
    """``array[index : index + 16] = value``, rounded to the array's element type."""

    def codegen(context, builder, sig, args):
        pointer = pointer_to(context, builder, sig.args[0], args[0], args[1])
        store_lanes(builder, sig.args[0].dtype, pointer, args[2])
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), codegen


@intrinsic
def store_half(typingctx, array, index, value):
    """``array[index : index + 8]`` = lanes 0 to 7."""

    def codegen(context, builder, sig, args):
        first = ir.Constant(ir.VectorType(_I32, 8), list(range(8)))
        low = builder.shuffle_vector(args[2], args[2], first)
        pointer = pointer_to(context, builder, sig.args[0], args[0], args[1])
        store_lanes(builder, sig.args[0].dtype, pointer, low)
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), codegen


@intrinsic
def _lane(typingctx, a, lane):
    """One lane."""

    def codegen(context, builder, sig, args):
        return builder.extract_element(*args)

    return types.float32(f32x16, types.intp), codegen


@intrinsic
def _with_lane(typingctx, a, lane, x):
    """The lanes of ``a`` but for one."""

    def codegen(context, builder, sig, args):
        a, lane, x = args
        return builder.insert_element(a, x, lane)

    return f32x16(f32x16, types.intp, types.float32), codegen


@inner(inline="always")
def load_first(array, index, count):
    """``load``, but at most ``count`` elements; the other lanes are 0."""
    if count >= LANES:
        return load(array, index)
    lanes = zeros()
    for lane in range(count):
        lanes = _with_lane(lanes, lane, load_one(array, index + lane))
    return lanes


@inner(inline="always")
def store_first(array, index, value, count):
    """``store``, but at most ``count`` elements."""
    if count >= LANES:
        store(array, index, value)
    else:
        for lane in range(count):
            store_one(array, index + lane, _lane(value, lane))


@intrinsic(prefer_literal=True)
def store_quarter(typingctx, array, index, value, quarter):
    """``array[index : index + 4]`` (float32) = lanes ``4 * quarter`` to ``4 * quarter + 3``."""
    first = 4 * quarter.literal_value

    def codegen(context, builder, sig, args):
        four = ir.VectorType(_F32, 4)
        chosen = ir.Constant(ir.VectorType(_I32, 4), list(range(first, first + 4)))
        part = builder.shuffle_vector(args[2], args[2], chosen)
        builder.store(
            part, pointer_to(context, builder, sig.args[0], args[0], args[1], four), align=4
        )
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16, quarter), codegen


# --- arithmetic ----------------------------------------------------------------------------


def _muladd(builder, a, b, c):
    fn = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(VECTOR, [VECTOR] * 3), "llvm.fmuladd.v16f32"
    )
    return builder.call(fn, [a, b, c])


def _binary(name, method, doc):
    def op(typingctx, a, b):
        def codegen(context, builder, sig, args):
            return getattr(builder, method)(*args)

        return f32x16(f32x16, f32x16), codegen

    op.__name__, op.__qualname__, op.__doc__ = name, name, doc
    return intrinsic(op)


add = _binary("add", "fadd", "``a + b``.")
sub = _binary("sub", "fsub", "``a - b``.")
mul = _binary("mul", "fmul", "``a * b``.")
div = _binary("div", "fdiv", "``a / b``.")


@intrinsic
def fma(typingctx, a, b, c):
    """``a * b + c``, in one instruction where the machine has one."""

    def codegen(context, builder, sig, args):
        return _muladd(builder, *args)

    return f32x16(f32x16, f32x16, f32x16), codegen


@intrinsic
def sqrt(typingctx, a):
    """The square root of each lane."""

    def codegen(context, builder, sig, args):
        fn = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(VECTOR, [VECTOR]), "llvm.sqrt.v16f32"
        )
        return builder.call(fn, args)

    return f32x16(f32x16), codegen


@intrinsic
def maximum(typingctx, a, b):
    """The greater of each pair of lanes; ``b`` where ``a`` is NaN."""

    def codegen(context, builder, sig, args):
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return f32x16(f32x16, f32x16), codegen


@intrinsic
def where_less(typingctx, a, b, yes, no):
    """``yes`` in the lanes where ``a < b``, else ``no``."""

    def codegen(context, builder, sig, args):
        a, b, yes, no = args
        return builder.select(builder.fcmp_ordered("<", a, b), yes, no)

    return f32x16(f32x16, f32x16, f32x16, f32x16), codegen


@intrinsic
def exp2(typingctx, x):
    """``2 ** x`` to about 1 unit in the last place; 0 from -127 down, -inf included.

    ``x = n + f`` with n an integer and f in [-1/2, 1/2]: ``2 ** f`` is a minimax polynomial of
    degree 6 that is 1 at 0 (relative error 2e-9), multiplied by a number whose exponent is n.
    Between -127 and -126 the result is a subnormal number or 0.
    """

    def codegen(context, builder, sig, args):
        (x,) = args
        low = _constant(-127.0)
        x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
        # Adding 1.5 * 2^23 leaves no bits for the fraction, so it rounds; the low bits are then n
        # plus an exponent's bias. Multiplying keeps NaN, which an integer sum of bits may not.
        magic = _constant(12582912.0 + 127)
        shifted = builder.fadd(x, magic)
        fraction = builder.fsub(x, builder.fsub(shifted, magic))
        power = _constant(_EXP2_TERMS[-1])
        for term in reversed(_EXP2_TERMS[:-1]):
            power = _muladd(builder, power, fraction, _constant(term))
        exponent = builder.shl(builder.bitcast(shifted, _INTS), _constant(23, _INTS))
        return builder.fmul(power, builder.bitcast(exponent, VECTOR))

    return f32x16(f32x16), codegen


_EXP2_TERMS = (1.0, 0.69314718, 0.24022648, 0.055503324, 0.0096184369, 0.0013398875, 0.00015353363)


@intrinsic
def log2(typingctx, x):
    """``log2(x)`` of positive normal numbers, to 1e-7, relative or absolute; NaN of NaN.

    ``x = 2 ** n · m`` with m in [2/3, 4/3); with ``s = (m - 1) / (m + 1)``, ``log2(m)`` is
    ``2 / ln 2 · (s + s³/3 + s⁵/5 + …)``, which ends early since ``|s|`` is at most 1/5.
    """

    def codegen(context, builder, sig, args):
        bits = builder.bitcast(args[0], _INTS)
        apart = builder.sub(bits, _constant(0x3F2AAAAB, _INTS))  # 2/3: so n is 0 from there on
        n = builder.ashr(apart, _constant(23, _INTS))
        rest = builder.sub(bits, builder.shl(n, _constant(23, _INTS)))
        m, one = builder.bitcast(rest, VECTOR), _constant(1.0)
        s = builder.fdiv(builder.fsub(m, one), builder.fadd(m, one))
        squared = builder.fmul(s, s)
        sums = _constant(_LOG2_TERMS[-1])
        for term in reversed(_LOG2_TERMS[:-1]):
            sums = _muladd(builder, sums, squared, _constant(term))
        found = _muladd(builder, sums, s, builder.sitofp(n, VECTOR))
        # The integer arithmetic above turns NaN into a number, so add NaN back.
        return builder.fadd(found, builder.fmul(args[0], _constant(0.0)))

    return f32x16(f32x16), codegen


_LOG2_TERMS = tuple(2 / (np.log(2.0) * odd) for odd in range(1, 13, 2))


@inner(inline="always")
def tanh(x):
    """Hyperbolic tangent to a relative 3e-7; near 0 by a polynomial, to avoid cancellation."""
    squared = mul(x, x)
    small = fma(squared, splat(np.float32(62 / 2835)), splat(np.float32(-17 / 315)))
    small = fma(squared, small, splat(np.float32(2 / 15)))
    small = fma(squared, small, splat(np.float32(-1 / 3)))
    small = fma(mul(squared, x), small, x)
    one = splat(np.float32(1))
    clipped = where_less(splat(np.float32(20)), x, splat(np.float32(20)), x)
    power = exp2(mul(clipped, splat(np.float32(2) * LOG2_E)))
    large = div(sub(power, one), add(power, one))
    return where_less(squared, splat(np.float32(0.04)), small, large)


# --- across lanes --------------------------------------------------------------------------


def _reduction(name, function, start, doc):
    def op(typingctx, a):
        def codegen(context, builder, sig, args):
            operands = ([ir.Constant(_F32, start)] if start is not None else []) + list(args)
            fn = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(_F32, [v.type for v in operands]), function
            )
            return builder.call(fn, operands, fastmath=("reassoc", "nnan"))

        return types.float32(f32x16), codegen

    op.__name__, op.__qualname__, op.__doc__ = name, name, doc
    return intrinsic(op)


sum_lanes = _reduction(
    "sum_lanes", "llvm.vector.reduce.fadd.v16f32", -0.0, "The sum of the lanes, by halves."
)
max_lanes = _reduction(
    "max_lanes", "llvm.vector.reduce.fmax.v16f32", None, "The greatest lane; no lane may be NaN."
)


@intrinsic
def first_lane(typingctx, a):
    """Lane 0."""

    def codegen(context, builder, sig, args):
        return builder.extract_element(args[0], ir.Constant(_I32, 0))

    return types.float32(f32x16), codegen


@intrinsic
def sum_each(typingctx, vectors):
    """Lane i is the sum of the lanes of ``vectors[i]``, for a tuple of sixteen.

    Four rounds, each adding the halves of two vectors into one: 15 additions where sixteen
    separate sums take 64. A vector's sum does not depend on the other fifteen.
    """

    def codegen(context, builder, sig, args):
        level = [builder.extract_value(args[0], i) for i in range(LANES)]
        width = LANES
        while len(level) > 1:
            half = width // 2
            starts = range(0, 2 * LANES, width)
            low = [s + i for s in starts for i in range(half)]
            high = [s + half + i for s in starts for i in range(half)]
            level = [
                builder.fadd(
                    builder.shuffle_vector(a, b, ir.Constant(_INTS, low)),
                    builder.shuffle_vector(a, b, ir.Constant(_INTS, high)),
                )
                for a, b in zip(level[::2], level[1::2], strict=True)
            ]
            width = half
        return level[0]

    return f32x16(vectors), codegen


@intrinsic
def store_transposed(typingctx, array, index, step, vectors):
    """``array[index + i · step + j] = vectors[j][i]``, for a tuple of sixteen.

    Four rounds that exchange lanes between pairs of vectors: 64 shuffles instead of 256 loads and
    stores of single elements.
    """

    def codegen(context, builder, sig, args):
        rows = [builder.extract_value(args[3], i) for i in range(LANES)]
        for apart in (8, 4, 2, 1):
            moved = [lane & apart for lane in range(LANES)]
            low = [LANES + lane - apart if moved[lane] else lane for lane in range(LANES)]
            high = [LANES + lane if moved[lane] else lane + apart for lane in range(LANES)]
            for i in (i for i in range(LANES) if not i & apart):
                pair = rows[i], rows[i + apart]
                rows[i] = builder.shuffle_vector(*pair, ir.Constant(_INTS, low))
                rows[i + apart] = builder.shuffle_vector(*pair, ir.Constant(_INTS, high))
        at = args[1]
        for row in rows:
            pointer = pointer_to(context, builder, sig.args[0], args[0], at)
            store_lanes(builder, sig.args[0].dtype, pointer, row)
            at = builder.add(at, args[2])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, vectors), codegen


# --- memory and threads --------------------------------------------------------------------


@intrinsic
def prefetch(typingctx, array, index):
    """Prefetch the cache line of ``array[index]``."""

    def codegen(context, builder, sig, args):
        emit_prefetch(builder, pointer_to(context, builder, sig.args[0], *args))
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


def emit_prefetch(builder, pointer):
    """Emit a prefetch of a cache line."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
    fn = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    # Arguments: for reading, locality 2 (L2), data cache.
    builder.call(fn, [builder.bitcast(pointer, byte), _I32(0), _I32(2), _I32(1)])


@intrinsic
def array_at(typingctx, address, dtype):
    """The memory from an address on, as an array that owns no reference and has no known length."""
    array = types.Array(dtype.dtype, 1, "C")

    def codegen(context, builder, sig, args):
        made = context.make_array(array)(context, builder)
        size = context.get_constant(types.intp, context.get_abi_sizeof(made.data.type.pointee))
        many = context.get_constant(types.intp, (1 << 62) // 8)
        data = builder.inttoptr(args[0], made.data.type)
        populate_array(made, data, [many], [size], size, None)
        return made._getvalue()

    return array(types.intp, dtype), codegen


@intrinsic
def take_number(typingctx, counter):
    """Add one to ``counter[0]`` (int64) atomically and return its previous value."""

    def codegen(context, builder, sig, args):
        zero = ir.Constant(ir.IntType(64), 0)
        pointer = pointer_to(context, builder, sig.args[0], args[0], zero, ir.IntType(64))
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "seq_cst")

    return types.int64(counter), codegen

"""Register blocks of matrix products: sums that stay in registers over the whole K loop.

::

    sums[r, n]  +=  left[r, k] · right[k, n]        k = 0, 1, …

LLVM splits a vector into as many registers as it needs, and spills those that do not fit: the sums
of a block that is too large are loaded and stored at every step. So the size of a block is chosen
by the number of float32 values that all vector registers of the target hold:

=======  =======  ===============  ================================================
floats   lanes    targets          sums of a block, rows × columns
=======  =======  ===============  ================================================
512      16       AVX-512          4 × 64; where fewer are left, 4 × 32 and 8 × 16
128      8 or 4   AVX2, NEON       6 × 16: twelve of AVX2's sixteen registers
64       4        SSE4.2           2 × 16
=======  =======  ===============  ================================================

A sum is taken in the order of ``k`` whatever block it belongs to, so results do not depend on the
block sizes.
"""

from __future__ import annotations

import functools
import itertools

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...device import vector_registers
from .compile import inner
from .formats import load_lanes, store_lanes
from .simd import emit_prefetch, f32x16, pointer_to
from .simd_pairs import dot_pairs_of

_REGISTER, _COUNT = vector_registers()
_NUMBERS = _REGISTER * _COUNT

LANES = max(_REGISTER, 8)
"""Lanes of a vector in a block: one register, or two of four lanes."""
WIDE = 64 if _NUMBERS >= 512 else 16
"""Columns of the largest block."""
ROWS = 4 if WIDE == 64 else 6 if _NUMBERS >= 128 else 2
"""Rows of the largest block."""
NARROW_ROWS = 8 if WIDE == 64 else ROWS
"""Rows of a block of sixteen columns."""
PADDING = 0 if WIDE == 64 else 16
"""Elements after each row of a tile that is read sixteen columns at a time. Without them, rows of a
power of two share a few sets of the L1 cache."""
_LEAST = {2: 2, 4: 4, 6: 4, 8: 4}  # fewest rows of a block of a multiple of four, by the most
_SCORES = 16 if WIDE == 64 else 8 if _NUMBERS >= 128 else 4  # dot products at a time

_F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_INDEX = types.intp


@inner()
def rows_of_next(left, most):
    """Rows of the next block if ``left`` rows are divided evenly into blocks of up to ``most``."""
    blocks = (left + most - 1) // most
    return (left + blocks - 1) // blocks


def splat(builder, number, lanes=LANES):
    """``number`` in every lane."""
    vector = ir.VectorType(_F32, lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), number, I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def _multiply_add(builder, a, b, c):
    """``a * b + c``, in one instruction where the target has one."""
    kind = ir.FunctionType(c.type, [c.type] * 3)
    name = f"llvm.fmuladd.v{c.type.count}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [a, b, c])


def add_products(builder, steps, sums, load_operands, step=1, multiply=_multiply_add):
    """Emit the loop over ``k``: 0, ``step``, … below ``steps``; returns the sums after it.

    Args:
        builder: The IR builder, at the place where the loop begins.
        steps: The end of ``k``, a run-time value.
        sums: The initial sums: vectors by (row, column) of the block.
        load_operands: Emits the loads of a step ``k``; returns vectors by row, and by column.
        step: The increment of ``k``, a constant.
        multiply: Emits ``a * b + c``.
    """
    before, body = builder.basic_block, builder.append_basic_block("products")
    after = builder.append_basic_block("summed")
    builder.cbranch(builder.icmp_signed(">", steps, I64(0)), body, after)
    builder.position_at_end(body)
    k = builder.phi(I64)
    held = {place: builder.phi(start.type) for place, start in sums.items()}
    left, right = load_operands(k)
    grown = {(r, v): multiply(builder, left[r], right[v], held[r, v]) for r, v in sums}
    following = builder.add(k, I64(step))
    last = builder.basic_block
    builder.cbranch(builder.icmp_signed("<", following, steps), body, after)
    k.add_incoming(I64(0), before)
    k.add_incoming(following, last)
    builder.position_at_end(after)
    totals = {place: builder.phi(start.type) for place, start in sums.items()}
    for place, start in sums.items():
        held[place].add_incoming(start, before)
        held[place].add_incoming(grown[place], last)
        totals[place].add_incoming(start, before)
        totals[place].add_incoming(grown[place], last)
    return totals


def each_case(builder, number, cases, emit):
    """Emit a switch on ``number`` with ``emit(case)`` for every case."""
    end = builder.append_basic_block("end")
    choice = builder.switch(number, end)
    for case in cases:
        block = builder.append_basic_block(f"case{case}")
        choice.add_case(I64(case), block)
        builder.position_at_end(block)
        emit(case)
        builder.branch(end)
    builder.position_at_end(end)


def finder(context, builder, sig, args):
    """Return ``find(place, *terms)``: the address of element ``sum(terms)`` of an argument."""

    def find(place, *terms):
        index = functools.reduce(builder.add, terms)
        return pointer_to(context, builder, sig.args[place], args[place], index)

    return find


def _load_splat(builder, dtype, pointer):
    one = load_lanes(builder, dtype, pointer, 1)
    return splat(builder, builder.extract_element(one, I32(0)))


@intrinsic(prefer_literal=True)
def multiply_block(
    typingctx, c, c_at, c_row, a, a_at, a_row, a_step, b, b_at, b_step, steps, adds, rows, most,
    columns,
):  # fmt: skip
    """``c[r, n] = Σ_k a[r, k] · b[k, n]``, or ``+=``, for a block of rows and literal columns.

    Elements of ``a`` and ``b`` may be pairs of bfloat16 (uint32), whose products are both added.
    """
    vectors, most = range(columns.literal_value // LANES), most.literal_value
    c_type, a_type, b_type = c.dtype, a.dtype, b.dtype
    multiply = dot_pairs_of if a_type == types.uint32 else _multiply_add

    def codegen(context, builder, sig, args):
        _, c_at, c_row, _, a_at, a_row, a_step, _, b_at, b_step, steps, adds, rows, _, _ = args
        find = finder(context, builder, sig, args)

        def emit(count):
            starts = [builder.add(a_at, builder.mul(a_row, I64(r))) for r in range(count)]
            targets = {
                (r, v): find(0, c_at, builder.mul(c_row, I64(r)), I64(v * LANES))
                for r in range(count) for v in vectors
            }  # fmt: skip

            def load_operands(k):
                here, line = builder.mul(k, a_step), builder.add(b_at, builder.mul(k, b_step))
                right = [
                    load_lanes(builder, b_type, find(7, line, I64(v * LANES)), LANES)
                    for v in vectors
                ]
                left = [_load_splat(builder, a_type, find(3, start, here)) for start in starts]
                return left, right

            sums = _load_if(builder, adds, c_type, targets)
            totals = add_products(builder, steps, sums, load_operands, multiply=multiply)
            for place, to in targets.items():
                store_lanes(builder, c_type, to, totals[place])

        each_case(builder, rows, range(_LEAST[most], most + 1), emit)
        return context.get_dummy_value()

    signature = types.void(
        c, _INDEX, _INDEX, a, _INDEX, _INDEX, _INDEX, b, _INDEX, _INDEX, _INDEX, types.boolean,
        _INDEX, types.literal(most), columns,
    )  # fmt: skip
    return signature, codegen


def _load_if(builder, wanted, dtype, targets):
    """Load the vectors at ``targets`` if ``wanted``, else zeros."""
    zeros = ir.Constant(ir.VectorType(_F32, LANES), [0.0] * LANES)
    before = builder.basic_block
    with builder.if_then(wanted):
        found = {place: load_lanes(builder, dtype, at, LANES) for place, at in targets.items()}
        loaded = builder.basic_block
    sums = {}
    for place in targets:
        sums[place] = builder.phi(zeros.type)
        sums[place].add_incoming(zeros, before)
        sums[place].add_incoming(found[place], loaded)
    return sums


@intrinsic(prefer_literal=True)
def mix_block(
    typingctx, acc, at, stride, decay, first, p, p_at, p_row, v, v_rows, ahead, column, steps, rows,
    columns,
):  # fmt: skip
    """``acc[r] = decay[first + r] · acc[r] + Σ_n p[r, n] · v[v_rows[n] + column]``.

    For a block of rows and literal columns; prefetches the values at ``ahead``.
    """
    vectors, p_type, v_type = range(columns.literal_value // LANES), p.dtype, v.dtype

    def codegen(context, builder, sig, args):
        _, at, stride, _, first, _, p_at, p_row, _, _, _, column, steps, rows, _ = args
        find = finder(context, builder, sig, args)

        def emit(count):
            starts = [builder.add(p_at, builder.mul(p_row, I64(r))) for r in range(count)]
            targets, sums = {}, {}
            for r in range(count):
                factor = splat(builder, builder.load(find(3, first, I64(r))))
                for c in vectors:
                    to = find(0, at, builder.mul(stride, I64(r)), I64(c * LANES))
                    targets[r, c] = to
                    sums[r, c] = builder.fmul(factor, load_lanes(builder, types.float32, to, LANES))

            def load_operands(n):
                row = builder.load(find(9, n))
                later = builder.load(find(10, n))
                for c in range(0, columns.literal_value, 16):
                    emit_prefetch(builder, find(8, later, column, I64(c)))
                right = [
                    load_lanes(builder, v_type, find(8, row, column, I64(c * LANES)), LANES)
                    for c in vectors
                ]
                return [_load_splat(builder, p_type, find(5, start, n)) for start in starts], right

            totals = add_products(builder, steps, sums, load_operands)
            for place, to in targets.items():
                store_lanes(builder, types.float32, to, totals[place])

        each_case(builder, rows, range(_LEAST[ROWS], ROWS + 1), emit)
        return context.get_dummy_value()

    signature = types.void(
        acc, _INDEX, _INDEX, decay, _INDEX, p, _INDEX, _INDEX, v, v_rows, ahead, _INDEX, _INDEX,
        _INDEX, columns,
    )  # fmt: skip
    return signature, codegen


@intrinsic(prefer_literal=True)
def score_block(typingctx, q, q_at, q_row, k, base, rows, ahead, key, width, queries):
    """Products of one or four float32 queries with 16 or 4 keys: a vector per pair, to be summed.

    Prefetches the keys at ``ahead``. ``width`` is a multiple of 16.
    """
    height = queries.literal_value
    num_keys, few = 16 // height, _SCORES // height

    def codegen(context, builder, sig, args):
        _, q_at, q_row, _, base, _, _, key, width, _ = args
        find = finder(context, builder, sig, args)
        queries = [builder.add(q_at, builder.mul(q_row, I64(r))) for r in range(height)]
        parts = {}
        for n, part in itertools.product(range(0, num_keys, few), range(0, 16, LANES)):
            keys = range(n, n + few)
            at = [builder.add(base, builder.load(find(5, key, I64(i)))) for i in keys]
            later = [builder.add(base, builder.load(find(6, key, I64(i)))) for i in keys]

            def load_operands(d, at=at, later=later, part=part):
                for start in later if part == 0 else ():
                    emit_prefetch(builder, find(3, start, d))
                left, right = (
                    [load_lanes(builder, sig.args[place].dtype, find(place, start, d, I64(part)),
                                LANES) for start in starts]
                    for place, starts in ((0, queries), (3, at))
                )  # fmt: skip
                return left, right

            none = ir.Constant(ir.VectorType(_F32, LANES), [0.0] * LANES)
            sums = {(r, i): none for r in range(height) for i in range(few)}
            for (r, i), total in add_products(builder, width, sums, load_operands, 16).items():
                parts[r, n + i, part] = total
        whole = []
        for r, n in itertools.product(range(height), range(num_keys)):
            found = [parts[r, n, part] for part in range(0, 16, LANES)]
            whole.append(functools.reduce(functools.partial(_join, builder), found))
        return context.make_tuple(builder, sig.return_type, whole)

    signature = types.UniTuple(f32x16, 16)(
        q, _INDEX, _INDEX, k, _INDEX, rows, ahead, _INDEX, _INDEX, queries
    )
    return signature, codegen


@intrinsic
def add_scores_block(typingctx, sums, at, q, q_at, q_row, k, k_at, k_row, width):
    """Add the products of four float32 queries and four keys to ``score_block``'s sums in memory.

    Query ``r`` and key ``n`` have sixteen lanes at ``at + 16 * (4 * r + n)``.
    """

    def codegen(context, builder, sig, args):
        _, at, _, q_at, q_row, _, k_at, k_row, width = args
        find = finder(context, builder, sig, args)
        queries = [builder.add(q_at, builder.mul(q_row, I64(r))) for r in range(4)]
        keys = [builder.add(k_at, builder.mul(k_row, I64(n))) for n in range(4)]
        few = max(1, min(4, _SCORES // 4))
        for n, part in itertools.product(range(0, 4, few), range(0, 16, LANES)):

            def load_operands(d, n=n, part=part):
                return tuple(
                    [load_lanes(builder, types.float32, find(place, start, d, I64(part)), LANES)
                     for start in starts]
                    for place, starts in ((2, queries), (5, keys[n : n + few]))
                )  # fmt: skip

            targets = {
                (r, i): find(0, at, I64(16 * (4 * r + n + i) + part))
                for r in range(4) for i in range(few)
            }  # fmt: skip
            found = {p: load_lanes(builder, types.float32, t, LANES) for p, t in targets.items()}
            for place, total in add_products(builder, width, found, load_operands, 16).items():
                store_lanes(builder, types.float32, targets[place], total)
        return context.get_dummy_value()

    signature = types.void(sums, _INDEX, q, _INDEX, _INDEX, k, _INDEX, _INDEX, _INDEX)
    return signature, codegen


def _join(builder, low, high):
    """Concatenate two vectors."""
    lanes = ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(2 * LANES)))
    return builder.shuffle_vector(low, high, lanes)

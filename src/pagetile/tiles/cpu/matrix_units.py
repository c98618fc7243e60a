"""Products of bfloat16 pairs by Intel's matrix units (AMX), sixteen rows by 64 columns at a time.

::

                          b: 16 pairs × 16 columns
                          ┌─────┬─────┬─────┬─────┐
                          │tmm5 │tmm6 │tmm7 │tmm5 │
                          └─────┴─────┴─────┴─────┘
    a: 16 rows × 16 pairs ┌─────┬─────┬─────┬─────┐
    ┌─────┐               │tmm0 │tmm1 │tmm2 │tmm3 │   += a · b for every 16 pairs
    │tmm4 │               │     │     │     │     │
    └─────┘               └─────┴─────┴─────┴─────┘

A pair is two neighbouring bfloat16 of a row of ``a``, or of a column of ``b``, as one uint32. Each
step of 32 products is summed by itself, the even numbers and the odd ones apart, then added.

A thread calls ``configure_tiles`` before its first product and ``release_tiles`` after its last.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .blocks import I64, finder
from .compile import inner
from .simd import emit_prefetch

TILE_ROWS = 16
"""Rows of a product: arrays are readable, and results writable, up to a multiple of it."""
TILE_STEPS = 16
"""Pairs of a step."""

_I8 = ir.IntType(8)
_BYTES = _I8.as_pointer()
_VOID = ir.VoidType()
# Palette 1: eight registers of 16 rows of 64 bytes.
_CONFIG = [1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[16] * 8, *[0] * 8]


def are_tiles(right):
    """Whether products with this right operand, a Numba type, are of matrix units."""
    return right.dtype == types.uint32


def _call(builder, name, *args):
    kind = ir.FunctionType(_VOID, [arg.type for arg in args])
    fn = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")
    builder.call(fn, args)


@intrinsic
def configure_tiles(typingctx, right):
    """Set up the thread's tile registers, if products with ``right`` use them."""

    def codegen(context, builder, sig, args):
        if are_tiles(right):
            config = cgutils.global_constant(
                builder, "tile_config", ir.Constant(ir.ArrayType(_I8, 64), _CONFIG)
            )
            _call(builder, "ldtilecfg", builder.bitcast(config, _BYTES))
        return context.get_dummy_value()

    return types.void(right), codegen


@intrinsic
def release_tiles(typingctx, right):
    """Return the tile registers to their initial state, which context switches need not save."""

    def codegen(context, builder, sig, args):
        if are_tiles(right):
            _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(right), codegen


def _emit_product(builder, high, wide, steps, load_left, load_right):
    """Emit a product of one by up to four tiles, or of up to four by one.

    ``load_left(register, row, k)`` loads 16 rows by 16 pairs into a register, and
    ``load_right(register, column, k)`` 16 pairs by 16 columns.
    """
    one, many = 4, (5, 6, 7, 5)  # registers; sums are in the first four
    for tile in range(high * wide):
        _call(builder, "tilezero", _I8(tile))
    with cgutils.for_range_slice(builder, I64(0), steps, I64(TILE_STEPS)) as (k, _):
        if high == 1:
            load_left(one, 0, k)
        else:
            load_right(one, 0, k)
        for tile in range(high * wide):
            if high == 1:
                load_right(many[tile], tile, k)
                _call(builder, "tdpbf16ps", _I8(tile), _I8(one), _I8(many[tile]))
            else:
                load_left(many[tile], tile, k)
                _call(builder, "tdpbf16ps", _I8(tile), _I8(many[tile]), _I8(one))


def _move(builder, name, register, pointer, row):
    """Load or store a tile whose rows are ``row`` elements apart."""
    size = I64(pointer.type.pointee.width // 8 if pointer.type.pointee != ir.FloatType() else 4)
    stride = builder.mul(row, size)
    _call(builder, name, _I8(register), builder.bitcast(pointer, _BYTES), stride)


@intrinsic(prefer_literal=True)
def _multiply_block(typingctx, c, c_at, c_row, a, a_at, a_row, b, b_at, b_row, steps, columns):
    """Sixteen rows of a literal number of columns, a multiple of 16 and at most 64."""
    wide = columns.literal_value // 16

    def codegen(context, builder, sig, args):
        _, c_at, c_row, _, a_at, a_row, _, b_at, b_row, steps, _ = args
        find = finder(context, builder, sig, args)

        def load_left(register, _row, k):
            _move(builder, "tileloadd64", register, find(3, a_at, k), a_row)

        def load_right(register, column, k):
            at = find(6, b_at, builder.mul(k, b_row), I64(16 * column))
            _move(builder, "tileloadd64", register, at, b_row)

        _emit_product(builder, 1, wide, steps, load_left, load_right)
        for tile in range(wide):
            _move(builder, "tilestored64", tile, find(0, c_at, I64(16 * tile)), c_row)
        return context.get_dummy_value()

    index = types.intp
    signature = types.void(c, index, index, a, index, index, b, index, index, index, columns)
    return signature, codegen


@intrinsic
def multiply_keys(typingctx, c, keys, base, rows, key_row, ahead, queries, q_at, steps):
    """``c[n, r] = Σ_k keys[n, k] · queries[k, r]`` for 64 keys and sixteen queries.

    ``keys`` are bfloat16 (uint16) at ``base + rows[n]``; sixteen at a time are ``key_row`` apart.
    ``queries`` are pairs (uint32) ``[steps, 16]`` from ``q_at`` on. Prefetches
    the keys at ``base + ahead[n]``.
    """

    def codegen(context, builder, sig, args):
        _, _, base, _, key_row, _, _, q_at, steps = args
        find = finder(context, builder, sig, args)

        def load_left(register, row, k):
            d = builder.shl(k, I64(1))
            for n in range(16 * row, 16 * row + 16):
                emit_prefetch(builder, find(1, base, builder.load(find(5, I64(n))), d))
            at = find(1, base, builder.load(find(3, I64(16 * row))), d)
            _move(builder, "tileloadd64", register, at, key_row)

        def load_right(register, _column, k):
            at = find(6, q_at, builder.mul(k, I64(16)))
            _move(builder, "tileloadd64", register, at, I64(16))

        _emit_product(builder, 4, 1, steps, load_left, load_right)
        for tile in range(4):
            _move(builder, "tilestored64", tile, find(0, I64(256 * tile)), I64(16))
        return context.get_dummy_value()

    index = types.intp
    signature = types.void(c, keys, index, rows, index, ahead, queries, index, index)
    return signature, codegen


@inner()
def multiply_tiles(c, c_at, c_row, a, a_at, a_row, b, b_at, b_row, columns, steps):
    """``c[r, n] = Σ_k a[r, k] · b[k, n]`` for sixteen rows, in float32 from pairs (uint32).

    ``columns`` is a multiple of 32, and ``steps``, in pairs, of ``TILE_STEPS``.
    """
    wide = columns - columns % 64
    for n in range(0, wide, 64):
        _multiply_block(c, c_at + n, c_row, a, a_at, a_row, b, b_at + n, b_row, steps, 64)
    if wide < columns:
        _multiply_block(c, c_at + wide, c_row, a, a_at, a_row, b, b_at + wide, b_row, steps, 32)

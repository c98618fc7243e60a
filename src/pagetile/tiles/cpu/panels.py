"""Products with a matrix whose rows are packed into panels once: ``c = scale · a bᵀ``.

::

     b, 16 rows a panel       panel: steps × 16          c, in blocks of 4 to 6 rows
    ┌──────────────────┐     ┌──────────────────┐       ┌───────┬───────┬──
    │ b[0, :]          │pack │ b[0:16, 0]       │multi- │ 6 × 2 │ 6 × 2 │   of two
    │ ...              │───▶ │ b[0:16, 1]       │─ply─▶ ├───────┼───────┤   registers
    │ b[15, :]         │     │ ...              │       │ 5 × 2 │ 5 × 2 │
    └──────────────────┘     └──────────────────┘       └───────┴───────┴──

A register has 16 lanes with AVX-512, else 8 (two registers of NEON). Ten or twelve sums hide the
latency of multiply-adds, and leave AVX2 four of its sixteen registers for the operands.

Where ``b`` has no multiple of 16 rows, its last panel overlaps the one before, and so do results:
no lane is masked, and nothing is written outside. A result is summed in the order of the columns,
whatever block it belongs to.
"""

from __future__ import annotations

import functools

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...device import cpu_features
from .compile import inner
from .formats import load_lanes, store_lanes
from .simd import pointer_to

__all__ = ["PANEL", "multiply_panels", "pack_panels"]

PANEL = 16
_WIDTH = 16 if "avx512f" in cpu_features() else 8  # lanes of a register
_MOST_ROWS = 6  # of a block
_SIDE = 8  # of the squares that are transposed

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_F32, _WIDTH)


@inner()
def pack_panels(panels, b, at, b_row, rows, steps):
    """Pack ``rows`` rows of ``steps`` numbers: at least 16 rows, and a multiple of 8 numbers.

    Row 0 of panel ``p`` is ``panels[16 * steps * p : ... + 16]``.
    """
    for n in range(0, rows, PANEL):
        first = at + min(n, rows - PANEL) * b_row
        for d in range(0, steps, _SIDE):
            to = n * steps + d * PANEL
            _turn_square(panels, to, b, first + d, b_row)
            _turn_square(panels, to + _SIDE, b, first + d + _SIDE * b_row, b_row)


@inner()
def multiply_panels(c, at, c_row, a, a_at, a_row, panels, rows, columns, steps, scale):
    """Multiply ``rows`` float32 rows of ``a`` with ``columns`` packed rows of ``b``, 16 at least.

    Results are stored in their order, and rounded to the type of ``c``.
    """
    vectors, blocks = (columns + _WIDTH - 1) // _WIDTH, (rows + _MOST_ROWS - 1) // _MOST_ROWS
    few, more = rows // blocks, rows % blocks  # rows of a block, and blocks that have one more
    for block in range(blocks):
        count = few + 1 if block < more else few
        for v in range(0, vectors, 2):
            n0, b0 = _find_vector(v, vectors, columns, steps)
            n1, b1 = _find_vector(min(v + 1, vectors - 1), vectors, columns, steps)
            _multiply_block(
                c, at + n0, at + n1, c_row, a, a_at, a_row, panels, b0, b1, count,
                v + 1 < vectors, steps, scale,
            )  # fmt: skip
        at, a_at = at + count * c_row, a_at + count * a_row


@inner()
def _find_vector(v, vectors, columns, steps):
    """A vector's first column of ``c``, and where it begins in the panels."""
    n = v * _WIDTH
    whole, lane = columns // PANEL * PANEL, n % PANEL
    if n < whole:
        return n, (n - lane) * steps + lane
    if v == vectors - 1:
        lane = PANEL - _WIDTH
    return columns - PANEL + lane, whole * steps + lane


@inner()
def _multiply_block(c, c0, c1, c_row, a, at, a_row, b, b0, b1, rows, is_pair, steps, scale):
    if is_pair:
        if rows == 6:
            _block(c, c0, c1, c_row, a, at, a_row, b, b0, b1, steps, scale, 6, 2)
        elif rows == 5:
            _block(c, c0, c1, c_row, a, at, a_row, b, b0, b1, steps, scale, 5, 2)
        elif rows == 4:
            _block(c, c0, c1, c_row, a, at, a_row, b, b0, b1, steps, scale, 4, 2)
        else:
            for r in range(rows):
                to, start = r * c_row, at + r * a_row
                _block(c, c0 + to, c1 + to, c_row, a, start, a_row, b, b0, b1, steps, scale, 1, 2)
    elif rows == 6:
        _block(c, c0, c0, c_row, a, at, a_row, b, b0, b0, steps, scale, 6, 1)
    elif rows == 5:
        _block(c, c0, c0, c_row, a, at, a_row, b, b0, b0, steps, scale, 5, 1)
    elif rows == 4:
        _block(c, c0, c0, c_row, a, at, a_row, b, b0, b0, steps, scale, 4, 1)
    else:
        for r in range(rows):
            to, start = c0 + r * c_row, at + r * a_row
            _block(c, to, to, c_row, a, start, a_row, b, b0, b0, steps, scale, 1, 1)


# --- in registers ----------------------------------------------------------------------------


@intrinsic(prefer_literal=True)
def _block(typingctx, c, c0, c1, c_row, a, at, a_row, b, b0, b1, steps, scale, rows, vectors):
    """``rows`` rows of one or two vectors, at ``c0`` and ``c1``; ``steps`` is not 0."""
    height, width = range(rows.literal_value), range(vectors.literal_value)

    def codegen(context, builder, sig, args):
        c0, c1, c_row, at, a_row, b0, b1, steps, scale = (args[i] for i in _NUMBERS)

        def find(array, *terms):
            index = functools.reduce(builder.add, terms)
            return pointer_to(context, builder, sig.args[array], args[array], index)

        def load_vector(start, line):
            return load_lanes(builder, types.float32, find(_B, start, line), _WIDTH)

        starts = [builder.add(at, builder.mul(a_row, _I64(r))) for r in height]
        before, body = builder.basic_block, builder.append_basic_block("products")
        after = builder.append_basic_block("stores")
        builder.branch(body)
        builder.position_at_end(body)
        d = builder.phi(_I64)
        sums = {(r, v): builder.phi(_VECTOR) for r in height for v in width}
        line = builder.mul(d, _I64(PANEL))
        right = [load_vector((b0, b1)[v], line) for v in width]
        left = [_splat(builder, builder.load(find(_A, start, d))) for start in starts]
        grown = {(r, v): _multiply_add(builder, left[r], right[v], sums[r, v]) for r, v in sums}
        following = builder.add(d, _I64(1))
        builder.cbranch(builder.icmp_signed("<", following, steps), body, after)
        none = ir.Constant(_VECTOR, [0.0] * _WIDTH)
        for phi, first, later in [(d, _I64(0), following)] + [
            (sums[place], none, grown[place]) for place in sums
        ]:
            phi.add_incoming(first, before)
            phi.add_incoming(later, body)
        builder.position_at_end(after)
        factor = _splat(builder, scale)
        for (r, v), total in grown.items():
            to = find(_C, (c0, c1)[v], builder.mul(c_row, _I64(r)))
            store_lanes(builder, sig.args[_C].dtype, to, builder.fmul(factor, total))
        return context.get_dummy_value()

    index = types.intp
    signature = types.void(
        c, index, index, index, a, index, index, b, index, index, index, types.float32,
        rows, vectors,
    )  # fmt: skip
    return signature, codegen


_C, _A, _B = 0, 4, 7  # where arrays stand among the arguments of ``_block``
_NUMBERS = (1, 2, 3, 5, 6, 8, 9, 10, 11)


@intrinsic
def _turn_square(typingctx, into, to, x, at, row):
    """``into[to + PANEL * i + j] = x[at + row * j + i]`` for eight by eight numbers."""

    def codegen(context, builder, sig, args):
        into, to, x, at, row = args

        def find(array, index):
            kind = sig.args[0 if array is into else 2]
            return pointer_to(context, builder, kind, array, index)

        lines = []
        for _ in range(_SIDE):
            lines.append(load_lanes(builder, sig.args[2].dtype, find(x, at), _SIDE))
            at = builder.add(at, row)
        for column in _transpose(builder, lines):
            store_lanes(builder, types.float32, find(into, to), column)
            to = builder.add(to, _I64(PANEL))
        return context.get_dummy_value()

    return types.void(into, types.intp, x, types.intp, types.intp), codegen


def _transpose(builder, rows):
    """Columns of eight vectors of eight: 24 shuffles, 16 of which stay within 128 bits."""

    def mix(pairs, *orders):
        kind = ir.VectorType(_I32, _SIDE)
        return [
            builder.shuffle_vector(a, b, ir.Constant(kind, order))
            for a, b in pairs
            for order in orders
        ]

    x0, x1, y0, y1, z0, z1, w0, w1 = mix(
        [(rows[0], rows[1]), (rows[2], rows[3]), (rows[4], rows[5]), (rows[6], rows[7])],
        [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15],
    )  # fmt: skip
    quads = mix(
        [(x0, y0), (x1, y1), (z0, w0), (z1, w1)],
        [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15],
    )  # fmt: skip
    halves = mix(
        [(quads[i], quads[i + 4]) for i in range(4)],
        [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15],
    )  # fmt: skip
    return halves[::2] + halves[1::2]


def _splat(builder, number):
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, _WIDTH), [0] * _WIDTH))


def _multiply_add(builder, a, b, c):
    name = f"llvm.fmuladd.v{_WIDTH}f32"
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [a, b, c])

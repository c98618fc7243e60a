"""Matrix products with packed panels: ``c = scale · a bᵀ``.

::

     b, 16 rows a panel       panel: steps × 16          c, in blocks of 6 rows at most
    ┌──────────────────┐     ┌──────────────────┐       ┌───────┬───────┬──
    │ b[0, :]          │pack │ b[0:16, 0]       │multi- │ 6 × 2 │ 6 × 2 │   of two
    │ ...              │───▶ │ b[0:16, 1]       │─ply─▶ ├───────┼───────┤   registers
    │ b[15, :]         │     │ ...              │       │ 5 × 2 │ 5 × 2 │
    └──────────────────┘     └──────────────────┘       └───────┴───────┴──

A vector has 16 lanes with AVX-512, else 8 (two registers of NEON). Ten or twelve sums hide the
latency of multiply-adds, and leave AVX2 four of its sixteen registers for the operands.

If the rows of ``b`` are not a multiple of 16, its last panel overlaps the one before, and so do
results: no masks are needed. A result is summed in the order of the columns, whatever block it
belongs to.
"""

from __future__ import annotations

import functools

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .blocks import I64, LANES, NARROW_ROWS, add_products, each_case, finder, rows_of_next, splat
from .compile import inner
from .formats import load_lanes, store_lanes
from .simd import pointer_to

PANEL = 16
_MOST_ROWS = min(6, NARROW_ROWS)  # of a block
_SIDE = 8  # of the squares that are transposed

_F32, _I32 = ir.FloatType(), ir.IntType(32)


@inner()
def pack_panels(panels, b, at, b_row, rows, steps):
    """Pack ``rows`` rows, at least 16, of ``steps`` elements, a multiple of 8.

    Row 0 of panel ``p`` is ``panels[16 * steps * p : ... + 16]``.
    """
    for n in range(0, rows, PANEL):
        first = at + min(n, rows - PANEL) * b_row
        for d in range(0, steps, _SIDE):
            to = n * steps + d * PANEL
            _transpose_square(panels, to, b, first + d, b_row)
            _transpose_square(panels, to + _SIDE, b, first + d + _SIDE * b_row, b_row)


@inner()
def multiply_panels(c, at, c_row, a, a_at, a_row, panels, rows, columns, steps, scale):
    """Multiply ``rows`` float32 rows of ``a`` with ``columns`` packed rows of ``b``, at least 16.

    Results are rounded to the type of ``c``.
    """
    vectors = (columns + LANES - 1) // LANES
    while rows > 0:
        count = rows_of_next(rows, _MOST_ROWS)
        for v in range(0, vectors, 2):
            n0, b0 = _find_vector(v, vectors, columns, steps)
            n1, b1 = _find_vector(min(v + 1, vectors - 1), vectors, columns, steps)
            _multiply_block(
                c, at + n0, at + n1, c_row, a, a_at, a_row, panels, b0, b1, steps, scale, count,
                min(2, vectors - v),
            )  # fmt: skip
        rows, at, a_at = rows - count, at + count * c_row, a_at + count * a_row


@inner()
def _find_vector(v, vectors, columns, steps):
    """A vector's first column of ``c``, and where it begins in the panels."""
    n = v * LANES
    whole, lane = columns // PANEL * PANEL, n % PANEL
    if n < whole:
        return n, (n - lane) * steps + lane
    if v == vectors - 1:
        lane = PANEL - LANES
    return columns - PANEL + lane, whole * steps + lane


# --- in registers ----------------------------------------------------------------------------


@intrinsic
def _multiply_block(
    typingctx, c, c0, c1, c_row, a, at, a_row, b, b0, b1, steps, scale, rows, vectors
):
    """Compute up to six rows of one or two vectors, at ``c0`` and ``c1``."""

    def codegen(context, builder, sig, args):
        _, c0, c1, c_row, _, at, a_row, _, b0, b1, steps, scale, rows, vectors = args
        find = finder(context, builder, sig, args)

        def emit(height, width):
            starts = [builder.add(at, builder.mul(a_row, I64(r))) for r in range(height)]

            def load_operands(d):
                line = builder.mul(d, I64(PANEL))
                right = [
                    load_lanes(builder, types.float32, find(7, start, line), LANES)
                    for start in (b0, b1)[:width]
                ]
                left = [splat(builder, builder.load(find(4, start, d))) for start in starts]
                return left, right

            none = ir.Constant(ir.VectorType(_F32, LANES), [0.0] * LANES)
            sums = {(r, v): none for r in range(height) for v in range(width)}
            factor = splat(builder, scale)
            for (r, v), total in add_products(builder, steps, sums, load_operands).items():
                to = find(0, (c0, c1)[v], builder.mul(c_row, I64(r)))
                store_lanes(builder, sig.args[0].dtype, to, builder.fmul(factor, total))

        def emit_width(width):
            heights = range(1, _MOST_ROWS + 1)
            each_case(builder, rows, heights, functools.partial(emit, width=width))

        each_case(builder, vectors, (1, 2), emit_width)
        return context.get_dummy_value()

    index = types.intp
    signature = types.void(
        c, index, index, index, a, index, index, b, index, index, index, types.float32, index, index
    )
    return signature, codegen


@intrinsic
def _transpose_square(typingctx, into, to, x, at, row):
    """``into[to + PANEL * i + j] = x[at + row * j + i]`` for eight by eight elements."""

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
            to = builder.add(to, I64(PANEL))
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

"""Products with a matrix whose rows were packed into panels: ``c[r, n] = scale · Σ_d a[r, d] b[n, d]``.

::

     b, 16 rows a panel        panel: steps × 16           c: a block is 4 to 6 rows of two registers
    ┌──────────────────┐      ┌──────────────────┐        ┌───────┬───────┬──
    │ b[0, :]          │ pack │ b[0:16, 0]       │ multi- │ 6 × 2 │ 6 × 2 │
    │ ...              │ ───▶ │ b[0:16, 1]       │ ──ply▶ ├───────┼───────┤
    │ b[15, :]         │      │ ...              │        │ 5 × 2 │ 5 × 2 │
    └──────────────────┘      └──────────────────┘        └───────┴───────┴──

A register has 16 lanes with AVX-512, else 8 (two registers of NEON). Ten or twelve sums hide the
latency of multiply-adds, and leave AVX2 four of its sixteen registers for the operands.

Where ``b`` has no multiple of 16 rows, its last panel overlaps the one before, and so do results:
no lane is masked, and nothing is written outside. A result is summed in the order of ``d``,
whatever block it belongs to.
"""

from __future__ import annotations

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
def _block(
    typingctx, c, c0, c1, c_row, a, at, a_row, b, b0, b1, steps, scale, rows, vectors
):  # fmt: skip
    """``rows`` rows of one or two vectors; rows of a panel are ``PANEL`` apart, ``steps`` not 0."""
    height, width = rows.literal_value, vectors.literal_value

    def codegen(context, builder, sig, args):
        c, c0, c1, c_row, a, at, a_row, b, b0, b1, steps, scale = args[:12]

        def find(array, index, place):
            return pointer_to(context, builder, sig.args[array], args[array], builder.add(index, place))

        zero, one = ir.Constant(_I64, 0), ir.Constant(_I64, 1)
        a_rows = [builder.add(at, builder.mul(a_row, ir.Constant(_I64, r))) for r in range(height)]
        before, body = builder.basic_block, builder.append_basic_block("products")
        after = builder.append_basic_block("stores")
        builder.branch(body)
        builder.position_at_end(body)
        d = builder.phi(_I64)
        sums = [[builder.phi(_VECTOR) for _ in range(width)] for _ in range(height)]
        line = builder.mul(d, ir.Constant(_I64, PANEL))
        right = [load_lanes(builder, types.float32, find(7, x, line), _WIDTH) for x in (b0, b1)[:width]]
        added = []
        for row, start in zip(sums, a_rows, strict=True):
            number = builder.load(find(4, start, d))
            left = _splat(builder, number)
            added.append([_multiply_add(builder, left, x, s) for x, s in zip(right, row, strict=True)])
        following = builder.add(d, one)
        is_more = builder.icmp_signed("<", following, steps)
        builder.cbranch(is_more, body, after)
        d.add_incoming(zero, before)
        d.add_incoming(following, body)
        for row, new in zip(sums, added, strict=True):
            for phi, value in zip(row, new, strict=True):
                phi.add_incoming(ir.Constant(_VECTOR, [0.0] * _WIDTH), before)
                phi.add_incoming(value, body)
        builder.position_at_end(after)
        factor = _splat(builder, scale)
        for r, row in enumerate(added):
            place = builder.mul(c_row, ir.Constant(_I64, r))
            for column, value in zip((c0, c1), row, strict=False):
                pointer = find(0, column, place)
                store_lanes(builder, sig.args[0].dtype, pointer, builder.fmul(factor, value))
        return context.get_dummy_value()

    places = (types.intp,) * 3
    signature = types.void(
        c, *places, a, types.intp, types.intp, b, types.intp, types.intp, types.intp, types.float32,
        rows, vectors,
    )  # fmt: skip
    return signature, codegen


@intrinsic
def _turn_square(typingctx, into, to, x, at, row):
    """``into[to + PANEL * i + j] = x[at + row * j + i]`` for eight by eight numbers."""

    def codegen(context, builder, sig, args):
        def find(array, index):
            return pointer_to(context, builder, sig.args[array], args[array], index)

        def mix(pairs, low, high):
            order = ir.VectorType(_I32, _SIDE)
            return [
                builder.shuffle_vector(a, b, ir.Constant(order, picked))
                for a, b in pairs
                for picked in (low, high)
            ]

        rows, at = [], args[3]
        for _ in range(_SIDE):
            rows.append(load_lanes(builder, sig.args[2].dtype, find(2, at), _SIDE))
            at = builder.add(at, args[4])
        # Numbers, pairs and halves are interleaved within 128 bits as far as possible, which is one
        # instruction each.
        x0, x1, y0, y1, z0, z1, w0, w1 = mix(
            zip(rows[::2], rows[1::2], strict=True),
            [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15],
        )  # fmt: skip
        quads = mix(
            [(x0, y0), (x1, y1), (z0, w0), (z1, w1)],
            [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15],
        )  # fmt: skip
        halves = mix(zip(quads[:4], quads[4:], strict=True), [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])
        to = args[1]
        for column in halves[::2] + halves[1::2]:
            store_lanes(builder, types.float32, find(0, to), column)
            to = builder.add(to, ir.Constant(_I64, PANEL))
        return context.get_dummy_value()

    return types.void(into, types.intp, x, types.intp, types.intp), codegen


def _splat(builder, number):
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, _WIDTH), [0] * _WIDTH))


def _multiply_add(builder, a, b, c):
    name = f"llvm.fmuladd.v{_WIDTH}f32"
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [a, b, c])

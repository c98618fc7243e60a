"""From scores to weights, and from weights to score gradients, in the window kernels on Hopper.

A softmax may subtract any pivot from a row as long as weights do not overflow, not only the row's
maximum. ``attend_guessed_pivot`` takes the maximum of a row's scores in the first tile, before
masking; the sum of the weights shows whether that was good enough (``is_in_range``). It saves the
maxima of the other tiles, a fifth of the time, and the rescaling of earlier sums. ``attend_online``
is the usual online softmax, for the windows where the guess failed.

Scores of float16 inputs are float16, with PTX for two elements per instruction, which Triton does
not generate. For the gradients a piece then has 64 values of -pivot, the 64 rounding errors of
these, and -δ. Sums are always float32.
"""

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ....tiles.hopper.layouts import product_layout
from .tiles import (
    FLAT,
    ONLINE_TILE,
    PIECE,
    apply_region_mask,
    products_in_flight,
    rows_of,
    start_scores,
)


@gluon.constexpr_function
def score_type(dtype):
    """The type of scores, weights and score gradients: float16 for float16, as in eager code.

    The scale is rounded to it, and the pivot gets the same relative error, so the error of a
    weight's exponent is proportional to that exponent and not to the score.
    """
    return gl.float16 if dtype == gl.float16 else gl.float32


@gluon.constexpr_function
def tiles_ahead(dtype):
    """Tiles of scores in flight; float16 takes half of the registers."""
    return 2 if dtype == gl.float16 else 1


def _exp2_ptx(polynomials: int, terms: int) -> str:
    """PTX of ``2 ** (factor · s + term)``, with one term or two, for four pairs of float16.

    The exponential unit bounds the kernel, so ``polynomials`` of the four pairs are computed by a
    polynomial instead: ``x = n + f``; adding 1551 leaves 15 + n in the last five bits, and shifting
    those by ten gives 2 ** n. The result is 0 up to -15, and inf from 15.5 on.
    """
    halves = {"least": -15.0, "most": 16.0, "magic": 1551.0}
    halves |= {"c0": 1.0, "c1": 0.6933, "c2": 0.2426, "c3": 0.05518}
    lines = ["{ .reg .b32 x, n, f, y, low;", "mov.b32 low, 0x001f001f;"]
    for name, value in halves.items():
        bits = struct.pack(">e", value).hex()
        lines.append(f".reg .b32 {name}; mov.b32 {name}, 0x{bits}{bits};")
    for i in range(4):
        lines.append(f"fma.rn.f16x2 x, ${4 + i}, ${8 + i}, ${12 + i};")
        if terms == 2:
            lines.append(f"add.rn.f16x2 x, x, ${16 + i};")
        if i >= polynomials:
            lines.append(f"ex2.approx.f16x2 ${i}, x;")
            continue
        lines += [
            "max.NaN.f16x2 x, x, least;",
            "min.NaN.f16x2 x, x, most;",
            "add.rn.f16x2 n, x, magic;",
            "sub.rn.f16x2 f, n, magic;",
            "sub.rn.f16x2 f, x, f;",
            "fma.rn.f16x2 y, f, c3, c2;",
            "fma.rn.f16x2 y, y, f, c1;",
            "fma.rn.f16x2 y, y, f, c0;",
            "and.b32 n, n, low;",
            "shl.b32 n, n, 10;",
            f"mul.rn.f16x2 ${i}, y, n;",
        ]
    return " ".join([*lines, "}"])


EXP2_MINUS = gl.constexpr(_exp2_ptx(polynomials=1, terms=1))
EXP2_PLUS_PAIR = gl.constexpr(_exp2_ptx(polynomials=1, terms=2))


@gluon.jit
def exp2_minus(s, factor, pivot):
    """2 ** (factor · s - pivot) in float16, inf from 2 ** 15.5 on; see ``_exp2_ptx``."""
    return gl.inline_asm_elementwise(
        EXP2_MINUS,
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r",
        [s, factor.to(gl.float16), (-pivot).to(gl.float16)],
        gl.float16,
        is_pure=True,
        pack=8,
    )


@gluon.jit
def exp2_plus_pair(s, factor, high, low):
    """2 ** (factor · s + high + low) in float16, with -pivot as two float16 values."""
    return gl.inline_asm_elementwise(
        EXP2_PLUS_PAIR,
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [s, factor.to(gl.float16), high, low],
        gl.float16,
        is_pure=True,
        pack=8,
    )


@gluon.jit
def mul_f16x2(a, b):
    """Multiply float16 elements, two per instruction."""
    return gl.inline_asm_elementwise(
        "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], gl.float16, is_pure=True, pack=2
    )


@gluon.constexpr_function
def _tile_spans(keys, tile):
    """``(first key, size)`` of the tiles of a piece: full tiles, then powers of two."""
    spans, at = [], 0
    while at < keys:
        size = min(int(tile), 1 << (int(keys) - at).bit_length() - 1)
        spans.append((at, size))
        at += size
    return spans


# --- scores and weights -------------------------------------------------------------------------


@gluon.jit
def _start_scores(
    memory, slot, q, row_one_hot, first, AT: gl.constexpr, T: gl.constexpr, dtype: gl.constexpr,
    MASKED: gl.constexpr, config,
):  # fmt: skip
    """Start the scores, with bias, of ``T`` keys from key ``AT`` of a piece on."""
    k = rows_of(memory.k.index(slot), AT, T)
    s = start_scores(memory.bias, first + AT, q, k, dtype, config)
    if MASKED:
        one_hot = rows_of(memory.one_hot.index(slot), AT, T)
        s = warpgroup_mma(row_one_hot, one_hot.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _start_output(memory, slot, p, acc, l, AT: gl.constexpr, config):
    """Start the products of weights with values and with ones; also return the operands."""
    T: gl.constexpr = p.shape[1]
    O_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, product_layout(config.WIDTH, config.WARPS), 2)
    L_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, product_layout(8, config.WARPS), 2)
    p = p.to(memory.v.dtype)
    p_v = gl.convert_layout(p, O_LAYOUT, assert_trivial=True)
    p_l = gl.convert_layout(p, L_LAYOUT, assert_trivial=True)
    ones = memory.ones.slice(0, T, 1).permute((1, 0))
    acc = warpgroup_mma(p_v, rows_of(memory.v.index(slot), AT, T), acc, is_async=True)
    l = warpgroup_mma(p_l, ones, l, is_async=True)
    return acc, l, (p_v, p_l)


@gluon.jit
def _row_max(s, config):
    """The maximum of every row in float32, reduced within each thread first."""
    partials = gl.max(s.to(gl.float32).reshape([config.ROWS, s.shape[1] // 8, 8]), 1)
    partials = gl.convert_layout(partials, product_layout(8, config.WARPS), assert_trivial=True)
    return gl.max(partials, 1)


@gluon.jit
def _weights_below_pivot(s, factor, pivot):
    """2 ** (factor · s - pivot) in the type of ``s``."""
    pivot = gl.convert_layout(pivot, gl.SliceLayout(1, s.type.layout), assert_trivial=True)
    if s.dtype == gl.float16:
        p = exp2_minus(s, factor, pivot[:, None])
    else:
        p = gl.exp2(gl.fma(s, factor, -pivot[:, None]))
    return p


# --- with a guessed pivot -----------------------------------------------------------------------


@gluon.jit
def attend_guessed_pivot(
    memory, STREAM: gl.constexpr, step, use, factor, MASKED: gl.constexpr, config
):  # fmt: skip
    """Pivots, sums and undivided results of a window's rows; the caller checks the sums."""
    DTYPE: gl.constexpr = score_type(memory.q.dtype)
    O_LAYOUT: gl.constexpr = product_layout(config.WIDTH, config.WARPS)
    q_slot = memory.q_barriers.slot(STREAM, step)
    q = rows_of(memory.q.index(q_slot), 0, config.ROWS)
    row_one_hot = q
    if MASKED:
        row_one_hot = rows_of(memory.row_one_hot.index(q_slot), 0, config.ROWS)
    memory.kv_barriers.wait_full(STREAM, use)
    slot = memory.kv_barriers.slot(STREAM, use)
    # The guess: scores of the first tile, without a mask.
    s = _start_scores(memory, slot, q, q, 0, 0, config.TILE, DTYPE, False, config)
    most = _row_max(warpgroup_mma_wait(0, deps=(s,)), config) * factor
    pivot = gl.where(most == float("-inf"), 0.0, most).to(DTYPE).to(gl.float32)
    pivot = gl.convert_layout(pivot, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)
    l = gl.zeros([config.ROWS, 8], gl.float32, product_layout(8, config.WARPS))
    acc = gl.zeros([config.ROWS, config.WIDTH], gl.float32, O_LAYOUT)
    for g in range(config.FULL_PIECES):
        l, acc = _guessed_piece(
            memory, STREAM, use, q, row_one_hot, g * config.PIECE, factor, pivot, l, acc,
            config.PIECE, MASKED, config,
        )  # fmt: skip
        use += 1
    if config.LAST_PIECE > 0:
        l, acc = _guessed_piece(
            memory, STREAM, use, q, row_one_hot, config.FULL_PIECES * config.PIECE, factor, pivot,
            l, acc, config.LAST_PIECE, MASKED, config,
        )  # fmt: skip
    memory.q_barriers.release(STREAM, step)
    return pivot, gl.max(l, 1), acc


@gluon.jit
def _guessed_piece(
    memory, STREAM: gl.constexpr, use, q, row_one_hot, first, factor, pivot, l, acc,
    KEYS: gl.constexpr, MASKED: gl.constexpr, config,
):  # fmt: skip
    """Add the keys of a piece, with the scores of ``AHEAD`` tiles in flight."""
    DTYPE: gl.constexpr = score_type(q.dtype)
    SPANS: gl.constexpr = _tile_spans(KEYS, config.TILE)
    TILES: gl.constexpr = len(SPANS)
    AHEAD: gl.constexpr = tiles_ahead(q.dtype)
    PRODUCTS: gl.constexpr = 2 if MASKED else 1  # of a tile's scores; its output takes two
    memory.kv_barriers.wait_full(STREAM, use)
    slot = memory.kv_barriers.slot(STREAM, use)
    scores = ()
    for i in gl.static_range(min(AHEAD, TILES)):
        s = _start_scores(
            memory, slot, q, row_one_hot, first, SPANS[i][0], SPANS[i][1], DTYPE, MASKED, config
        )
        scores = scores + (s,)  # type: ignore[assignment] # noqa: RUF005
    used = ()
    for i in gl.static_range(TILES):
        s = warpgroup_mma_wait(products_in_flight(i, TILES, AHEAD, PRODUCTS, 2), deps=(scores[i],))
        p = _weights_below_pivot(s, factor, pivot)
        acc, l, weights = _start_output(memory, slot, p, acc, l, SPANS[i][0], config)
        used = used + weights
        if i + AHEAD < TILES:
            s = _start_scores(
                memory, slot, q, row_one_hot, first, SPANS[i + AHEAD][0], SPANS[i + AHEAD][1],
                DTYPE, MASKED, config,
            )  # fmt: skip
            scores = scores + (s,)  # type: ignore[assignment] # noqa: RUF005
    done = warpgroup_mma_wait(0, deps=(acc, l) + used)  # noqa: RUF005
    memory.kv_barriers.release(STREAM, use)
    return done[1], done[0]


@gluon.jit
def is_in_range(total, dtype: gl.constexpr):
    """Whether the weights of a guessed pivot stayed within their type, judged by their sum."""
    LEAST: gl.constexpr = 2.0**-4 if dtype == gl.float16 else 2.0**-64
    MOST: gl.constexpr = 2.0**64
    return (total > LEAST) & (total < MOST)


# --- online -------------------------------------------------------------------------------------


@gluon.jit
def attend_online(
    memory, STREAM: gl.constexpr, step, use, regions, row, mask_value, scale, config
):  # fmt: skip
    """Maxima, sums and undivided results of a window's rows, for any scores and regions."""
    O_LAYOUT: gl.constexpr = product_layout(config.WIDTH, config.WARPS)
    m = gl.full([config.ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, O_LAYOUT))
    l = gl.zeros([config.ROWS, 8], gl.float32, product_layout(8, config.WARPS))
    acc = gl.zeros([config.ROWS, config.WIDTH], gl.float32, O_LAYOUT)
    q_slot = memory.q_barriers.slot(STREAM, step)
    q = rows_of(memory.q.index(q_slot), 0, config.ROWS)
    for g in range(config.FULL_PIECES):
        m, l, acc = _online_piece(
            memory, STREAM, use, q, regions, row, g * config.PIECE, mask_value, scale, m, l, acc,
            config.PIECE, config,
        )  # fmt: skip
        use += 1
    if config.LAST_PIECE > 0:
        m, l, acc = _online_piece(
            memory, STREAM, use, q, regions, row, config.FULL_PIECES * config.PIECE, mask_value,
            scale, m, l, acc, config.LAST_PIECE, config,
        )  # fmt: skip
    memory.q_barriers.release(STREAM, step)
    return m, gl.max(l, 1), acc


@gluon.jit
def _online_piece(
    memory, STREAM: gl.constexpr, use, q, regions, row, first, mask_value, scale, m, l, acc,
    KEYS: gl.constexpr, config,
):  # fmt: skip
    """Online softmax over the keys of a piece; scores are rounded as in the gradients."""
    SPANS: gl.constexpr = _tile_spans(KEYS, ONLINE_TILE)
    DTYPE: gl.constexpr = score_type(q.dtype)
    memory.kv_barriers.wait_full(STREAM, use)
    slot = memory.kv_barriers.slot(STREAM, use)
    for i in gl.static_range(len(SPANS)):
        s = _start_scores(memory, slot, q, q, first, SPANS[i][0], SPANS[i][1], DTYPE, False, config)
        s = warpgroup_mma_wait(0, deps=(s,)).to(gl.float32)
        if config.MASK:
            s = apply_region_mask(
                s, regions, row, first + SPANS[i][0], mask_value, config.NUM_TOKENS
            )
        most = gl.convert_layout(_row_max(s, config), m.type.layout, assert_trivial=True)
        high = gl.maximum(m, most * scale)
        pivot = gl.where(high == float("-inf"), 0.0, high)
        decay = gl.exp2(m - pivot)
        m = high
        decay_l = gl.convert_layout(decay, gl.SliceLayout(1, l.type.layout), assert_trivial=True)
        l = l * decay_l[:, None]
        p = _weights_below_pivot(s, scale, pivot)
        acc, l, weights = _start_output(
            memory, slot, p, acc * decay[:, None], l, SPANS[i][0], config
        )
        done = warpgroup_mma_wait(0, deps=(acc, l) + weights)  # noqa: RUF005
        acc = done[0]
        l = done[1]
    memory.kv_barriers.release(STREAM, use)
    return m, l, acc


# --- gradients ----------------------------------------------------------------------------------

# The order in which threads hold columns of scores, so that 16 bytes are read at a time.
HALF = gl.constexpr(gl.SharedLinearLayout([[1], [8], [16], [2], [4]]))
WHOLE = gl.constexpr(gl.SharedLinearLayout([[1], [8], [16], [2], [4], [32]]))


@gluon.jit
def load_values(
    piece, FIRST: gl.constexpr, COUNT: gl.constexpr, AXIS: gl.constexpr, dtype: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load 32 or 64 values of a piece, such as δ: one per row (``AXIS`` 1) or per column (0)."""
    ALL: gl.constexpr = PIECE * 32 // dtype.primitive_bitwidth
    some = piece._reinterpret(dtype, [ALL // COUNT, COUNT], FLAT).index(FIRST // COUNT)
    some = some._reinterpret(dtype, [COUNT], HALF if COUNT == PIECE // 2 else WHOLE)
    numbers = some.load(gl.SliceLayout(AXIS, LAYOUT))
    return numbers[:, None] if AXIS == 1 else numbers[None, :]


@gluon.jit
def load_pivots(
    piece, FIRST: gl.constexpr, COUNT: gl.constexpr, AXIS: gl.constexpr, dtype: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load the pivots for ``compute_weights``: one value each, or two in float16."""
    pivots = (load_values(piece, FIRST, COUNT, AXIS, dtype, LAYOUT),)
    if dtype == gl.float16:
        pivots = pivots + (load_values(piece, PIECE + FIRST, COUNT, AXIS, dtype, LAYOUT),)  # type: ignore[assignment] # noqa: RUF005
    return pivots


@gluon.jit
def start_weight_gradient(a, b, deltas, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """Start dP = dO vᵀ, or its transpose; with ``deltas`` (-δ) dP - δ in float16."""
    R: gl.constexpr = a.shape[0]
    C: gl.constexpr = b.shape[0]
    made = gl.zeros([R, C], dtype, LAYOUT)
    if dtype == gl.float16:
        made += deltas
    return warpgroup_mma(a, b.permute((1, 0)), made, use_acc=dtype == gl.float16, is_async=True)


@gluon.jit
def compute_weights(s, scale, pivots):
    """2 ** (scale · s - pivot)."""
    if s.dtype == gl.float16:
        p = exp2_plus_pair(s, scale, pivots[0], pivots[1])
    else:
        p = gl.exp2(gl.fma(s, scale, -pivots[0]))
    return p


@gluon.jit
def score_gradient(p, dp, deltas):
    """``P ∘ (dP - δ)`` from the result of ``start_weight_gradient``."""
    return mul_f16x2(p, dp) if p.dtype == gl.float16 else p * (dp - deltas)

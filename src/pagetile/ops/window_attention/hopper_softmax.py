"""A window's softmax on Hopper, quick or careful; see ``hopper_forward``.

A softmax subtracts the largest score of a row, but any number will do that keeps the weights within
their type. ``attend_quickly`` guesses one from the first 64 scores of the row, as if nothing hid
them; the sum of the weights tells whether it did (``is_right``). It looks for no maxima, which cost
a fifth of the time, and has nothing to correct of what it summed up before. ``attend_carefully`` is
the usual online softmax, for the windows that are left.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ...tiles.hopper.layouts import product_layout
from .hopper_halves import exp2_less, score_type, tiles_ahead
from .hopper_tiles import CAREFUL_TILE, compare, products_after, rows_of, start_scores

__all__ = ["attend_carefully", "attend_quickly", "is_right"]


@gluon.constexpr_function
def _cuts(keys, tile):
    """Where the tiles of some keys begin, and their sizes: whole ones, then powers of two."""
    cuts, at = [], 0
    while at < keys:
        size = min(int(tile), 1 << (int(keys) - at).bit_length() - 1)
        cuts.append((at, size))
        at += size
    return cuts


# --- scores and weights -------------------------------------------------------------------------


@gluon.jit
def _start_scores(
    memory, slot, q, row_marks, first, AT: gl.constexpr, T: gl.constexpr, dtype: gl.constexpr,
    MARKED: gl.constexpr, form,
):  # fmt: skip
    """The products of ``T`` keys' scores, from the bias on; ``AT`` keys into a piece."""
    k = rows_of(memory.k.index(slot), AT, T)
    s = start_scores(memory.bias, first + AT, q, k, dtype, form)
    if MARKED:
        marks = rows_of(memory.marks.index(slot), AT, T)
        s = warpgroup_mma(row_marks, marks.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _start_values(memory, slot, p, acc, l, AT: gl.constexpr, form):
    """The products of a tile's weights with its values and with ones; and the weights they read."""
    T: gl.constexpr = p.shape[1]
    O_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, product_layout(form.WIDTH, form.WARPS), 2)
    L_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, product_layout(8, form.WARPS), 2)
    p = p.to(memory.v.dtype)
    p_v = gl.convert_layout(p, O_LAYOUT, assert_trivial=True)
    p_l = gl.convert_layout(p, L_LAYOUT, assert_trivial=True)
    ones = memory.ones.slice(0, T, 1).permute((1, 0))
    acc = warpgroup_mma(p_v, rows_of(memory.v.index(slot), AT, T), acc, is_async=True)
    l = warpgroup_mma(p_l, ones, l, is_async=True)
    return acc, l, (p_v, p_l)


@gluon.jit
def _max(s, form):
    """Of every row, in float32; first of what one thread holds of it."""
    parts = gl.max(s.to(gl.float32).reshape([form.ROWS, s.shape[1] // 8, 8]), 1)
    parts = gl.convert_layout(parts, product_layout(8, form.WARPS), assert_trivial=True)
    return gl.max(parts, 1)


@gluon.jit
def _weigh(s, factor, pivot):
    """2 ** (factor · s - pivot), in the type of ``s``."""
    pivot = gl.convert_layout(pivot, gl.SliceLayout(1, s.type.layout), assert_trivial=True)
    if s.dtype == gl.float16:
        p = exp2_less(s, factor, pivot[:, None])
    else:
        p = gl.exp2(gl.fma(s, factor, -pivot[:, None]))
    return p


# --- quickly ------------------------------------------------------------------------------------


@gluon.jit
def attend_quickly(
    memory, STREAM: gl.constexpr, turn, use, factor, MARKED: gl.constexpr, form
):  # fmt: skip
    """Pivots, sums and unscaled results of a window's rows; ``is_right`` tells of which."""
    DTYPE: gl.constexpr = score_type(memory.q.dtype)
    O_LAYOUT: gl.constexpr = product_layout(form.WIDTH, form.WARPS)
    q_slot = memory.q_turns.slot(STREAM, turn)
    q = rows_of(memory.q.index(q_slot), 0, form.ROWS)
    row_marks = q
    if MARKED:
        row_marks = rows_of(memory.row_marks.index(q_slot), 0, form.ROWS)
    memory.turns.wait_full(STREAM, use)
    slot = memory.turns.slot(STREAM, use)
    # The first scores, as if nothing hid them.
    s = _start_scores(memory, slot, q, q, 0, 0, form.TILE, DTYPE, False, form)
    most = _max(warpgroup_mma_wait(0, deps=(s,)), form) * factor
    pivot = gl.where(most == float("-inf"), 0.0, most).to(DTYPE).to(gl.float32)
    pivot = gl.convert_layout(pivot, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)
    l = gl.zeros([form.ROWS, 8], gl.float32, product_layout(8, form.WARPS))
    acc = gl.zeros([form.ROWS, form.WIDTH], gl.float32, O_LAYOUT)
    for g in range(form.GROUPS):
        l, acc = _add_piece(
            memory, STREAM, use, q, row_marks, g * form.PIECE, factor, pivot, l, acc, form.PIECE,
            MARKED, form,
        )  # fmt: skip
        use += 1
    if form.REST > 0:
        l, acc = _add_piece(
            memory, STREAM, use, q, row_marks, form.GROUPS * form.PIECE, factor, pivot, l, acc,
            form.REST, MARKED, form,
        )  # fmt: skip
    memory.q_turns.release(STREAM, turn)
    return pivot, gl.max(l, 1), acc


@gluon.jit
def _add_piece(
    memory, STREAM: gl.constexpr, use, q, row_marks, first, factor, pivot, l, acc,
    KEYS: gl.constexpr, MARKED: gl.constexpr, form,
):  # fmt: skip
    """What the keys of a piece add; scores of ``AHEAD`` tiles are under way at once."""
    DTYPE: gl.constexpr = score_type(q.dtype)
    CUTS: gl.constexpr = _cuts(KEYS, form.TILE)
    TILES: gl.constexpr = len(CUTS)
    AHEAD: gl.constexpr = tiles_ahead(q.dtype)
    PRODUCTS: gl.constexpr = 2 if MARKED else 1  # of a tile's scores; two of its values
    memory.turns.wait_full(STREAM, use)
    slot = memory.turns.slot(STREAM, use)
    scores = ()
    for i in gl.static_range(min(AHEAD, TILES)):
        s = _start_scores(
            memory, slot, q, row_marks, first, CUTS[i][0], CUTS[i][1], DTYPE, MARKED, form
        )
        scores = scores + (s,)  # type: ignore[assignment] # noqa: RUF005
    used = ()
    for i in gl.static_range(TILES):
        s = warpgroup_mma_wait(products_after(i, TILES, AHEAD, PRODUCTS, 2), deps=(scores[i],))
        p = _weigh(s, factor, pivot)
        acc, l, weights = _start_values(memory, slot, p, acc, l, CUTS[i][0], form)
        used = used + weights
        if i + AHEAD < TILES:
            s = _start_scores(
                memory, slot, q, row_marks, first, CUTS[i + AHEAD][0], CUTS[i + AHEAD][1], DTYPE,
                MARKED, form,
            )  # fmt: skip
            scores = scores + (s,)  # type: ignore[assignment] # noqa: RUF005
    done = warpgroup_mma_wait(0, deps=(acc, l) + used)  # noqa: RUF005
    memory.turns.release(STREAM, use)
    return done[1], done[0]


@gluon.jit
def is_right(total, dtype: gl.constexpr):
    """Whether a quick softmax's weights stayed within their type, by their sums."""
    LEAST: gl.constexpr = 2.0**-4 if dtype == gl.float16 else 2.0**-64
    MOST: gl.constexpr = 2.0**64
    return (total > LEAST) & (total < MOST)


# --- carefully ----------------------------------------------------------------------------------


@gluon.jit
def attend_carefully(
    memory, STREAM: gl.constexpr, turn, use, regions, row, mask_value, scale, form
):  # fmt: skip
    """The same for any scores, by running maxima; regions are compared one by one."""
    O_LAYOUT: gl.constexpr = product_layout(form.WIDTH, form.WARPS)
    m = gl.full([form.ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, O_LAYOUT))
    l = gl.zeros([form.ROWS, 8], gl.float32, product_layout(8, form.WARPS))
    acc = gl.zeros([form.ROWS, form.WIDTH], gl.float32, O_LAYOUT)
    q_slot = memory.q_turns.slot(STREAM, turn)
    q = rows_of(memory.q.index(q_slot), 0, form.ROWS)
    for g in range(form.GROUPS):
        m, l, acc = _attend_piece(
            memory, STREAM, use, q, regions, row, g * form.PIECE, mask_value, scale, m, l, acc,
            form.PIECE, form,
        )  # fmt: skip
        use += 1
    if form.REST > 0:
        m, l, acc = _attend_piece(
            memory, STREAM, use, q, regions, row, form.GROUPS * form.PIECE, mask_value, scale, m,
            l, acc, form.REST, form,
        )  # fmt: skip
    memory.q_turns.release(STREAM, turn)
    return m, gl.max(l, 1), acc


@gluon.jit
def _attend_piece(
    memory, STREAM: gl.constexpr, use, q, regions, row, first, mask_value, scale, m, l, acc,
    KEYS: gl.constexpr, form,
):  # fmt: skip
    """Online softmax over the keys of a piece; but for the mask, scores are the gradients' own."""
    CUTS: gl.constexpr = _cuts(KEYS, CAREFUL_TILE)
    DTYPE: gl.constexpr = score_type(q.dtype)
    memory.turns.wait_full(STREAM, use)
    slot = memory.turns.slot(STREAM, use)
    for i in gl.static_range(len(CUTS)):
        s = _start_scores(memory, slot, q, q, first, CUTS[i][0], CUTS[i][1], DTYPE, False, form)
        s = warpgroup_mma_wait(0, deps=(s,)).to(gl.float32)
        if form.MASK:
            s = compare(s, regions, row, first + CUTS[i][0], mask_value, form.NUM_TOKENS)
        most = gl.convert_layout(_max(s, form), m.type.layout, assert_trivial=True)
        high = gl.maximum(m, most * scale)
        pivot = gl.where(high == float("-inf"), 0.0, high)
        decay = gl.exp2(m - pivot)
        m = high
        decay_l = gl.convert_layout(decay, gl.SliceLayout(1, l.type.layout), assert_trivial=True)
        l = l * decay_l[:, None]
        p = _weigh(s, scale, pivot)
        acc, l, weights = _start_values(memory, slot, p, acc * decay[:, None], l, CUTS[i][0], form)
        done = warpgroup_mma_wait(0, deps=(acc, l) + weights)  # noqa: RUF005
        acc = done[0]
        l = done[1]
    memory.turns.release(STREAM, use)
    return m, l, acc

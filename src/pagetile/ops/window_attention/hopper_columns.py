"""Gradients of window attention's keys and values on Hopper, by columns of the scores.

::

    Pᵀ = 2 ** (scale · log2 e · (k qᵀ + Bᵀ / scale) - pivot)      dPᵀ = v dOᵀ
    dV = Pᵀ dO       dSᵀ = Pᵀ ∘ (dPᵀ - δ)       dK = scale · dSᵀ q

A program owns one head and a tile of keys, and goes about its windows as ``hopper_forward`` does:
its tile of bias stays, streams take windows in turn and walk the queries a piece at a time. Weights
come out of a product as the next one takes them, so nothing is turned around in memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from ...tiles.hopper.layouts import product_layout
from ...tiles.hopper.names import barrier
from ...tiles.hopper.ring import Turns, make_turns
from .hopper_changes import change, numbers_of, pivots_of, start_changes, weigh
from .hopper_columns_load import load_role
from .hopper_halves import score_type, tiles_ahead
from .hopper_tiles import (
    CAREFUL_TILE,
    CHUNK,
    FLAT,
    MANY,
    MARKS,
    MIXED,
    PIECE,
    Bias,
    Form,
    Stream,
    compare,
    make_bias,
    products_after,
    rows_of,
    start_scores,
    store_rows,
)
from .hopper_windows import await_window, which_work

__all__ = ["column_gradients"]


@aggregate
class Memory:
    """What lies in shared memory, and whose turn it is."""

    bias: gl.shared_memory_descriptor  # [columns / CHUNK, ROWS * CHUNK]
    bias_made: gl.shared_memory_descriptor  # a barrier
    k: gl.shared_memory_descriptor  # [slots, 1, 1, ROWS, WIDTH]
    v: gl.shared_memory_descriptor
    row_marks: gl.shared_memory_descriptor  # [slots, 1, ROWS, MARKS]
    k_turns: Turns
    windows: gl.shared_memory_descriptor  # int32 [slots, 1]: of which window they are, or -1
    q: gl.shared_memory_descriptor  # [slots, 1, 1, PIECE, WIDTH]
    dout: gl.shared_memory_descriptor
    marks: gl.shared_memory_descriptor  # [slots, 1, PIECE, MARKS]
    pivot: gl.shared_memory_descriptor  # [slots, 1, PIECE]
    delta: gl.shared_memory_descriptor
    turns: Turns

    @gluon.constexpr_function
    def __init__(
        self, bias, bias_made, k, v, row_marks, k_turns, windows, q, dout, marks, pivot, delta,
        turns,
    ):  # fmt: skip
        self.bias = bias
        self.bias_made = bias_made
        self.k = k
        self.v = v
        self.row_marks = row_marks
        self.k_turns = k_turns
        self.windows = windows
        self.q = q
        self.dout = dout
        self.marks = marks
        self.pivot = pivot
        self.delta = delta
        self.turns = turns


@gluon.jit
def _start_tile(
    memory, slot, k, v, row_marks, first, T: gl.constexpr, INDEX: gl.constexpr,
    MARKED: gl.constexpr, form,
):  # fmt: skip
    """Start the products of a tile's scores, and of what weights change by."""
    AT: gl.constexpr = INDEX * T
    DTYPE: gl.constexpr = score_type(k.dtype)
    S_LAYOUT: gl.constexpr = product_layout(T, form.WARPS)
    q = rows_of(memory.q.index(slot), AT, T)
    s = start_scores(memory.bias, first + AT, k, q, DTYPE, form)
    if MARKED:
        marks = rows_of(memory.marks.index(slot), AT, T)
        s = warpgroup_mma(row_marks, marks.permute((1, 0)), s, is_async=True)
    dout = rows_of(memory.dout.index(slot), AT, T)
    deltas = numbers_of(memory.delta.index(slot), AT, T, 0, DTYPE, S_LAYOUT)
    dp = start_changes(v, dout, deltas, DTYPE, S_LAYOUT)
    return s, dp


@gluon.jit
def _walk_piece(
    memory, slot, k, v, row_marks, regions, row, first, mask_value, scale, dk, dv,
    COLUMNS: gl.constexpr, KIND: gl.constexpr, form,
):  # fmt: skip
    """What the queries of a piece add to the gradients, a tile at a time."""
    MARKED: gl.constexpr = KIND == MIXED
    T: gl.constexpr = min(CAREFUL_TILE if KIND == MANY else form.TILE, COLUMNS)
    TILES: gl.constexpr = COLUMNS // T
    AHEAD: gl.constexpr = tiles_ahead(k.dtype)
    PRODUCTS: gl.constexpr = 3 if MARKED else 2
    DTYPE: gl.constexpr = score_type(k.dtype)
    S_LAYOUT: gl.constexpr = product_layout(T, form.WARPS)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, product_layout(form.WIDTH, form.WARPS), 2)
    started = ()
    for t in gl.static_range(min(AHEAD, TILES)):
        tile = _start_tile(memory, slot, k, v, row_marks, first, T, t, MARKED, form)
        started = started + tile
    used = ()
    for t in gl.static_range(TILES):
        s, dp = warpgroup_mma_wait(
            products_after(t, TILES, AHEAD, PRODUCTS, 2), deps=(started[2 * t], started[2 * t + 1])
        )
        if KIND == MANY:
            s = compare(s, regions, row, first + t * T, mask_value, form.NUM_TOKENS)
        pivots = pivots_of(memory.pivot.index(slot), t * T, T, 0, DTYPE, S_LAYOUT)
        p = weigh(s, scale, pivots)
        p_v = gl.convert_layout(p.to(k.dtype), P_LAYOUT, assert_trivial=True)
        dv = warpgroup_mma(p_v, rows_of(memory.dout.index(slot), t * T, T), dv, is_async=True)
        deltas = numbers_of(memory.delta.index(slot), t * T, T, 0, DTYPE, S_LAYOUT)
        ds = change(p, dp, deltas)
        ds_k = gl.convert_layout(ds.to(k.dtype), P_LAYOUT, assert_trivial=True)
        dk = warpgroup_mma(ds_k, rows_of(memory.q.index(slot), t * T, T), dk, is_async=True)
        used = used + (p_v, ds_k)  # type: ignore[assignment] # noqa: RUF005
        if t + AHEAD < TILES:
            tile = _start_tile(memory, slot, k, v, row_marks, first, T, t + AHEAD, MARKED, form)
            started = started + tile
    done = warpgroup_mma_wait(0, deps=(dk, dv) + used)  # noqa: RUF005
    return done[0], done[1]


@gluon.jit
def _walk_window(
    memory, STREAM: gl.constexpr, turn, use, regions, row, mask_value, scale, KIND: gl.constexpr,
    form,
):  # fmt: skip
    """All pieces of a window."""
    O_LAYOUT: gl.constexpr = product_layout(form.WIDTH, form.WARPS)
    dk = gl.zeros([form.ROWS, form.WIDTH], gl.float32, O_LAYOUT)
    dv = gl.zeros([form.ROWS, form.WIDTH], gl.float32, O_LAYOUT)
    k_slot = memory.k_turns.slot(STREAM, turn)
    k = rows_of(memory.k.index(k_slot), 0, form.ROWS)
    v = rows_of(memory.v.index(k_slot), 0, form.ROWS)
    row_marks = k
    if KIND == MIXED:
        row_marks = rows_of(memory.row_marks.index(k_slot), 0, form.ROWS)
    for g in range(form.GROUPS):
        memory.turns.wait_full(STREAM, use)
        dk, dv = _walk_piece(
            memory, memory.turns.slot(STREAM, use), k, v, row_marks, regions, row, g * PIECE,
            mask_value, scale, dk, dv, PIECE, KIND, form,
        )  # fmt: skip
        memory.turns.release(STREAM, use)
        use += 1
    if form.REST > 0:
        memory.turns.wait_full(STREAM, use)
        dk, dv = _walk_piece(
            memory, memory.turns.slot(STREAM, use), k, v, row_marks, regions, row,
            form.GROUPS * PIECE, mask_value, scale, dk, dv, form.REST, KIND, form,
        )  # fmt: skip
        memory.turns.release(STREAM, use)
        use += 1
    memory.k_turns.release(STREAM, turn)
    return use, dk, dv


@gluon.jit
def _walk_role(
    dk, dv, bias, regions, memory, head, first_row, num_masks, scale, mask_value, dk_scale, form,
    stream,
):  # fmt: skip
    """A stream: its share of the bias, then its share of the windows."""
    STREAM: gl.constexpr = stream.INDEX
    ROW: gl.constexpr = gl.SliceLayout(1, product_layout(form.WIDTH, form.WARPS))
    make_bias(memory.bias, bias, head, first_row, 0, STREAM, True, form)
    barrier()
    mbarrier.arrive(memory.bias_made)
    mbarrier.wait(memory.bias_made, 0)
    row = first_row + gl.arange(0, form.ROWS, ROW)
    turn = 0
    use = 0
    for i in gl.static_range(form.KINDS):
        window = await_window(memory.k_turns, memory.windows, STREAM, turn, form)
        while window >= 0:
            theirs = regions
            if form.MASK:
                theirs += window % num_masks * form.NUM_TOKENS
            use, dk_tile, dv_tile = _walk_window(
                memory, STREAM, turn, use, theirs, row, mask_value, scale, i, form
            )
            store_rows(dk, dk_tile * dk_scale, window, head, first_row, form)
            store_rows(dv, dv_tile, window, head, first_row, form)
            turn += 1
            window = await_window(memory.k_turns, memory.windows, STREAM, turn, form)
        memory.k_turns.release(STREAM, turn)
        turn += 1


@gluon.jit
def column_gradients(
    dk,  # [num_windows, NUM_TOKENS, NUM_HEADS, HEAD_SIZE], like dv
    dv,
    k_desc,  # [num_windows, NUM_HEADS, NUM_TOKENS, HEAD_SIZE] in boxes of [1, 1, ROWS, WIDTH]
    v_desc,
    row_marks_desc,  # float16 [num_masks, NUM_TOKENS, 2 * MARKS] in boxes of [1, ROWS, MARKS]
    q_desc,  # in boxes of PIECE tokens, like dout_desc
    dout_desc,
    marks_desc,  # in boxes of [1, PIECE, MARKS]
    pivot_desc,  # as ``make_deltas`` leaves it, in boxes of [1, PIECE]
    delta_desc,
    bias,  # [table_size, NUM_HEADS] or [NUM_HEADS, NUM_TOKENS, NUM_TOKENS]
    offsets,  # int32 [NUM_TOKENS]
    kinds,  # int32 [num_masks]
    regions,  # integers [num_masks, NUM_TOKENS]
    num_windows,
    num_chunks,
    num_masks,
    centre,
    entry_stride,  # of a table's entries
    head_stride,  # of a table or bias
    scale,  # softmax_scale · log2(e), as the type of scores holds it
    inverse,  # 1 / softmax_scale
    mask_value,  # divided by softmax_scale
    dk_scale,  # softmax_scale
    NUM_HEADS: gl.constexpr,
    NUM_TOKENS: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    BIAS: gl.constexpr,
    MASK: gl.constexpr,
    GROUPS: gl.constexpr,
    REST: gl.constexpr,
    STREAMS: gl.constexpr,
    WARPS: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    LOADING: gl.constexpr,
    TILE: gl.constexpr,
):
    """The kernel; see above. Grid: tiles of keys × heads × chunks, tiles of a window together."""
    form = Form(
        NUM_HEADS, NUM_TOKENS, HEAD_SIZE, WIDTH, BIAS, MASK, GROUPS, REST, PIECE, TILE, STREAMS,
        WARPS,
    )  # fmt: skip
    ROWS: gl.constexpr = form.ROWS
    CHUNKS: gl.constexpr = (GROUPS * PIECE + REST) // CHUNK
    K_SLOTS: gl.constexpr = STREAMS * Q_STAGES
    SLOTS: gl.constexpr = STREAMS * STAGES
    dtype: gl.constexpr = q_desc.dtype
    memory = Memory(
        gl.allocate_shared_memory(gl.float16, [CHUNKS, ROWS * CHUNK], FLAT),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(dtype, [K_SLOTS, 1, 1, ROWS, WIDTH], k_desc.layout),
        gl.allocate_shared_memory(dtype, [K_SLOTS, 1, 1, ROWS, WIDTH], v_desc.layout),
        gl.allocate_shared_memory(
            gl.float16, [K_SLOTS if MASK else 1, 1, ROWS, MARKS], row_marks_desc.layout
        ),
        make_turns(STREAMS, Q_STAGES, 1, 1),
        gl.allocate_shared_memory(gl.int32, [K_SLOTS, 1], FLAT),
        gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, PIECE, WIDTH], q_desc.layout),
        gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, PIECE, WIDTH], dout_desc.layout),
        gl.allocate_shared_memory(
            gl.float16, [SLOTS if MASK else 1, 1, PIECE, MARKS], marks_desc.layout
        ),
        gl.allocate_shared_memory(gl.float32, [SLOTS, 1, PIECE], pivot_desc.layout),
        gl.allocate_shared_memory(gl.float32, [SLOTS, 1, PIECE], delta_desc.layout),
        make_turns(STREAMS, STAGES, 1, 1),
    )  # fmt: skip
    mbarrier.init(memory.bias_made, STREAMS)
    fence_async_shared()
    windows, head, first_row = which_work(kinds, num_masks, num_windows, num_chunks, form)
    added = Bias(bias, offsets, centre, entry_stride, head_stride, inverse)
    work = (
        dk, dv, added, regions, memory, head, first_row, num_masks, scale, mask_value, dk_scale,
        form,
    )  # fmt: skip
    load = (
        k_desc, v_desc, row_marks_desc, q_desc, dout_desc, marks_desc, pivot_desc, delta_desc,
        memory, windows, head, first_row, form,
    )  # fmt: skip
    # A list for each number of them: lists of functions cannot be put together here.
    if STREAMS == 2:
        gl.warp_specialize(
            [
                (_walk_role, work + (Stream(0),)),  # noqa: RUF005
                (_walk_role, work + (Stream(1),)),  # noqa: RUF005
                (load_role, load),
            ],
            [WARPS, 1],
            [REGISTERS, LOADING],
        )
    elif STREAMS == 3:
        gl.warp_specialize(
            [
                (_walk_role, work + (Stream(0),)),  # noqa: RUF005
                (_walk_role, work + (Stream(1),)),  # noqa: RUF005
                (_walk_role, work + (Stream(2),)),  # noqa: RUF005
                (load_role, load),
            ],
            [WARPS, WARPS, 1],
            [REGISTERS, REGISTERS, LOADING],
        )
    else:
        gl.warp_specialize(
            [
                (_walk_role, work + (Stream(0),)),  # noqa: RUF005
                (_walk_role, work + (Stream(1),)),  # noqa: RUF005
                (_walk_role, work + (Stream(2),)),  # noqa: RUF005
                (_walk_role, work + (Stream(3),)),  # noqa: RUF005
                (load_role, load),
            ],
            [WARPS, WARPS, WARPS, 1],
            [REGISTERS, REGISTERS, REGISTERS, LOADING],
        )

"""Gradients of window attention's queries and bias on Hopper, by rows of the scores.

::

    P = 2 ** (scale · log2 e · (q kᵀ + B / scale) - pivot)      dP = dO vᵀ
    dS = P ∘ (dP - δ)      dQ = scale · dS k      dB = Σ over windows of dS

A program owns one head and a tile of 64 queries, and walks its windows one by one. Its warpgroups
(shares) divide the keys, so each meets the same part of the bias's gradient in every window and
sums it in registers; what they find for the queries' gradients they put side by side in shared
memory, where they take turns to add it up::

    loading warp   q dO pivot δ | k v of share 0 | of share 1 | of share 2 | ...
    share 0        dS ─▶ dB += dS, dS k ─▶ ┐
    share 1        dS ─▶ dB += dS, dS k ─▶ ├ added up by one of them ─▶ dQ
    share 2        dS ─▶ dB += dS, dS k ─▶ ┘

Where registers cannot hold the sums of all keys, or memory the keys of wide heads, each launch
takes the next of them, and queries' gradients wait in float32 from one to the next.
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

from ...tiles.hopper.layouts import product_layout, wide_rows
from ...tiles.hopper.names import barrier
from ...tiles.hopper.ring import Turns, make_turns
from . import hopper_plan
from .hopper_changes import change, numbers_of, pivots_of, start_changes, weigh
from .hopper_halves import score_type, tiles_ahead
from .hopper_rows_load import load_role
from .hopper_tiles import (
    CHUNK,
    FLAT,
    MANY,
    MARKS,
    MIXED,
    NO_BIAS,
    PIECE,
    SUM_KEYS,
    Bias,
    Stream,
    compare,
    make_bias,
    place_rows,
    products_after,
    rows_of,
    start_scores,
    store_rows,
    store_sums,
)
from .hopper_windows import await_window, which_work

__all__ = ["row_gradients"]

ROWS = PIECE
TILE = gl.constexpr(2 * hopper_plan.SUM_KEYS)  # keys of a product
Q_STAGES = gl.constexpr(hopper_plan.Q_STAGES)
UNIT = gl.constexpr(gl.NVMMASharedLayout(32, 16, rank=2))
PART = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@aggregate
class Form:
    """What a kernel is compiled for."""

    NUM_HEADS: gl.constexpr
    NUM_TOKENS: gl.constexpr
    HEAD_SIZE: gl.constexpr
    WIDTH: gl.constexpr
    BIAS: gl.constexpr
    MASK: gl.constexpr
    STREAMS: gl.constexpr
    KEYS: gl.constexpr
    BOX: gl.constexpr
    PARTIAL: gl.constexpr  # whether a launch has only some of the keys
    WARPS: gl.constexpr
    ROWS: gl.constexpr
    KINDS: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, NUM_HEADS, NUM_TOKENS, HEAD_SIZE, WIDTH, BIAS, MASK, SHARES, KEYS, BOX
    ):  # fmt: skip
        self.NUM_HEADS = gl.constexpr(NUM_HEADS)
        self.NUM_TOKENS = gl.constexpr(NUM_TOKENS)
        self.HEAD_SIZE = gl.constexpr(HEAD_SIZE)
        self.WIDTH = gl.constexpr(WIDTH)
        self.BIAS = gl.constexpr(BIAS)
        self.MASK = gl.constexpr(MASK)
        self.STREAMS = gl.constexpr(SHARES)
        self.KEYS = gl.constexpr(KEYS)
        self.BOX = gl.constexpr(BOX)
        self.PARTIAL = gl.constexpr(SHARES * KEYS < NUM_TOKENS)
        self.WARPS = gl.constexpr(4)
        self.ROWS = PIECE
        self.KINDS = gl.constexpr(3 if MASK else 1)


@aggregate
class Memory:
    """What lies in shared memory, and the barriers that say whose turn it is."""

    bias: gl.shared_memory_descriptor  # [columns / CHUNK, ROWS * CHUNK]
    bias_made: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor  # [Q_STAGES, 1, 1, ROWS, WIDTH]
    dout: gl.shared_memory_descriptor
    row_marks: gl.shared_memory_descriptor  # [Q_STAGES, 1, ROWS, MARKS]
    pivot: gl.shared_memory_descriptor  # [Q_STAGES, 1, ROWS]
    delta: gl.shared_memory_descriptor
    q_turns: Turns  # of all shares
    windows: gl.shared_memory_descriptor  # int32 [Q_STAGES, 1]: which, or -1
    k: gl.shared_memory_descriptor  # [slots * KEYS / BOX, 1, 1, BOX, WIDTH]
    v: gl.shared_memory_descriptor
    marks: gl.shared_memory_descriptor  # [slots * KEYS / BOX, 1, BOX, MARKS]
    turns: Turns
    unit: gl.shared_memory_descriptor  # [SUM_KEYS, SUM_KEYS]: ones where row and column are equal
    parts: gl.shared_memory_descriptor  # float32 [BUFFERS * SHARES, ROWS, WIDTH]
    part_turns: Turns

    @gluon.constexpr_function
    def __init__(
        self, bias, bias_made, q, dout, row_marks, pivot, delta, q_turns, windows, k, v, marks,
        turns, unit, parts, part_turns,
    ):  # fmt: skip
        self.bias = bias
        self.bias_made = bias_made
        self.q = q
        self.dout = dout
        self.row_marks = row_marks
        self.pivot = pivot
        self.delta = delta
        self.q_turns = q_turns
        self.windows = windows
        self.k = k
        self.v = v
        self.marks = marks
        self.turns = turns
        self.unit = unit
        self.parts = parts
        self.part_turns = part_turns


@gluon.jit
def _start_tile(
    memory, SHARE: gl.constexpr, slot, k_slot, deltas, INDEX: gl.constexpr, MARKED: gl.constexpr,
    form,
):  # fmt: skip
    """Start the products of a tile's scores, and of what weights change by."""
    AT: gl.constexpr = INDEX * TILE
    DTYPE: gl.constexpr = score_type(memory.q.dtype)
    S_LAYOUT: gl.constexpr = product_layout(TILE, form.WARPS)
    box = k_slot * (form.KEYS // form.BOX) + AT // form.BOX
    k = rows_of(memory.k.index(box), AT % form.BOX, TILE)
    q = rows_of(memory.q.index(slot), 0, ROWS)
    s = start_scores(memory.bias, SHARE * form.KEYS + AT, q, k, DTYPE, form)
    if MARKED:
        row_marks = rows_of(memory.row_marks.index(slot), 0, ROWS)
        marks = rows_of(memory.marks.index(box), AT % form.BOX, TILE)
        s = warpgroup_mma(row_marks, marks.permute((1, 0)), s, is_async=True)
    dout = rows_of(memory.dout.index(slot), 0, ROWS)
    v = rows_of(memory.v.index(box), AT % form.BOX, TILE)
    dp = start_changes(dout, v, deltas, DTYPE, S_LAYOUT)
    return s, dp


@gluon.jit
def _walk_window(
    memory, dbias, SHARE: gl.constexpr, slot, k_slot, regions, row, first_key, mask_value, scale,
    KIND: gl.constexpr, form,
):  # fmt: skip
    """A share of a window: the queries' gradients, not scaled, and the bias's so far."""
    O_LAYOUT: gl.constexpr = product_layout(form.WIDTH, form.WARPS)
    DS_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    TILES: gl.constexpr = form.KEYS // TILE
    AHEAD: gl.constexpr = tiles_ahead(memory.q.dtype)
    MARKED: gl.constexpr = KIND == MIXED
    FIRST: gl.constexpr = 3 if MARKED else 2
    SUMS: gl.constexpr = 0 if form.BIAS == NO_BIAS else 2  # of a tile
    HALF_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, product_layout(SUM_KEYS, form.WARPS), 2)
    DTYPE: gl.constexpr = score_type(memory.q.dtype)
    S_LAYOUT: gl.constexpr = product_layout(TILE, form.WARPS)
    pivots = pivots_of(memory.pivot.index(slot), 0, ROWS, 1, DTYPE, S_LAYOUT)
    deltas = numbers_of(memory.delta.index(slot), 0, ROWS, 1, DTYPE, S_LAYOUT)
    started = ()
    for t in gl.static_range(min(AHEAD, TILES)):
        started = started + _start_tile(memory, SHARE, slot, k_slot, deltas, t, MARKED, form)
    dq = gl.zeros([ROWS, form.WIDTH], gl.float32, O_LAYOUT)
    sums = ()
    used = ()
    for t in gl.static_range(TILES):
        s, dp = warpgroup_mma_wait(
            products_after(t, TILES, AHEAD, FIRST, 1 + SUMS),
            deps=(started[2 * t], started[2 * t + 1]),
        )
        if KIND == MANY:
            # Counted from the launch's first key, theirs lie where the compiler knows.
            first = SHARE * form.KEYS + t * TILE
            left = form.NUM_TOKENS - first_key
            s = compare(s, regions + first_key, row - first_key, first, mask_value, left)
        ds = change(weigh(s, scale, pivots), dp, deltas).to(memory.k.dtype)
        ds_k = gl.convert_layout(ds, DS_LAYOUT, assert_trivial=True)
        box = k_slot * (form.KEYS // form.BOX) + t * TILE // form.BOX
        k = rows_of(memory.k.index(box), t * TILE % form.BOX, TILE)
        dq = warpgroup_mma(ds_k, k, dq, is_async=True)
        used = used + (ds_k,)  # type: ignore[assignment] # noqa: RUF005
        if SUMS > 0:
            halves = ds.reshape([ROWS, SUMS, SUM_KEYS]).permute((0, 2, 1)).split()
            for i in gl.static_range(SUMS):  # in the registers of ``ds_k``
                half = gl.convert_layout(halves[i], HALF_LAYOUT, assert_trivial=True)
                total = warpgroup_mma(half, memory.unit, dbias[SUMS * t + i], is_async=True)
                sums = sums + (total,)  # type: ignore[assignment] # noqa: RUF005
        if t + AHEAD < TILES:
            started = started + _start_tile(
                memory, SHARE, slot, k_slot, deltas, t + AHEAD, MARKED, form
            )
    done = warpgroup_mma_wait(0, deps=(dq,) + sums + used)  # noqa: RUF005
    sums = ()
    for t in gl.static_range(len(dbias)):
        sums = sums + (done[1 + t],)  # type: ignore[assignment] # noqa: RUF005
    return done[0], sums


@gluon.jit
def _add_up(
    dq_out, dq_so_far, memory, turn, window, head, first_row, first_key, dq_scale, form
):  # fmt: skip
    """The queries' gradients of a window, from all shares and from the launches before."""
    WIDE: gl.constexpr = wide_rows(form.WIDTH, form.WARPS)
    places, inside = place_rows(dq_so_far, window, head, first_row, form)
    if form.PARTIAL:  # on its way while the other shares are waited for
        so_far = gl.load(places, inside & (first_key > 0), 0.0)
    buffer = memory.part_turns.slot(0, turn)
    memory.part_turns.wait_full(0, turn)
    total = memory.parts.index(buffer * form.STREAMS).load(WIDE)
    for s in gl.static_range(1, form.STREAMS):
        total += memory.parts.index(buffer * form.STREAMS + s).load(WIDE)
    if form.PARTIAL:
        total += so_far
    if form.PARTIAL and first_key + form.STREAMS * form.KEYS < form.NUM_TOKENS:
        gl.store(places, total, inside)
    else:
        store_rows(dq_out, total * dq_scale, window, head, first_row, form)


@gluon.jit
def _walk_role(
    dq_out, dq_so_far, dbias_out, bias, regions, memory, head, chunk, first_row, first_key,
    num_masks, scale, mask_value, dq_scale, form, share,
):  # fmt: skip
    """A share: its part of the tile of bias, then its keys of every window."""
    SHARE: gl.constexpr = share.INDEX
    N: gl.constexpr = form.NUM_TOKENS
    first_key = first_key if form.PARTIAL else 0
    make_bias(memory.bias, bias, head, first_row, first_key, SHARE, False, form)
    barrier()
    mbarrier.arrive(memory.bias_made)
    mbarrier.wait(memory.bias_made, 0)
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, product_layout(form.WIDTH, form.WARPS)))
    dbias = ()
    for _ in gl.static_range(form.KEYS // SUM_KEYS if form.BIAS != NO_BIAS else 0):
        zeros = gl.zeros([ROWS, SUM_KEYS], gl.float32, product_layout(SUM_KEYS, form.WARPS))
        dbias = dbias + (zeros,)  # type: ignore[assignment] # noqa: RUF005
    turn = 0
    for i in gl.static_range(form.KINDS):
        window = await_window(memory.q_turns, memory.windows, 0, turn, form)
        while window >= 0:
            use = turn - i
            theirs = regions
            if form.MASK:
                theirs += window % num_masks * N
            memory.turns.wait_full(SHARE, use)
            dq, dbias = _walk_window(
                memory, dbias, SHARE, memory.q_turns.slot(0, turn), memory.turns.slot(SHARE, use),
                theirs, row, first_key, mask_value, scale, i, form,
            )  # fmt: skip
            memory.turns.release(SHARE, use)
            memory.q_turns.release(0, turn)
            buffer = memory.part_turns.slot(0, use)
            memory.part_turns.wait_empty(0, use)
            memory.parts.index(buffer * form.STREAMS + SHARE).store(dq)
            barrier()
            memory.part_turns.fill(0, use)
            if use % form.STREAMS == SHARE:
                _add_up(
                    dq_out, dq_so_far, memory, use, window, head, first_row, first_key, dq_scale,
                    form,
                )  # fmt: skip
                barrier()
                memory.part_turns.release(0, use)
            turn += 1
            window = await_window(memory.q_turns, memory.windows, 0, turn, form)
        memory.q_turns.release(0, turn)
        turn += 1
    for t in gl.static_range(len(dbias)):
        tile = first_key // SUM_KEYS + SHARE * (form.KEYS // SUM_KEYS) + t
        store_sums(dbias_out, dbias[t], chunk, head, first_row, tile, form)


@gluon.jit
def _make_unit(dtype: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, SUM_KEYS, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, SUM_KEYS, gl.SliceLayout(0, LAYOUT))[None, :]
    return gl.where(row == column, 1.0, 0.0).to(dtype)


@gluon.jit
def row_gradients(
    dq,  # [num_windows, NUM_TOKENS, NUM_HEADS, HEAD_SIZE]
    dq_so_far,  # float32, the same, from launch to launch
    dbias,  # float32, see ``hopper_sums``
    q_desc,  # [num_windows, NUM_HEADS, NUM_TOKENS, HEAD_SIZE] in boxes of [1, 1, 64, WIDTH]
    dout_desc,
    row_marks_desc,  # float16 [num_masks, NUM_TOKENS, 2 * MARKS] in boxes of [1, 64, MARKS]
    pivot_desc,  # as ``make_deltas`` leaves it, in boxes of [1, 64]
    delta_desc,
    k_desc,  # in boxes of [1, 1, BOX, WIDTH], like v_desc
    v_desc,
    marks_desc,  # in boxes of [1, BOX, MARKS]
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
    dq_scale,
    first_key,  # of the launch
    NUM_HEADS: gl.constexpr,
    NUM_TOKENS: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    BIAS: gl.constexpr,
    MASK: gl.constexpr,
    SHARES: gl.constexpr,
    KEYS: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    REGISTERS: gl.constexpr,
    LOADING: gl.constexpr,
):
    """The kernel; see above. Grid: tiles of tokens × heads × chunks, tiles of a window together."""
    form = Form(NUM_HEADS, NUM_TOKENS, HEAD_SIZE, WIDTH, BIAS, MASK, SHARES, KEYS, BOX)
    SLOTS: gl.constexpr = SHARES * STAGES * (KEYS // BOX)
    dtype: gl.constexpr = q_desc.dtype
    memory = Memory(
        gl.allocate_shared_memory(gl.float16, [SHARES * KEYS // CHUNK, ROWS * CHUNK], FLAT),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(dtype, [Q_STAGES, 1, 1, ROWS, WIDTH], q_desc.layout),
        gl.allocate_shared_memory(dtype, [Q_STAGES, 1, 1, ROWS, WIDTH], dout_desc.layout),
        gl.allocate_shared_memory(gl.float16, [Q_STAGES, 1, ROWS, MARKS], row_marks_desc.layout),
        gl.allocate_shared_memory(gl.float32, [Q_STAGES, 1, ROWS], pivot_desc.layout),
        gl.allocate_shared_memory(gl.float32, [Q_STAGES, 1, ROWS], delta_desc.layout),
        make_turns(1, Q_STAGES, 1, SHARES),
        gl.allocate_shared_memory(gl.int32, [Q_STAGES, 1], FLAT),
        gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, BOX, WIDTH], k_desc.layout),
        gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, BOX, WIDTH], v_desc.layout),
        gl.allocate_shared_memory(
            gl.float16, [SLOTS if MASK else 1, 1, BOX, MARKS], marks_desc.layout
        ),
        make_turns(SHARES, STAGES, 1, 1),
        gl.allocate_shared_memory(dtype, [SUM_KEYS, SUM_KEYS], UNIT, _make_unit(dtype)),
        gl.allocate_shared_memory(gl.float32, [BUFFERS * SHARES, ROWS, WIDTH], PART),
        make_turns(1, BUFFERS, SHARES, 1),
    )
    mbarrier.init(memory.bias_made, SHARES)
    fence_async_shared()
    windows, head, first_row = which_work(kinds, num_masks, num_windows, num_chunks, form)
    added = Bias(bias, offsets, centre, entry_stride, head_stride, inverse)
    work = (
        dq, dq_so_far, dbias, added, regions, memory, head, windows.chunk, first_row, first_key,
        num_masks, scale, mask_value, dq_scale, form,
    )  # fmt: skip
    load = (
        q_desc, dout_desc, row_marks_desc, pivot_desc, delta_desc, k_desc, v_desc, marks_desc,
        memory, windows, head, first_row, first_key, form,
    )  # fmt: skip
    # A list for each number of them: lists of functions cannot be put together here.
    if SHARES == 3:
        gl.warp_specialize(
            [
                (_walk_role, work + (Stream(0),)),  # noqa: RUF005
                (_walk_role, work + (Stream(1),)),  # noqa: RUF005
                (_walk_role, work + (Stream(2),)),  # noqa: RUF005
                (load_role, load),
            ],
            [4, 4, 1],
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
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, LOADING],
        )

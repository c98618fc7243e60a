"""Gradients of queries and of the bias on Hopper, by rows of the scores.

::

    P = 2 ** (scale · log2 e · (q kᵀ + B / scale) - pivot)      dP = dO vᵀ
    dS = P ∘ (dP - δ)      dQ = scale · dS k      dB = Σ over windows of dS

A program owns one head and a tile of 64 queries, and visits its windows one by one. Its warpgroups
split the keys, so each computes the same part of the bias gradient in every window and sums it in
registers. Partial dQ go through shared memory, and the warpgroups take turns to add them up::

    loading warp   q dO pivot δ | k v of split 0 | of split 1 | of split 2 | ...
    split 0        dS ─▶ dB += dS, dS k ─▶ ┐
    split 1        dS ─▶ dB += dS, dS k ─▶ ├ added up by one of them ─▶ dQ
    split 2        dS ─▶ dB += dS, dS k ─▶ ┘

If the bias gradient of all keys does not fit in registers, or the keys of wide heads not in shared
memory, several launches cover the keys, and dQ is accumulated in float32 between them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ....tiles.hopper.layouts import product_layout, wide_rows
from ....tiles.hopper.names import barrier
from ....tiles.hopper.record import record
from ....tiles.hopper.ring import PipelineBarriers, make_barriers
from ....tiles.hopper.roles import specialise
from . import constants
from .softmax import (
    compute_weights,
    load_pivots,
    load_values,
    score_gradient,
    score_type,
    start_weight_gradient,
    tiles_ahead,
)
from .tiles import (
    CHUNK,
    COMPARED,
    FLAT,
    NO_BIAS,
    ONE_HOT,
    ONE_HOT_COLUMNS,
    PIECE,
    SUM_KEYS,
    Bias,
    apply_region_mask,
    build_bias_tile,
    locate_work,
    products_in_flight,
    row_addresses,
    rows_of,
    signal_end,
    start_scores,
    store_bias_sums,
    store_rows,
    store_window_index,
    wait_for_window,
)

ROWS = PIECE
TILE = gl.constexpr(2 * constants.SUM_KEYS)  # keys of a product
Q_STAGES = gl.constexpr(constants.Q_STAGES)
IDENTITY = gl.constexpr(gl.NVMMASharedLayout(32, 16, rank=2))
PART = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@record
class RowConfig:
    """Compile-time constants of the kernel."""

    NUM_HEADS: gl.constexpr
    NUM_TOKENS: gl.constexpr
    HEAD_SIZE: gl.constexpr
    WIDTH: gl.constexpr
    BIAS: gl.constexpr
    MASK: gl.constexpr
    STREAMS: gl.constexpr
    KEYS: gl.constexpr
    BOX: gl.constexpr
    PARTIAL: gl.constexpr  # whether a launch covers only some of the keys
    WARPS: gl.constexpr
    ROWS: gl.constexpr
    MASK_CLASSES: gl.constexpr  # whose windows the loading warp searches for


@record
class Memory:
    """Shared memory of a program, and the barriers of its pipelines."""

    bias: gl.shared_memory_descriptor  # [columns / CHUNK, ROWS * CHUNK]
    bias_made: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor  # [Q_STAGES, 1, 1, ROWS, WIDTH]
    dout: gl.shared_memory_descriptor
    row_one_hot: gl.shared_memory_descriptor  # [Q_STAGES, 1, ROWS, ONE_HOT_COLUMNS]
    pivot: gl.shared_memory_descriptor  # [Q_STAGES, 1, ROWS]
    delta: gl.shared_memory_descriptor
    q_barriers: PipelineBarriers  # shared by all splits
    windows: gl.shared_memory_descriptor  # int32 [Q_STAGES, 1]: the index of their window, or -1
    k: gl.shared_memory_descriptor  # [slots * KEYS / BOX, 1, 1, BOX, WIDTH]
    v: gl.shared_memory_descriptor
    one_hot: gl.shared_memory_descriptor  # [slots * KEYS / BOX, 1, BOX, ONE_HOT_COLUMNS]
    kv_barriers: PipelineBarriers
    identity: gl.shared_memory_descriptor  # [SUM_KEYS, SUM_KEYS]: the identity matrix
    partials: gl.shared_memory_descriptor  # float32 [BUFFERS * SPLITS, ROWS, WIDTH]
    partial_barriers: PipelineBarriers


# --- the loading warp -----------------------------------------------------------------------------


@gluon.jit
def _load_role(
    q_desc, dout_desc, row_one_hot_desc, pivot_desc, delta_desc, k_desc, v_desc, one_hot_desc,
    memory, windows, head, first_row, first_key, config,
):  # fmt: skip
    """One warp: load Q, dO, pivot and delta, then K and V of every split, class by class."""
    step = 0
    first_key = first_key if config.PARTIAL else 0
    if not config.PARTIAL:  # see ``launch``
        gdc_wait()
        gdc_launch_dependents()
    for i in gl.static_range(config.MASK_CLASSES):
        base = -32
        bits = 0
        base, bits, window, is_there = windows.next(base, bits, i, config.MASK)
        while is_there:
            _load_window(
                q_desc, dout_desc, row_one_hot_desc, pivot_desc, delta_desc, k_desc, v_desc,
                one_hot_desc, memory, window, step, windows.num_masks, head, first_row, first_key,
                i == ONE_HOT, i, config,
            )  # fmt: skip
            step += 1
            base, bits, window, is_there = windows.next(base, bits, i, config.MASK)
        (step,) = signal_end(memory.q_barriers, memory.windows, (step,))


@gluon.jit
def _load_window(
    q_desc, dout_desc, row_one_hot_desc, pivot_desc, delta_desc, k_desc, v_desc, one_hot_desc,
    memory, window, step, num_masks, head, first_row, first_key, MASKED: gl.constexpr,
    ENDS: gl.constexpr, config,
):  # fmt: skip
    """Load one window; ``ENDS`` earlier steps had no window: they marked the end of a class."""
    BYTES: gl.constexpr = 2 * (2 * config.WIDTH + (ONE_HOT_COLUMNS if MASKED else 0))
    BOXES: gl.constexpr = config.KEYS // config.BOX
    slot = memory.q_barriers.slot(0, step)
    memory.q_barriers.wait_empty(0, step)
    store_window_index(memory.windows, slot, window)
    ready = memory.q_barriers.expect(0, step, ROWS * (BYTES + 8))
    at = [window, head, first_row, 0]
    tma.async_copy_global_to_shared(q_desc, at, ready, memory.q.index(slot))
    tma.async_copy_global_to_shared(dout_desc, at, ready, memory.dout.index(slot))
    numbers = [window * config.NUM_HEADS + head, first_row]
    tma.async_copy_global_to_shared(pivot_desc, numbers, ready, memory.pivot.index(slot))
    tma.async_copy_global_to_shared(delta_desc, numbers, ready, memory.delta.index(slot))
    place = window % num_masks
    if MASKED:
        rows = [place, first_row, ONE_HOT_COLUMNS]
        row_one_hot = memory.row_one_hot.index(slot)
        tma.async_copy_global_to_shared(row_one_hot_desc, rows, ready, row_one_hot)
    use = step - ENDS
    for s in gl.static_range(config.STREAMS):
        k_slot = memory.kv_barriers.slot(s, use)
        memory.kv_barriers.wait_empty(s, use)
        k_ready = memory.kv_barriers.expect(s, use, config.KEYS * BYTES)
        for b in gl.static_range(BOXES):
            first = first_key + s * config.KEYS + b * config.BOX
            box = k_slot * BOXES + b
            keys = [window, head, first, 0]
            tma.async_copy_global_to_shared(k_desc, keys, k_ready, memory.k.index(box))
            tma.async_copy_global_to_shared(v_desc, keys, k_ready, memory.v.index(box))
            if MASKED:
                columns = [place, first, 0]
                one_hot = memory.one_hot.index(box)
                tma.async_copy_global_to_shared(one_hot_desc, columns, k_ready, one_hot)


# --- the computing warps --------------------------------------------------------------------------


@gluon.jit
def _start_tile(
    memory, SPLIT: gl.constexpr, slot, k_slot, deltas, INDEX: gl.constexpr, MASKED: gl.constexpr,
    config,
):  # fmt: skip
    """Start the scores and the weight gradients of a tile."""
    AT: gl.constexpr = INDEX * TILE
    DTYPE: gl.constexpr = score_type(memory.q.dtype)
    S_LAYOUT: gl.constexpr = product_layout(TILE, config.WARPS)
    box = k_slot * (config.KEYS // config.BOX) + AT // config.BOX
    k = rows_of(memory.k.index(box), AT % config.BOX, TILE)
    q = rows_of(memory.q.index(slot), 0, ROWS)
    s = start_scores(memory.bias, SPLIT * config.KEYS + AT, q, k, DTYPE, config)
    if MASKED:
        row_one_hot = rows_of(memory.row_one_hot.index(slot), 0, ROWS)
        one_hot = rows_of(memory.one_hot.index(box), AT % config.BOX, TILE)
        s = warpgroup_mma(row_one_hot, one_hot.permute((1, 0)), s, is_async=True)
    dout = rows_of(memory.dout.index(slot), 0, ROWS)
    v = rows_of(memory.v.index(box), AT % config.BOX, TILE)
    dp = start_weight_gradient(dout, v, deltas, DTYPE, S_LAYOUT)
    return s, dp


@gluon.jit
def _window_gradients(
    memory, dbias, SPLIT: gl.constexpr, slot, k_slot, regions, row, first_key, mask_value, scale,
    MASK_CLASS: gl.constexpr, config,
):  # fmt: skip
    """Compute a split of a window: its partial dQ, not scaled, and the bias gradient's sums."""
    O_LAYOUT: gl.constexpr = product_layout(config.WIDTH, config.WARPS)
    DS_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    TILES: gl.constexpr = config.KEYS // TILE
    AHEAD: gl.constexpr = tiles_ahead(memory.q.dtype)
    MASKED: gl.constexpr = MASK_CLASS == ONE_HOT
    FIRST: gl.constexpr = 3 if MASKED else 2
    SUMS: gl.constexpr = 0 if config.BIAS == NO_BIAS else 2  # of a tile
    HALF_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, product_layout(SUM_KEYS, config.WARPS), 2)
    DTYPE: gl.constexpr = score_type(memory.q.dtype)
    S_LAYOUT: gl.constexpr = product_layout(TILE, config.WARPS)
    pivots = load_pivots(memory.pivot.index(slot), 0, ROWS, 1, DTYPE, S_LAYOUT)
    deltas = load_values(memory.delta.index(slot), 0, ROWS, 1, DTYPE, S_LAYOUT)
    started = ()
    for t in gl.static_range(min(AHEAD, TILES)):
        started = started + _start_tile(memory, SPLIT, slot, k_slot, deltas, t, MASKED, config)
    dq = gl.zeros([ROWS, config.WIDTH], gl.float32, O_LAYOUT)
    sums = ()
    used = ()
    for t in gl.static_range(TILES):
        s, dp = warpgroup_mma_wait(
            products_in_flight(t, TILES, AHEAD, FIRST, 1 + SUMS),
            deps=(started[2 * t], started[2 * t + 1]),
        )
        if MASK_CLASS == COMPARED:
            # Relative to the launch's first key, the columns are compile-time constants.
            first = SPLIT * config.KEYS + t * TILE
            left = config.NUM_TOKENS - first_key
            s = apply_region_mask(s, regions + first_key, row - first_key, first, mask_value, left)
        ds = score_gradient(compute_weights(s, scale, pivots), dp, deltas).to(memory.k.dtype)
        ds_k = gl.convert_layout(ds, DS_LAYOUT, assert_trivial=True)
        box = k_slot * (config.KEYS // config.BOX) + t * TILE // config.BOX
        k = rows_of(memory.k.index(box), t * TILE % config.BOX, TILE)
        dq = warpgroup_mma(ds_k, k, dq, is_async=True)
        used = used + (ds_k,)  # type: ignore[assignment] # noqa: RUF005
        if SUMS > 0:
            halves = ds.reshape([ROWS, SUMS, SUM_KEYS]).permute((0, 2, 1)).split()
            # Products with the identity add ds without a conversion from the operand's layout.
            for i in gl.static_range(SUMS):
                half = gl.convert_layout(halves[i], HALF_LAYOUT, assert_trivial=True)
                total = warpgroup_mma(half, memory.identity, dbias[SUMS * t + i], is_async=True)
                sums = sums + (total,)  # type: ignore[assignment] # noqa: RUF005
        if t + AHEAD < TILES:
            started = started + _start_tile(
                memory, SPLIT, slot, k_slot, deltas, t + AHEAD, MASKED, config
            )
    done = warpgroup_mma_wait(0, deps=(dq,) + sums + used)  # noqa: RUF005
    sums = ()
    for t in gl.static_range(len(dbias)):
        sums = sums + (done[1 + t],)  # type: ignore[assignment] # noqa: RUF005
    return done[0], sums


@gluon.jit
def _combine_partials(
    dq_out, dq_partial, memory, step, window, head, first_row, first_key, dq_scale, config
):  # fmt: skip
    """Sum a window's dQ over all splits and previous launches, and store it."""
    WIDE: gl.constexpr = wide_rows(config.WIDTH, config.WARPS)
    places, inside = row_addresses(dq_partial, window, head, first_row, config)
    if config.PARTIAL:  # loaded while waiting for the other splits
        earlier = gl.load(places, inside & (first_key > 0), 0.0)
    buffer = memory.partial_barriers.slot(0, step)
    memory.partial_barriers.wait_full(0, step)
    total = memory.partials.index(buffer * config.STREAMS).load(WIDE)
    for s in gl.static_range(1, config.STREAMS):
        total += memory.partials.index(buffer * config.STREAMS + s).load(WIDE)
    if config.PARTIAL:
        total += earlier
    if config.PARTIAL and first_key + config.STREAMS * config.KEYS < config.NUM_TOKENS:
        gl.store(places, total, inside)
    else:
        store_rows(dq_out, total * dq_scale, window, head, first_row, config)


@gluon.jit
def _compute_role(
    dq_out, dq_partial, dbias_out, bias, regions, memory, head, chunk, first_row, first_key,
    num_masks, scale, mask_value, dq_scale, config, split,
):  # fmt: skip
    """One split: build its part of the bias tile, then compute its keys of every window."""
    SPLIT: gl.constexpr = split.INDEX
    N: gl.constexpr = config.NUM_TOKENS
    first_key = first_key if config.PARTIAL else 0
    build_bias_tile(memory.bias, bias, head, first_row, first_key, SPLIT, False, config)
    barrier()
    mbarrier.arrive(memory.bias_made)
    mbarrier.wait(memory.bias_made, 0)
    row = first_row + gl.arange(
        0, ROWS, gl.SliceLayout(1, product_layout(config.WIDTH, config.WARPS))
    )
    dbias = ()
    for _ in gl.static_range(config.KEYS // SUM_KEYS if config.BIAS != NO_BIAS else 0):
        zeros = gl.zeros([ROWS, SUM_KEYS], gl.float32, product_layout(SUM_KEYS, config.WARPS))
        dbias = dbias + (zeros,)  # type: ignore[assignment] # noqa: RUF005
    step = 0
    for i in gl.static_range(config.MASK_CLASSES):
        window = wait_for_window(memory.q_barriers, memory.windows, 0, step, config)
        while window >= 0:
            use = step - i
            other_regions = regions
            if config.MASK:
                other_regions += window % num_masks * N
            memory.kv_barriers.wait_full(SPLIT, use)
            dq, dbias = _window_gradients(
                memory, dbias, SPLIT, memory.q_barriers.slot(0, step),
                memory.kv_barriers.slot(SPLIT, use), other_regions, row, first_key, mask_value,
                scale, i, config,
            )  # fmt: skip
            memory.kv_barriers.release(SPLIT, use)
            memory.q_barriers.release(0, step)
            buffer = memory.partial_barriers.slot(0, use)
            memory.partial_barriers.wait_empty(0, use)
            memory.partials.index(buffer * config.STREAMS + SPLIT).store(dq)
            barrier()
            memory.partial_barriers.fill(0, use)
            if use % config.STREAMS == SPLIT:
                _combine_partials(
                    dq_out, dq_partial, memory, use, window, head, first_row, first_key, dq_scale,
                    config,
                )  # fmt: skip
                barrier()
                memory.partial_barriers.release(0, use)
            step += 1
            window = wait_for_window(memory.q_barriers, memory.windows, 0, step, config)
        memory.q_barriers.release(0, step)
        step += 1
    for t in gl.static_range(len(dbias)):
        tile = first_key // SUM_KEYS + SPLIT * (config.KEYS // SUM_KEYS) + t
        store_bias_sums(dbias_out, dbias[t], chunk, head, first_row, tile, config)


@gluon.jit
def _make_identity(dtype: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, SUM_KEYS, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, SUM_KEYS, gl.SliceLayout(0, LAYOUT))[None, :]
    return gl.where(row == column, 1.0, 0.0).to(dtype)


# --- the kernel -----------------------------------------------------------------------------------


@gluon.jit
def row_gradients(
    dq,  # [num_windows, NUM_TOKENS, NUM_HEADS, HEAD_SIZE]
    dq_partial,  # float32, the same, from launch to launch
    dbias,  # float32, see ``auxiliary``
    q_desc,  # [num_windows, NUM_HEADS, NUM_TOKENS, HEAD_SIZE] in boxes of [1, 1, 64, WIDTH]
    dout_desc,
    row_one_hot_desc,  # float16 [num_masks, NUM_TOKENS, 2 * ONE_HOT_COLUMNS], 64 tokens a box
    pivot_desc,  # as ``make_deltas`` leaves it, in boxes of [1, 64]
    delta_desc,
    k_desc,  # in boxes of [1, 1, BOX, WIDTH], like v_desc
    v_desc,
    one_hot_desc,  # in boxes of [1, BOX, ONE_HOT_COLUMNS]
    bias,  # [table_size, NUM_HEADS] or [NUM_HEADS, NUM_TOKENS, NUM_TOKENS]
    offsets,  # int32 [NUM_TOKENS]
    mask_classes,  # int32 [num_masks]
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
    SPLITS: gl.constexpr,
    KEYS: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    REGISTERS: gl.constexpr,
    LOADING: gl.constexpr,
):
    """See the module docstring. Grid: tiles of tokens × heads × chunks, tiles innermost."""
    PARTIAL: gl.constexpr = SPLITS * KEYS < NUM_TOKENS
    config = RowConfig(
        NUM_HEADS, NUM_TOKENS, HEAD_SIZE, WIDTH, BIAS, MASK, SPLITS, KEYS, BOX, PARTIAL, 4, ROWS,
        3 if MASK else 1,
    )  # fmt: skip
    SLOTS: gl.constexpr = SPLITS * STAGES * (KEYS // BOX)
    dtype: gl.constexpr = q_desc.dtype
    memory = Memory(
        gl.allocate_shared_memory(gl.float16, [SPLITS * KEYS // CHUNK, ROWS * CHUNK], FLAT),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(dtype, [Q_STAGES, 1, 1, ROWS, WIDTH], q_desc.layout),
        gl.allocate_shared_memory(dtype, [Q_STAGES, 1, 1, ROWS, WIDTH], dout_desc.layout),
        gl.allocate_shared_memory(
            gl.float16, [Q_STAGES, 1, ROWS, ONE_HOT_COLUMNS], row_one_hot_desc.layout
        ),
        gl.allocate_shared_memory(gl.float32, [Q_STAGES, 1, ROWS], pivot_desc.layout),
        gl.allocate_shared_memory(gl.float32, [Q_STAGES, 1, ROWS], delta_desc.layout),
        make_barriers(1, Q_STAGES, 1, SPLITS),
        gl.allocate_shared_memory(gl.int32, [Q_STAGES, 1], FLAT),
        gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, BOX, WIDTH], k_desc.layout),
        gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, BOX, WIDTH], v_desc.layout),
        gl.allocate_shared_memory(
            gl.float16, [SLOTS if MASK else 1, 1, BOX, ONE_HOT_COLUMNS], one_hot_desc.layout
        ),
        make_barriers(SPLITS, STAGES, 1, 1),
        gl.allocate_shared_memory(dtype, [SUM_KEYS, SUM_KEYS], IDENTITY, _make_identity(dtype)),
        gl.allocate_shared_memory(gl.float32, [BUFFERS * SPLITS, ROWS, WIDTH], PART),
        make_barriers(1, BUFFERS, SPLITS, 1),
    )
    mbarrier.init(memory.bias_made, SPLITS)
    fence_async_shared()
    windows, head, first_row = locate_work(mask_classes, num_masks, num_windows, num_chunks, config)
    added = Bias(bias, offsets, centre, entry_stride, head_stride, inverse)
    work = (
        dq, dq_partial, dbias, added, regions, memory, head, windows.chunk, first_row, first_key,
        num_masks, scale, mask_value, dq_scale, config,
    )  # fmt: skip
    load = (
        q_desc, dout_desc, row_one_hot_desc, pivot_desc, delta_desc, k_desc, v_desc, one_hot_desc,
        memory, windows, head, first_row, first_key, config,
    )  # fmt: skip
    specialise(_compute_role, work, SPLITS, 4, REGISTERS, [(_load_role, load)], 1, LOADING)

"""Gradients of keys and values on Hopper, by columns of the scores.

::

    Pᵀ = 2 ** (scale · log2 e · (k qᵀ + Bᵀ / scale) - pivot)      dPᵀ = v dOᵀ
    dV = Pᵀ dO       dSᵀ = Pᵀ ∘ (dPᵀ - δ)       dK = scale · dSᵀ q

A program owns one head and a tile of keys, and is organised like the forward kernel: its bias tile
stays in shared memory, and each stream takes the next window and visits its queries a piece at a
time. Weights stay in registers from one product to the next, so nothing is transposed through
shared memory.
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

from ....tiles.hopper.layouts import product_layout
from ....tiles.hopper.names import barrier
from ....tiles.hopper.record import record
from ....tiles.hopper.ring import PipelineBarriers, make_barriers
from ....tiles.hopper.roles import specialise
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
    ONE_HOT,
    ONE_HOT_COLUMNS,
    ONLINE_TILE,
    PIECE,
    Bias,
    StreamConfig,
    advance_steps,
    apply_region_mask,
    build_bias_tile,
    locate_work,
    products_in_flight,
    rows_of,
    signal_end,
    start_scores,
    store_rows,
    store_window_index,
    wait_for_window,
    zero_steps,
)


@record
class Memory:
    """Shared memory of a program, and the barriers of its pipelines."""

    bias: gl.shared_memory_descriptor  # [columns / CHUNK, ROWS * CHUNK]
    bias_made: gl.shared_memory_descriptor  # a barrier
    k: gl.shared_memory_descriptor  # [slots, 1, 1, ROWS, WIDTH]
    v: gl.shared_memory_descriptor
    row_one_hot: gl.shared_memory_descriptor  # [slots, 1, ROWS, ONE_HOT_COLUMNS]
    k_barriers: PipelineBarriers
    windows: gl.shared_memory_descriptor  # int32 [slots, 1]: the index of their window, or -1
    q: gl.shared_memory_descriptor  # [slots, 1, 1, PIECE, WIDTH]
    dout: gl.shared_memory_descriptor
    one_hot: gl.shared_memory_descriptor  # [slots, 1, PIECE, ONE_HOT_COLUMNS]
    pivot: gl.shared_memory_descriptor  # [slots, 1, PIECE]
    delta: gl.shared_memory_descriptor
    q_barriers: PipelineBarriers


# --- the loading warp -----------------------------------------------------------------------------


@gluon.jit
def _load_round(
    k_desc, v_desc, row_one_hot_desc, q_desc, dout_desc, one_hot_desc, pivot_desc, delta_desc,
    memory, windows, has_window, steps, num_masks, head, first_row, MASKED: gl.constexpr,
    ENDS: gl.constexpr, config,
):  # fmt: skip
    """Load a window for every stream with ``has_window``; return the streams' next steps."""
    PIECES: gl.constexpr = config.FULL_PIECES + (config.LAST_PIECE > 0)
    BYTES: gl.constexpr = 2 * (2 * config.WIDTH + (ONE_HOT_COLUMNS if MASKED else 0))
    for s in gl.static_range(config.STREAMS):
        if has_window[s]:
            k_slot = memory.k_barriers.slot(s, steps[s])
            memory.k_barriers.wait_empty(s, steps[s])
            store_window_index(memory.windows, k_slot, windows[s])
            k_ready = memory.k_barriers.expect(s, steps[s], config.ROWS * BYTES)
            keys = [windows[s], head, first_row, 0]
            tma.async_copy_global_to_shared(k_desc, keys, k_ready, memory.k.index(k_slot))
            tma.async_copy_global_to_shared(v_desc, keys, k_ready, memory.v.index(k_slot))
            if MASKED:
                rows = [windows[s] % num_masks, first_row, ONE_HOT_COLUMNS]
                row_one_hot = memory.row_one_hot.index(k_slot)
                tma.async_copy_global_to_shared(row_one_hot_desc, rows, k_ready, row_one_hot)
    for g in range(PIECES):
        for s in gl.static_range(config.STREAMS):
            if has_window[s]:
                use = (steps[s] - ENDS) * PIECES + g
                slot = memory.q_barriers.slot(s, use)
                memory.q_barriers.wait_empty(s, use)
                ready = memory.q_barriers.expect(s, use, PIECE * (BYTES + 8))
                queries = [windows[s], head, g * PIECE, 0]
                tma.async_copy_global_to_shared(q_desc, queries, ready, memory.q.index(slot))
                tma.async_copy_global_to_shared(dout_desc, queries, ready, memory.dout.index(slot))
                numbers = [windows[s] * config.NUM_HEADS + head, g * PIECE]
                pivot, delta = memory.pivot.index(slot), memory.delta.index(slot)
                tma.async_copy_global_to_shared(pivot_desc, numbers, ready, pivot)
                tma.async_copy_global_to_shared(delta_desc, numbers, ready, delta)
                if MASKED:
                    columns = [windows[s] % num_masks, g * PIECE, 0]
                    one_hot = memory.one_hot.index(slot)
                    tma.async_copy_global_to_shared(one_hot_desc, columns, ready, one_hot)
    return advance_steps(steps, has_window)


@gluon.jit
def _load_role(
    k_desc, v_desc, row_one_hot_desc, q_desc, dout_desc, one_hot_desc, pivot_desc, delta_desc,
    memory, windows, head, first_row, config,
):  # fmt: skip
    """One warp: load K and V, then Q, dO, pivot and delta in pieces, class by class."""
    steps = zero_steps(head, config)
    for i in gl.static_range(config.MASK_CLASSES):
        base = -32
        bits = 0
        has_more = windows.count > 0
        while has_more:
            indices = ()
            has_window = ()
            for _ in gl.static_range(config.STREAMS):
                base, bits, window, has_more = windows.next(base, bits, i, config.MASK)
                indices = indices + (window,)  # type: ignore[assignment] # noqa: RUF005
                has_window = has_window + (has_more,)  # type: ignore[assignment] # noqa: RUF005
            steps = _load_round(
                k_desc, v_desc, row_one_hot_desc, q_desc, dout_desc, one_hot_desc, pivot_desc,
                delta_desc, memory, indices, has_window, steps, windows.num_masks, head, first_row,
                i == ONE_HOT, i, config,
            )  # fmt: skip
        steps = signal_end(memory.k_barriers, memory.windows, steps)
    gdc_wait()  # see ``launch``
    gdc_launch_dependents()


# --- the computing warps --------------------------------------------------------------------------


@gluon.jit
def _start_tile(
    memory, slot, k, v, row_one_hot, first, T: gl.constexpr, INDEX: gl.constexpr,
    MASKED: gl.constexpr, config,
):  # fmt: skip
    """Start the scores and the weight gradients of a tile."""
    AT: gl.constexpr = INDEX * T
    DTYPE: gl.constexpr = score_type(k.dtype)
    S_LAYOUT: gl.constexpr = product_layout(T, config.WARPS)
    q = rows_of(memory.q.index(slot), AT, T)
    s = start_scores(memory.bias, first + AT, k, q, DTYPE, config)
    if MASKED:
        one_hot = rows_of(memory.one_hot.index(slot), AT, T)
        s = warpgroup_mma(row_one_hot, one_hot.permute((1, 0)), s, is_async=True)
    dout = rows_of(memory.dout.index(slot), AT, T)
    deltas = load_values(memory.delta.index(slot), AT, T, 0, DTYPE, S_LAYOUT)
    dp = start_weight_gradient(v, dout, deltas, DTYPE, S_LAYOUT)
    return s, dp


@gluon.jit
def _piece_gradients(
    memory, slot, k, v, row_one_hot, regions, row, first, mask_value, scale, dk, dv,
    COLUMNS: gl.constexpr, MASK_CLASS: gl.constexpr, config,
):  # fmt: skip
    """Add the queries of a piece to the gradients, a tile at a time."""
    MASKED: gl.constexpr = MASK_CLASS == ONE_HOT
    T: gl.constexpr = min(ONLINE_TILE if MASK_CLASS == COMPARED else config.TILE, COLUMNS)
    TILES: gl.constexpr = COLUMNS // T
    AHEAD: gl.constexpr = tiles_ahead(k.dtype)
    PRODUCTS: gl.constexpr = 3 if MASKED else 2
    DTYPE: gl.constexpr = score_type(k.dtype)
    S_LAYOUT: gl.constexpr = product_layout(T, config.WARPS)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, product_layout(config.WIDTH, config.WARPS), 2)
    started = ()
    for t in gl.static_range(min(AHEAD, TILES)):
        tile = _start_tile(memory, slot, k, v, row_one_hot, first, T, t, MASKED, config)
        started = started + tile
    used = ()
    for t in gl.static_range(TILES):
        s, dp = warpgroup_mma_wait(
            products_in_flight(t, TILES, AHEAD, PRODUCTS, 2),
            deps=(started[2 * t], started[2 * t + 1]),
        )
        if MASK_CLASS == COMPARED:
            s = apply_region_mask(s, regions, row, first + t * T, mask_value, config.NUM_TOKENS)
        pivots = load_pivots(memory.pivot.index(slot), t * T, T, 0, DTYPE, S_LAYOUT)
        p = compute_weights(s, scale, pivots)
        p_v = gl.convert_layout(p.to(k.dtype), P_LAYOUT, assert_trivial=True)
        dv = warpgroup_mma(p_v, rows_of(memory.dout.index(slot), t * T, T), dv, is_async=True)
        deltas = load_values(memory.delta.index(slot), t * T, T, 0, DTYPE, S_LAYOUT)
        ds = score_gradient(p, dp, deltas)
        ds_k = gl.convert_layout(ds.to(k.dtype), P_LAYOUT, assert_trivial=True)
        dk = warpgroup_mma(ds_k, rows_of(memory.q.index(slot), t * T, T), dk, is_async=True)
        used = used + (p_v, ds_k)  # type: ignore[assignment] # noqa: RUF005
        if t + AHEAD < TILES:
            tile = _start_tile(memory, slot, k, v, row_one_hot, first, T, t + AHEAD, MASKED, config)
            started = started + tile
    done = warpgroup_mma_wait(0, deps=(dk, dv) + used)  # noqa: RUF005
    return done[0], done[1]


@gluon.jit
def _window_gradients(
    memory, STREAM: gl.constexpr, step, use, regions, row, mask_value, scale,
    MASK_CLASS: gl.constexpr, config,
):  # fmt: skip
    """The keys' gradient (not scaled) and the values' gradient of a window."""
    O_LAYOUT: gl.constexpr = product_layout(config.WIDTH, config.WARPS)
    dk = gl.zeros([config.ROWS, config.WIDTH], gl.float32, O_LAYOUT)
    dv = gl.zeros([config.ROWS, config.WIDTH], gl.float32, O_LAYOUT)
    k_slot = memory.k_barriers.slot(STREAM, step)
    k = rows_of(memory.k.index(k_slot), 0, config.ROWS)
    v = rows_of(memory.v.index(k_slot), 0, config.ROWS)
    row_one_hot = k
    if MASK_CLASS == ONE_HOT:
        row_one_hot = rows_of(memory.row_one_hot.index(k_slot), 0, config.ROWS)
    for g in range(config.FULL_PIECES):
        memory.q_barriers.wait_full(STREAM, use)
        dk, dv = _piece_gradients(
            memory, memory.q_barriers.slot(STREAM, use), k, v, row_one_hot, regions, row, g * PIECE,
            mask_value, scale, dk, dv, PIECE, MASK_CLASS, config,
        )  # fmt: skip
        memory.q_barriers.release(STREAM, use)
        use += 1
    if config.LAST_PIECE > 0:
        memory.q_barriers.wait_full(STREAM, use)
        dk, dv = _piece_gradients(
            memory, memory.q_barriers.slot(STREAM, use), k, v, row_one_hot, regions, row,
            config.FULL_PIECES * PIECE, mask_value, scale, dk, dv, config.LAST_PIECE, MASK_CLASS,
            config,
        )  # fmt: skip
        memory.q_barriers.release(STREAM, use)
        use += 1
    memory.k_barriers.release(STREAM, step)
    return use, dk, dv


@gluon.jit
def _compute_role(
    dk, dv, bias, regions, memory, head, first_row, num_masks, scale, mask_value, dk_scale, config,
    stream,
):  # fmt: skip
    """One stream: build its part of the bias tile, then compute its windows."""
    STREAM: gl.constexpr = stream.INDEX
    ROW: gl.constexpr = gl.SliceLayout(1, product_layout(config.WIDTH, config.WARPS))
    build_bias_tile(memory.bias, bias, head, first_row, 0, STREAM, True, config)
    barrier()
    mbarrier.arrive(memory.bias_made)
    mbarrier.wait(memory.bias_made, 0)
    row = first_row + gl.arange(0, config.ROWS, ROW)
    step = 0
    use = 0
    for i in gl.static_range(config.MASK_CLASSES):
        window = wait_for_window(memory.k_barriers, memory.windows, STREAM, step, config)
        while window >= 0:
            other_regions = regions
            if config.MASK:
                other_regions += window % num_masks * config.NUM_TOKENS
            use, dk_tile, dv_tile = _window_gradients(
                memory, STREAM, step, use, other_regions, row, mask_value, scale, i, config
            )
            store_rows(dk, dk_tile * dk_scale, window, head, first_row, config)
            store_rows(dv, dv_tile, window, head, first_row, config)
            step += 1
            window = wait_for_window(memory.k_barriers, memory.windows, STREAM, step, config)
        memory.k_barriers.release(STREAM, step)
        step += 1


# --- the kernel -----------------------------------------------------------------------------------


@gluon.jit
def column_gradients(
    dk,  # [num_windows, NUM_TOKENS, NUM_HEADS, HEAD_SIZE], like dv
    dv,
    k_desc,  # [num_windows, NUM_HEADS, NUM_TOKENS, HEAD_SIZE] in boxes of [1, 1, ROWS, WIDTH]
    v_desc,
    row_one_hot_desc,  # float16 [num_masks, NUM_TOKENS, 2 * ONE_HOT_COLUMNS], ROWS tokens a box
    q_desc,  # in boxes of PIECE tokens, like dout_desc
    dout_desc,
    one_hot_desc,  # in boxes of [1, PIECE, ONE_HOT_COLUMNS]
    pivot_desc,  # as ``make_deltas`` leaves it, in boxes of [1, PIECE]
    delta_desc,
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
    dk_scale,  # softmax_scale
    NUM_HEADS: gl.constexpr,
    NUM_TOKENS: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    BIAS: gl.constexpr,
    MASK: gl.constexpr,
    FULL_PIECES: gl.constexpr,
    LAST_PIECE: gl.constexpr,
    STREAMS: gl.constexpr,
    WARPS: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    LOADING: gl.constexpr,
    TILE: gl.constexpr,
):
    """See the module docstring. Grid: tiles of keys × heads × chunks, tiles innermost."""
    ROWS: gl.constexpr = 16 * WARPS
    config = StreamConfig(
        NUM_HEADS, NUM_TOKENS, HEAD_SIZE, WIDTH, BIAS, MASK, FULL_PIECES, LAST_PIECE, PIECE, TILE,
        STREAMS, WARPS, ROWS, 3 if MASK else 1,
    )  # fmt: skip
    CHUNKS: gl.constexpr = (FULL_PIECES * PIECE + LAST_PIECE) // CHUNK
    K_SLOTS: gl.constexpr = STREAMS * Q_STAGES
    SLOTS: gl.constexpr = STREAMS * STAGES
    dtype: gl.constexpr = q_desc.dtype
    memory = Memory(
        gl.allocate_shared_memory(gl.float16, [CHUNKS, ROWS * CHUNK], FLAT),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(dtype, [K_SLOTS, 1, 1, ROWS, WIDTH], k_desc.layout),
        gl.allocate_shared_memory(dtype, [K_SLOTS, 1, 1, ROWS, WIDTH], v_desc.layout),
        gl.allocate_shared_memory(
            gl.float16, [K_SLOTS if MASK else 1, 1, ROWS, ONE_HOT_COLUMNS], row_one_hot_desc.layout
        ),
        make_barriers(STREAMS, Q_STAGES, 1, 1),
        gl.allocate_shared_memory(gl.int32, [K_SLOTS, 1], FLAT),
        gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, PIECE, WIDTH], q_desc.layout),
        gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, PIECE, WIDTH], dout_desc.layout),
        gl.allocate_shared_memory(
            gl.float16, [SLOTS if MASK else 1, 1, PIECE, ONE_HOT_COLUMNS], one_hot_desc.layout
        ),
        gl.allocate_shared_memory(gl.float32, [SLOTS, 1, PIECE], pivot_desc.layout),
        gl.allocate_shared_memory(gl.float32, [SLOTS, 1, PIECE], delta_desc.layout),
        make_barriers(STREAMS, STAGES, 1, 1),
    )  # fmt: skip
    mbarrier.init(memory.bias_made, STREAMS)
    fence_async_shared()
    windows, head, first_row = locate_work(mask_classes, num_masks, num_windows, num_chunks, config)
    added = Bias(bias, offsets, centre, entry_stride, head_stride, inverse)
    work = (
        dk, dv, added, regions, memory, head, first_row, num_masks, scale, mask_value, dk_scale,
        config,
    )  # fmt: skip
    load = (
        k_desc, v_desc, row_one_hot_desc, q_desc, dout_desc, one_hot_desc, pivot_desc, delta_desc,
        memory, windows, head, first_row, config,
    )  # fmt: skip
    specialise(_compute_role, work, STREAMS, WARPS, REGISTERS, [(_load_role, load)], 1, LOADING)

"""Window attention forward on Hopper: a persistent kernel that keeps its bias in shared memory.

::

    s = q kᵀ + (B + M) / scale        p = 2 ** (scale · log2 e · s - pivot)
    out = p v / Σ p                   lse = pivot / log2 e + log Σ p

A program owns one head and a tile of query tokens. The bias of that tile is the same in every
window; it is stored in the accumulator's layout and is the initial value of the scores. One warp
loads queries, keys and values by TMA; the other warps form streams, each of which takes the next
window and visits its keys a piece at a time::

    loading warp   q k v | k v | k v | ...
    stream 0       window 0: b ─▶ s ─▶ p ─▶ o, Σ p     window 3 ...
    stream 1       window 1: ...                       all read the same bias
    stream 2       window 2: ...

**The mask is a matrix product.** A shifted window has at most eight regions. With one-hot columns
for them, ``r rᵀ`` is 1 where two tokens share a region; with one more column,
``-mask_value · (r rᵀ - 1)`` is 0 there and the mask elsewhere (``encode_regions``). Windows of one
region come first and skip this product (``tiles``).

**The pivot is a guess** instead of the row's maximum (``softmax``). A stream collects a bit for
each window whose guess failed and passes the bits to the loading warp, which loads those windows
again for the online softmax; windows with too many regions for one-hot columns follow.

Sums of weights are products with ones, so that they see the same rounding of weights as the
output. Tokens past the end are zeros with a bias of -inf.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from ....tiles.hopper.layouts import product_layout
from ....tiles.hopper.names import barrier
from ....tiles.hopper.record import record
from ....tiles.hopper.ring import PipelineBarriers, make_barriers
from ....tiles.hopper.roles import specialise
from ....tiles.triton.online_softmax import LN_2
from .softmax import attend_guessed_pivot, attend_online, is_in_range, score_type
from .tiles import (
    CHUNK,
    COMPARED,
    FLAT,
    ONE_HOT,
    ONE_HOT_COLUMNS,
    PIECE,
    Bias,
    StreamConfig,
    advance_steps,
    build_bias_tile,
    locate_work,
    signal_end,
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
    ones: gl.shared_memory_descriptor  # [8, PIECE]
    q: gl.shared_memory_descriptor  # [slots, 1, 1, ROWS, WIDTH]
    row_one_hot: gl.shared_memory_descriptor  # [slots, 1, ROWS, ONE_HOT_COLUMNS]
    q_barriers: PipelineBarriers
    windows: gl.shared_memory_descriptor  # int32 [slots, 1]: the index of their window, or -1
    k: gl.shared_memory_descriptor  # [slots, 1, 1, KEYS, WIDTH]
    v: gl.shared_memory_descriptor
    one_hot: gl.shared_memory_descriptor  # [slots, 1, KEYS, ONE_HOT_COLUMNS]
    kv_barriers: PipelineBarriers
    retry: gl.shared_memory_descriptor  # int32 [STREAMS, ROWS]: a bit for each failed step
    retry_ready: gl.shared_memory_descriptor  # a barrier


# --- the loading warp -----------------------------------------------------------------------------


@gluon.jit
def _load_round(
    q_desc, k_desc, v_desc, row_one_hot_desc, one_hot_desc, memory, windows, has_window, steps,
    num_masks, head, first_row, MASKED: gl.constexpr, ENDS: gl.constexpr, config,
):  # fmt: skip
    """Load a window for every stream with ``has_window``; return the streams' next steps."""
    WIDTH: gl.constexpr = config.WIDTH
    PIECES: gl.constexpr = config.FULL_PIECES + (config.LAST_PIECE > 0)
    NUMBERS: gl.constexpr = WIDTH + (ONE_HOT_COLUMNS if MASKED else 0)
    for s in gl.static_range(config.STREAMS):
        if has_window[s]:
            q_slot = memory.q_barriers.slot(s, steps[s])
            memory.q_barriers.wait_empty(s, steps[s])
            store_window_index(memory.windows, q_slot, windows[s])
            q_ready = memory.q_barriers.expect(s, steps[s], config.ROWS * NUMBERS * 2)
            q = [windows[s], head, first_row, 0]
            tma.async_copy_global_to_shared(q_desc, q, q_ready, memory.q.index(q_slot))
            if MASKED:
                rows = [windows[s] % num_masks, first_row, ONE_HOT_COLUMNS]
                row_one_hot = memory.row_one_hot.index(q_slot)
                tma.async_copy_global_to_shared(row_one_hot_desc, rows, q_ready, row_one_hot)
    for g in range(PIECES):
        for s in gl.static_range(config.STREAMS):
            if has_window[s]:
                use = (steps[s] - ENDS) * PIECES + g
                slot = memory.kv_barriers.slot(s, use)
                memory.kv_barriers.wait_empty(s, use)
                ready = memory.kv_barriers.expect(s, use, config.PIECE * (NUMBERS + WIDTH) * 2)
                keys = [windows[s], head, g * config.PIECE, 0]
                tma.async_copy_global_to_shared(k_desc, keys, ready, memory.k.index(slot))
                tma.async_copy_global_to_shared(v_desc, keys, ready, memory.v.index(slot))
                if MASKED:
                    columns = [windows[s] % num_masks, g * config.PIECE, 0]
                    one_hot = memory.one_hot.index(slot)
                    tma.async_copy_global_to_shared(one_hot_desc, columns, ready, one_hot)
    return advance_steps(steps, has_window)


@gluon.jit
def _load_mask_class(
    q_desc, k_desc, v_desc, row_one_hot_desc, one_hot_desc, memory, windows, head, first_row,
    retry_ready, steps, first_steps, MASK_CLASS: gl.constexpr, ENDS: gl.constexpr,
    RETRY: gl.constexpr, config,
):  # fmt: skip
    """Load the windows of a mask class, or with ``RETRY`` those whose bit is set.

    ``first_steps`` are the steps in which each stream first loaded these windows, which number the
    bits. ``ENDS`` earlier steps of a stream had no window: they marked the end of a class.
    """
    base = -32
    bits = 0
    has_more = windows.count > 0
    while has_more:
        indices = ()
        has_window = ()
        following = ()
        for s in gl.static_range(config.STREAMS):
            base, bits, window, is_there = windows.next(base, bits, MASK_CLASS, config.MASK)
            is_loaded = is_there
            if RETRY:
                is_loaded = is_there & (retry_ready[s] & retry_bit(first_steps[s]) != 0)
            indices = indices + (window,)  # type: ignore[assignment] # noqa: RUF005
            has_window = has_window + (is_loaded,)  # type: ignore[assignment] # noqa: RUF005
            following = following + (first_steps[s] + is_there.to(gl.int32),)  # type: ignore[assignment] # noqa: RUF005
            has_more = is_there
        steps = _load_round(
            q_desc, k_desc, v_desc, row_one_hot_desc, one_hot_desc, memory, indices, has_window,
            steps, windows.num_masks, head, first_row, MASK_CLASS == ONE_HOT and not RETRY, ENDS,
            config,
        )  # fmt: skip
        first_steps = following
    return steps, first_steps


@gluon.jit
def _load_role(
    q_desc, k_desc, v_desc, row_one_hot_desc, one_hot_desc, memory, windows, head, first_row,
    config,
):  # fmt: skip
    """One warp: load queries, keys and values of every stream's windows, class by class."""
    GUESSED_CLASSES: gl.constexpr = min(config.MASK_CLASSES, 2)
    none = zero_steps(head, config)
    if config.MASK:
        gdc_wait()  # for ``encode_regions``; see ``launch``
    steps = none
    for i in gl.static_range(GUESSED_CLASSES):
        steps, first_steps = _load_mask_class(
            q_desc, k_desc, v_desc, row_one_hot_desc, one_hot_desc, memory, windows, head,
            first_row, none, steps, steps, i, i, False, config,
        )  # fmt: skip
        steps = signal_end(memory.q_barriers, memory.windows, steps)
    mbarrier.wait(memory.retry_ready, 0)
    retry_ready = ()
    any_retry = 0
    num_left = windows.count
    for s in gl.static_range(config.STREAMS):
        word = _load_retry_bits(memory, s)
        retry_ready = retry_ready + (word,)  # type: ignore[assignment] # noqa: RUF005
        any_retry = any_retry | word
        num_left -= steps[s] - GUESSED_CLASSES
    if any_retry != 0:
        first_steps = none
        for i in gl.static_range(GUESSED_CLASSES):
            steps, first_steps = _load_mask_class(
                q_desc, k_desc, v_desc, row_one_hot_desc, one_hot_desc, memory, windows, head,
                first_row, retry_ready, steps, first_steps, i, GUESSED_CLASSES, True, config,
            )  # fmt: skip
            following = ()
            for s in gl.static_range(config.STREAMS):
                following = following + (first_steps[s] + 1,)  # type: ignore[assignment] # noqa: RUF005
            first_steps = following
    if num_left > 0:
        steps, first_steps = _load_mask_class(
            q_desc, k_desc, v_desc, row_one_hot_desc, one_hot_desc, memory, windows, head,
            first_row, none, steps, steps, COMPARED, GUESSED_CLASSES, False, config,
        )  # fmt: skip
    signal_end(memory.q_barriers, memory.windows, steps)


@gluon.jit
def retry_bit(step):
    """The bit of a step in its stream's word; steps 32 apart share a bit."""
    return 1 << step % 32


@gluon.jit
def _or(a, b):
    return a | b


@gluon.jit
def _load_retry_bits(memory, STREAM: gl.constexpr):
    """The bits of a stream's failed steps, combined over all rows."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    PARTS: gl.constexpr = memory.retry.shape[1] // 32
    rows = memory.retry.index(STREAM)._reinterpret(gl.int32, [PARTS, 32], FLAT)
    word = rows.index(0).load(LAYOUT)
    for i in gl.static_range(1, PARTS):
        word = word | rows.index(i).load(LAYOUT)
    return gl.reduce(word, 0, _or)


# --- the computing warps --------------------------------------------------------------------------


@gluon.jit
def _log2(x):
    """Base-2 logarithm, to 22 bits."""
    return gl.inline_asm_elementwise(
        "lg2.approx.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _finish(out, lse, acc, total, base, window, head, row, first_row, config):
    """Divide by the sums, and write the rows of ``out`` and ``lse``."""
    is_empty = total == 0.0
    value = gl.where(is_empty, float("-inf"), (base + _log2(total)) * LN_2)
    at = (window.to(gl.int64) * config.NUM_HEADS + head) * config.NUM_TOKENS + row
    gl.store(lse + at, value, row < config.NUM_TOKENS)
    inverse = gl.where(is_empty, 0.0, 1.0 / total)
    store_rows(out, acc * inverse[:, None], window, head, first_row, config)


@gluon.jit
def _compute_role(
    out, lse, bias, regions, memory, head, first_row, num_masks, scale, mask_value, config, stream,
):  # fmt: skip
    """One stream: build its part of the bias tile; compute its windows, then the failed ones."""
    STREAM: gl.constexpr = stream.INDEX
    GUESSED_CLASSES: gl.constexpr = min(config.MASK_CLASSES, 2)
    PIECES: gl.constexpr = config.FULL_PIECES + (config.LAST_PIECE > 0)
    ROW: gl.constexpr = gl.SliceLayout(1, product_layout(config.WIDTH, config.WARPS))
    dtype: gl.constexpr = memory.q.dtype
    build_bias_tile(memory.bias, bias, head, first_row, 0, STREAM, False, config)
    barrier()
    mbarrier.arrive(memory.bias_made)
    mbarrier.wait(memory.bias_made, 0)
    row = first_row + gl.arange(0, config.ROWS, ROW)
    factor = scale.to(score_type(dtype)).to(gl.float32)  # rounded as scores are
    step = 0
    retry = gl.zeros([config.ROWS], gl.int32, ROW)
    for i in gl.static_range(GUESSED_CLASSES):
        window = wait_for_window(memory.q_barriers, memory.windows, STREAM, step, config)
        while window >= 0:
            pivot, total, acc = attend_guessed_pivot(
                memory, STREAM, step, (step - i) * PIECES, factor, i == 1, config
            )
            total = gl.convert_layout(total, ROW, assert_trivial=True)
            retry = retry | gl.where(is_in_range(total, dtype), 0, retry_bit(step))
            base = pivot * (scale / factor)
            _finish(out, lse, acc, total, base, window, head, row, first_row, config)
            step += 1
            window = wait_for_window(memory.q_barriers, memory.windows, STREAM, step, config)
        memory.q_barriers.release(STREAM, step)
        step += 1
    memory.retry.index(STREAM).store(retry)
    barrier()
    mbarrier.arrive(memory.retry_ready)
    window = wait_for_window(memory.q_barriers, memory.windows, STREAM, step, config)
    while window >= 0:
        other_regions = regions
        if config.MASK:
            other_regions += window % num_masks * config.NUM_TOKENS
        use = (step - GUESSED_CLASSES) * PIECES
        m, total, acc = attend_online(
            memory, STREAM, step, use, other_regions, row, mask_value, scale, config
        )
        total = gl.convert_layout(total, ROW, assert_trivial=True)
        _finish(out, lse, acc, total, m, window, head, row, first_row, config)
        step += 1
        window = wait_for_window(memory.q_barriers, memory.windows, STREAM, step, config)


# --- the kernel -----------------------------------------------------------------------------------


@gluon.jit
def attend(
    out,  # [num_windows, NUM_TOKENS, NUM_HEADS, HEAD_SIZE]
    lse,  # float32 [num_windows, NUM_HEADS, NUM_TOKENS]
    q_desc,  # [num_windows, NUM_HEADS, NUM_TOKENS, HEAD_SIZE] in boxes of [1, 1, ROWS, WIDTH]
    k_desc,  # in boxes of KEYS tokens, like v_desc
    v_desc,
    row_one_hot_desc,  # float16 [num_masks, NUM_TOKENS, 2 * ONE_HOT_COLUMNS], ROWS tokens a box
    one_hot_desc,  # in boxes of [1, KEYS, ONE_HOT_COLUMNS]
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
    scale,  # softmax_scale · log2(e)
    inverse,  # 1 / softmax_scale
    mask_value,  # divided by softmax_scale
    NUM_HEADS: gl.constexpr,
    NUM_TOKENS: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    BIAS: gl.constexpr,
    MASK: gl.constexpr,
    KEYS: gl.constexpr,
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
    """See the module docstring. Grid: tiles of tokens × heads × chunks, tiles innermost."""
    ROWS: gl.constexpr = 16 * WARPS
    config = StreamConfig(
        NUM_HEADS, NUM_TOKENS, HEAD_SIZE, WIDTH, BIAS, MASK, FULL_PIECES, LAST_PIECE, KEYS, TILE,
        STREAMS, WARPS, ROWS, 3 if MASK else 1,
    )  # fmt: skip
    CHUNKS: gl.constexpr = (FULL_PIECES * KEYS + LAST_PIECE) // CHUNK
    Q_SLOTS: gl.constexpr = STREAMS * Q_STAGES
    SLOTS: gl.constexpr = STREAMS * STAGES
    dtype: gl.constexpr = q_desc.dtype
    ONES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ones = gl.full([8, PIECE], 1.0, dtype, gl.BlockedLayout([1, 8], [8, 4], [1, WARPS], [1, 0]))
    memory = Memory(
        gl.allocate_shared_memory(gl.float16, [CHUNKS, ROWS * CHUNK], FLAT),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(dtype, [8, PIECE], ONES, ones),
        gl.allocate_shared_memory(dtype, [Q_SLOTS, 1, 1, ROWS, WIDTH], q_desc.layout),
        gl.allocate_shared_memory(
            gl.float16, [Q_SLOTS if MASK else 1, 1, ROWS, ONE_HOT_COLUMNS], row_one_hot_desc.layout
        ),
        make_barriers(STREAMS, Q_STAGES, 1, 1),
        gl.allocate_shared_memory(gl.int32, [Q_SLOTS, 1], FLAT),
        gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, KEYS, WIDTH], k_desc.layout),
        gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, KEYS, WIDTH], v_desc.layout),
        gl.allocate_shared_memory(
            gl.float16, [SLOTS if MASK else 1, 1, KEYS, ONE_HOT_COLUMNS], one_hot_desc.layout
        ),
        make_barriers(STREAMS, STAGES, 1, 1),
        gl.allocate_shared_memory(gl.int32, [STREAMS, ROWS], FLAT),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
    )  # fmt: skip
    mbarrier.init(memory.bias_made, STREAMS)
    mbarrier.init(memory.retry_ready, STREAMS)
    fence_async_shared()
    windows, head, first_row = locate_work(mask_classes, num_masks, num_windows, num_chunks, config)
    added = Bias(bias, offsets, centre, entry_stride, head_stride, inverse)
    work = (
        out, lse, added, regions, memory, head, first_row, num_masks, scale, mask_value, config,
    )  # fmt: skip
    load = (
        q_desc, k_desc, v_desc, row_one_hot_desc, one_hot_desc, memory, windows, head, first_row,
        config,
    )  # fmt: skip
    specialise(_compute_role, work, STREAMS, WARPS, REGISTERS, [(_load_role, load)], 1, LOADING)

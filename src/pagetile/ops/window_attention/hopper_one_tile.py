"""Window attention on Hopper where a window is one tile, up to 64 tokens; and its gradients.

::

    S = q kᵀ + B / scale + M      P = 2 ** (scale · log2 e · S - pivot)      dP = dO vᵀ
    dS = P ∘ (dP - δ)     δ = (Σ P ∘ dP) / Σ P - dlse
    dQ = scale · dS k     dK = scale · dSᵀ q     dV = Pᵀ dO     dB = Σ over windows of dS

A program is four warps, of which several programs share a multiprocessor: while one waits, the
others have something to do. It owns one head and takes every ``num_chunks``-th window. All of a
window fits beside its neighbours, so the copy engine brings the next ones while one is computed::

    slot 0    window c               window c + 3 n     ...        n chunks, this one's number is c
    slot 1           window c + n               window c + 4 n
    slot 2                  window c + 2 n

Its tile of bias stays in shared memory, as threads hold scores, and the bias's gradient in
registers. Which keys a query shares a region with is 64 bits (``hopper_marks``), fetched a window
ahead.
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
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_wait

from ...tiles.hopper.layouts import product_layout
from ...tiles.hopper.names import barrier
from ...tiles.triton.online_softmax import LN_2, LOG2_E
from . import hopper_plan
from .hopper_tiles import (
    CHUNK,
    FLAT,
    NO_BIAS,
    PIECE,
    Bias,
    make_bias,
    rows_of,
    start_scores,
    store_sums,
)

__all__ = ["attend_windows", "window_gradients"]

ROWS = PIECE
WORDS = gl.constexpr(hopper_plan.WORDS)
SCORES = gl.constexpr(product_layout(hopper_plan.PIECE))
ROW = gl.constexpr(gl.SliceLayout(1, SCORES))
SQUARE = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))


@aggregate
class Form:
    """What a kernel is compiled for."""

    NUM_HEADS: gl.constexpr
    NUM_TOKENS: gl.constexpr
    WIDTH: gl.constexpr
    BIAS: gl.constexpr
    STAGES: gl.constexpr
    WARPS: gl.constexpr
    STREAMS: gl.constexpr
    ROWS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, NUM_HEADS, NUM_TOKENS, WIDTH, BIAS, STAGES):
        self.NUM_HEADS = gl.constexpr(NUM_HEADS)
        self.NUM_TOKENS = gl.constexpr(NUM_TOKENS)
        self.WIDTH = gl.constexpr(WIDTH)
        self.BIAS = gl.constexpr(BIAS)
        self.STAGES = gl.constexpr(STAGES)
        self.WARPS = gl.constexpr(4)
        self.STREAMS = gl.constexpr(1)
        self.ROWS = ROWS


@gluon.jit
def _load_windows(descs, tiles, ready, slot, window, num_windows, head, form):
    """Start the copies of a window's tokens, if there is such a window."""
    BYTES: gl.constexpr = len(descs) * ROWS * form.WIDTH * 2
    is_there = window < num_windows
    mbarrier.expect(ready.index(slot), BYTES, pred=is_there)
    for i in gl.static_range(len(descs)):
        tma.async_copy_global_to_shared(
            descs[i], [window, head, 0, 0], ready.index(slot), tiles[i].index(slot), pred=is_there
        )


@gluon.jit
def _make_ready(form):
    """A barrier for each slot."""
    ready = gl.allocate_shared_memory(gl.int64, [form.STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(form.STAGES):
        mbarrier.init(ready.index(i), 1)
    fence_async_shared()
    barrier()
    return ready


@gluon.jit
def _make_bias(numbers, offsets, head, centre, entry_stride, head_stride, inverse, form):
    """The tile of bias over the scale, as threads hold scores, and -inf where no key is."""
    memory = gl.allocate_shared_memory(gl.float16, [ROWS // CHUNK, ROWS * CHUNK], FLAT)
    bias = Bias(numbers, offsets, centre, entry_stride, head_stride, inverse)
    make_bias(memory, bias, head, 0, 0, 0, False, form)
    barrier()
    return memory


@gluon.jit
def _load_words(words, window, num_windows, num_masks, row, MASK: gl.constexpr):
    """Whether a window is of several regions; for each query two words, which keys are of its."""
    found = ()
    if MASK:
        at = words + (window % num_masks).to(gl.int64) * WORDS
        found = (gl.load(at + 2 * ROWS, window < num_windows, 0),)  # type: ignore[assignment]
        for half in gl.static_range(2):
            found = found + (gl.load(at + row * 2 + half, window < num_windows, 0),)  # type: ignore[assignment] # noqa: RUF005
    return found


@gluon.jit
def _add_mask(s, words, mask_value):
    """Add ``mask_value`` between regions."""
    if len(words) > 0:  # noqa: SIM102
        if words[0] != 0:
            halves = s.reshape([ROWS, 2, 4, 4, 2]).permute((0, 2, 3, 4, 1)).split()
            low = _mask_half(halves[0], words[1], mask_value)
            high = _mask_half(halves[1], words[2], mask_value)
            s = gl.join(low, high).permute((0, 4, 1, 2, 3)).reshape([ROWS, ROWS])
            s = gl.convert_layout(s, SCORES, assert_trivial=True)
    return s


@gluon.jit
def _mask_half(s, word, mask_value):
    """32 keys of a row: of a thread's word, shifted once, each bit's place is a constant."""
    L: gl.constexpr = s.type.layout
    EIGHT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    LANE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L)))
    ONE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    W: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    lane = gl.arange(0, 4, LANE)[None, None, :, None]
    bit = 1 << (
        8 * gl.arange(0, 4, EIGHT)[None, :, None, None] + gl.arange(0, 2, ONE)[None, None, None, :]
    )
    word = gl.convert_layout(word, W, assert_trivial=True)[:, None, None, None] >> (2 * lane)
    return gl.where((word & bit) != 0, s, s + mask_value)


@gluon.jit
def attend_windows(
    lse,  # float32 [num_windows, NUM_HEADS, NUM_TOKENS]
    out_desc,  # like q_desc
    q_desc,  # [num_windows, NUM_HEADS, NUM_TOKENS, HEAD_SIZE] in boxes of [1, 1, 64, WIDTH]
    k_desc,
    v_desc,
    bias,  # [table_size, NUM_HEADS] or [NUM_HEADS, NUM_TOKENS, NUM_TOKENS]
    offsets,  # int32 [NUM_TOKENS]
    words,  # int32 [num_masks, WORDS], see ``match_regions``
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
    STAGES: gl.constexpr,
):
    """Forward. Grid: heads × chunks, heads of a window together."""
    form = Form(NUM_HEADS, NUM_TOKENS, WIDTH, BIAS, STAGES)
    O_LAYOUT: gl.constexpr = product_layout(WIDTH, 4)
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, WIDTH], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, WIDTH], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, WIDTH], v_desc.layout)
    out_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, WIDTH], out_desc.layout)
    descs = (q_desc, k_desc, v_desc)
    tiles = (q_tiles, k_tiles, v_tiles)
    ready = _make_ready(form)
    head = gl.program_id(0) % NUM_HEADS
    chunk = gl.program_id(0) // NUM_HEADS
    for i in gl.static_range(STAGES):
        _load_windows(descs, tiles, ready, i, chunk + i * num_chunks, num_windows, head, form)
    added = _make_bias(bias, offsets, head, centre, entry_stride, head_stride, inverse, form)
    row = gl.arange(0, ROWS, ROW)
    if MASK:
        gdc_wait()  # for the words
    next_words = _load_words(words, chunk, num_windows, num_masks, row, MASK)
    slot = 0
    phase = 0
    parity = 0
    for window in range(chunk, num_windows, num_chunks):
        now = next_words
        next_words = _load_words(words, window + num_chunks, num_windows, num_masks, row, MASK)
        mbarrier.wait(ready.index(slot), phase)
        q = rows_of(q_tiles.index(slot), 0, ROWS)
        k = rows_of(k_tiles.index(slot), 0, ROWS)
        v = rows_of(v_tiles.index(slot), 0, ROWS)
        s = start_scores(added, 0, q, k, gl.float32, form)
        s = _add_mask(warpgroup_mma_wait(0, deps=(s,)), now, mask_value)
        m = gl.max(s, 1)
        m = gl.where(m == float("-inf"), 0.0, m * scale)
        p = gl.exp2(gl.fma(s, scale, -m[:, None]))
        total = gl.sum(p, 1)
        p_v = gl.convert_layout(
            p.to(dtype), gl.DotOperandLayout(0, O_LAYOUT, 2), assert_trivial=True
        )
        acc = gl.zeros([ROWS, WIDTH], gl.float32, O_LAYOUT)
        acc = warpgroup_mma(p_v, v, acc, use_acc=False, is_async=True)
        divisor = gl.where(total != 0, total, 1.0)
        row_lse = gl.where(total != 0, (m + gl.log2(divisor)) * LN_2, float("-inf"))
        share = gl.convert_layout(1 / divisor, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)
        acc = warpgroup_mma_wait(0, deps=(acc, p_v))[0]
        rows_of(out_tiles.index(parity), 0, ROWS).store((acc * share[:, None]).to(dtype))
        fence_async_shared()
        tma.store_wait(0)  # of the window before, so that the next may take its place
        barrier()
        tma.async_copy_shared_to_global(out_desc, [window, head, 0, 0], out_tiles.index(parity))
        _load_windows(
            descs, tiles, ready, slot, window + STAGES * num_chunks, num_windows, head, form
        )
        parity ^= 1
        gl.store(lse + _place_rows(window, head, row, form), row_lse, row < NUM_TOKENS)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    tma.store_wait(0)


@gluon.jit
def window_gradients(
    dbias,  # float32, see ``hopper_sums``
    lse,  # float32 [num_windows, NUM_HEADS, NUM_TOKENS], like dlse
    dlse,
    dq_desc,  # like q_desc
    dk_desc,
    dv_desc,
    q_desc,  # [num_windows, NUM_HEADS, NUM_TOKENS, HEAD_SIZE] in boxes of [1, 1, 64, WIDTH]
    k_desc,
    v_desc,
    dout_desc,
    bias,  # [table_size, NUM_HEADS] or [NUM_HEADS, NUM_TOKENS, NUM_TOKENS]
    offsets,  # int32 [NUM_TOKENS]
    words,  # int32 [num_masks, WORDS], see ``match_regions``
    num_windows,
    num_chunks,
    num_masks,
    centre,
    entry_stride,  # of a table's entries
    head_stride,  # of a table or bias
    scale,  # softmax_scale · log2(e)
    inverse,  # 1 / softmax_scale
    mask_value,  # divided by softmax_scale
    dq_scale,
    dk_scale,
    NUM_HEADS: gl.constexpr,
    NUM_TOKENS: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    BIAS: gl.constexpr,
    MASK: gl.constexpr,
    HAS_DLSE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """All gradients. Grid: heads × chunks, heads of a window together."""
    form = Form(NUM_HEADS, NUM_TOKENS, WIDTH, BIAS, STAGES)
    O_LAYOUT: gl.constexpr = product_layout(WIDTH, 4)
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, WIDTH], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, WIDTH], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, WIDTH], v_desc.layout)
    dout_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, WIDTH], dout_desc.layout)
    squares = gl.allocate_shared_memory(dtype, [2, ROWS, ROWS], SQUARE)
    if 3 * WIDTH <= 2 * ROWS:  # results lie where weights and their changes were
        FIT: gl.constexpr = 2 * ROWS // WIDTH
        results = squares._reinterpret(dtype, [FIT, 1, 1, ROWS, WIDTH], dq_desc.layout)
    else:
        results = gl.allocate_shared_memory(dtype, [3, 1, 1, ROWS, WIDTH], dq_desc.layout)
    descs = (q_desc, k_desc, v_desc, dout_desc)
    tiles = (q_tiles, k_tiles, v_tiles, dout_tiles)
    ready = _make_ready(form)
    head = gl.program_id(0) % NUM_HEADS
    chunk = gl.program_id(0) // NUM_HEADS
    for i in gl.static_range(STAGES):
        _load_windows(descs, tiles, ready, i, chunk + i * num_chunks, num_windows, head, form)
    added = _make_bias(bias, offsets, head, centre, entry_stride, head_stride, inverse, form)
    row = gl.arange(0, ROWS, ROW)
    if MASK:
        gdc_wait()  # for the words
    next_words = _load_words(words, chunk, num_windows, num_masks, row, MASK)
    next_pivot = _load_row(lse, chunk, num_windows, head, row, form)
    next_change = _load_row(dlse, chunk, num_windows, head, row, form) if HAS_DLSE else 0.0
    sums = gl.zeros([ROWS, ROWS], gl.float32, SCORES)
    slot = 0
    phase = 0
    for window in range(chunk, num_windows, num_chunks):
        now = next_words
        pivot = gl.where(next_pivot == float("-inf"), 0.0, next_pivot * LOG2_E)
        row_change = next_change
        after = window + num_chunks
        next_words = _load_words(words, after, num_windows, num_masks, row, MASK)
        next_pivot = _load_row(lse, after, num_windows, head, row, form)
        if HAS_DLSE:
            next_change = _load_row(dlse, after, num_windows, head, row, form)
        mbarrier.wait(ready.index(slot), phase)
        q = rows_of(q_tiles.index(slot), 0, ROWS)
        k = rows_of(k_tiles.index(slot), 0, ROWS)
        v = rows_of(v_tiles.index(slot), 0, ROWS)
        dout = rows_of(dout_tiles.index(slot), 0, ROWS)
        s = start_scores(added, 0, q, k, gl.float32, form)
        zeros = gl.zeros([ROWS, ROWS], gl.float32, SCORES)
        dp = warpgroup_mma(dout, v.permute((1, 0)), zeros, use_acc=False, is_async=True)
        s, dp = warpgroup_mma_wait(0, deps=(s, dp))
        s = _add_mask(s, now, mask_value)
        p = gl.exp2(gl.fma(s, scale, -pivot[:, None]))
        total = gl.sum(p, 1)
        # All of a row is here: see ``triton_one_tile``.
        delta = gl.sum(p * dp, 1) / gl.where(total > 0, total, 1.0)
        if HAS_DLSE:
            delta -= row_change
        ds = p * (dp - delta[:, None])
        if BIAS != NO_BIAS:
            sums += ds
        tma.store_wait(0)  # of the window before
        barrier()
        ds_k = ds.to(dtype)
        squares.index(0).store(p.to(dtype))
        squares.index(1).store(ds_k)
        fence_async_shared()
        barrier()
        p_t, ds_t = squares.index(0).permute((1, 0)), squares.index(1).permute((1, 0))
        ds_k = gl.convert_layout(ds_k, gl.DotOperandLayout(0, O_LAYOUT, 2), assert_trivial=True)
        nothing = gl.zeros([ROWS, WIDTH], gl.float32, O_LAYOUT)
        dv = warpgroup_mma(p_t, dout, nothing, use_acc=False, is_async=True)
        dq = warpgroup_mma(ds_k, k, nothing, use_acc=False, is_async=True)
        dk = warpgroup_mma(ds_t, q, nothing, use_acc=False, is_async=True)
        dv, dq, dk, ds_k = warpgroup_mma_wait(0, deps=(dv, dq, dk, ds_k))
        barrier()
        _load_windows(
            descs, tiles, ready, slot, window + STAGES * num_chunks, num_windows, head, form
        )
        rows_of(results.index(0), 0, ROWS).store((dq * dq_scale).to(dtype))
        rows_of(results.index(1), 0, ROWS).store((dk * dk_scale).to(dtype))
        rows_of(results.index(2), 0, ROWS).store(dv.to(dtype))
        fence_async_shared()
        barrier()
        here = [window, head, 0, 0]
        tma.async_copy_shared_to_global(dq_desc, here, results.index(0))
        tma.async_copy_shared_to_global(dk_desc, here, results.index(1))
        tma.async_copy_shared_to_global(dv_desc, here, results.index(2))
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    tma.store_wait(0)
    if BIAS != NO_BIAS:
        parts = sums.reshape([ROWS, 2, 32]).permute((0, 2, 1)).split()
        for i in gl.static_range(2):
            quarters = parts[i].reshape([ROWS, 2, 16]).permute((0, 2, 1)).split()
            for j in gl.static_range(2):
                store_sums(dbias, quarters[j], chunk, head, 0, 2 * i + j, form)


@gluon.jit
def _load_row(numbers, window, num_windows, head, row, form):
    """A number for each row of a window; 0 where there is none."""
    is_there = (row < form.NUM_TOKENS) & (window < num_windows)
    return gl.load(numbers + _place_rows(window, head, row, form), is_there, 0.0)


@gluon.jit
def _place_rows(window, head, row, form):
    """Where numbers of a window's rows are."""
    return (window.to(gl.int64) * form.NUM_HEADS + head) * form.NUM_TOKENS + row

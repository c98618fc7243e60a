"""Window attention on Hopper: a tile of bias that stays, and windows that pass by.

::

    s = q kᵀ + (B + M) / scale        p = 2 ** (scale · log2 e · (s - max s))
    out = p v / Σ p                   lse = scale · max s + log Σ p

A program owns one head and a tile of tokens. What it adds to the scores is the same in every window
but for the mask, so that tile lies in shared memory just as threads hold scores, and products start
from it. One warp fetches queries, keys and values by the tensor memory accelerator; the other
warps form streams, which take windows in turn and walk their keys a piece at a time::

    loading warp   q k v | k v | k v | ...
    stream 0       window 0: b ─▶ s ─▶ p ─▶ o, Σ p     window 3 ...
    stream 1       window 1: ...                       all read the same bias
    stream 2       window 2: ...

**The mask is a product too.** A window that a shift put together from several regions has at most
eight. With a column of ones for each region (``marks``), ``r rᵀ`` is 1 where two tokens share
theirs: added with the factor ``-mask_value``, it masks all others, but for a constant that a
softmax does not see, and ``lse`` gets back. The factor is split into two numbers of float16 that
add up to it. In windows of one region the marks are zeros, which the accelerator supplies for
coordinates past the end. Where a window has more than eight regions, they are compared one by one.

Sums of weights are products with ones: what rounding takes from a weight, it takes from both sides
of the division. Tokens past the end are zeros, and their bias is -inf.
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

from ...tiles.hopper.layouts import product_layout
from ...tiles.hopper.names import barrier
from ...tiles.hopper.ring import Turns, make_turns
from .hopper_tiles import (
    CHUNK,
    FLAT,
    MANY,
    MARKS,
    MIXED,
    PIECE,
    Form,
    Stream,
    bias_layout,
    compare,
    make_bias,
    place_of,
    rows_of,
    store_rows,
    which_work,
)

__all__ = ["attend"]

LN_2 = gl.constexpr(0.6931471805599453)
TILE = PIECE


@aggregate
class Memory:
    """What lies in shared memory, and whose turn it is."""

    bias: gl.shared_memory_descriptor  # [columns / CHUNK, ROWS * CHUNK]
    bias_made: gl.shared_memory_descriptor  # a barrier
    ones: gl.shared_memory_descriptor  # [8, TILE]
    q: gl.shared_memory_descriptor  # [slots, 1, 1, ROWS, WIDTH]
    row_marks: gl.shared_memory_descriptor  # [slots, 1, ROWS, MARKS]
    q_turns: Turns
    k: gl.shared_memory_descriptor  # [slots, 1, 1, KEYS, WIDTH]
    v: gl.shared_memory_descriptor
    marks: gl.shared_memory_descriptor  # [slots, 1, KEYS, MARKS]
    turns: Turns

    @gluon.constexpr_function
    def __init__(self, bias, bias_made, ones, q, row_marks, q_turns, k, v, marks, turns):
        self.bias = bias
        self.bias_made = bias_made
        self.ones = ones
        self.q = q
        self.row_marks = row_marks
        self.q_turns = q_turns
        self.k = k
        self.v = v
        self.marks = marks
        self.turns = turns


@gluon.jit
def _load_role(
    q_desc, k_desc, v_desc, row_marks_desc, marks_desc, kinds, memory, head, first_row,
    first_window, last_window, num_masks, form,
):  # fmt: skip
    """One warp: fetch queries, keys and values of every stream's windows."""
    WIDTH: gl.constexpr = form.WIDTH
    PIECES: gl.constexpr = form.GROUPS + (form.REST > 0)
    NUMBERS: gl.constexpr = WIDTH + (MARKS if form.MASK else 0)
    turn = 0
    use = 0
    window = first_window
    while window < last_window:
        places = ()
        for s in gl.static_range(form.STREAMS):
            place = place_of(window + s, kinds, num_masks, form)
            places = places + (place,)  # type: ignore[assignment] # noqa: RUF005
        for s in gl.static_range(form.STREAMS):
            if window + s < last_window:
                q_slot = memory.q_turns.slot(s, turn)
                memory.q_turns.wait_empty(s, turn)
                q_ready = memory.q_turns.expect(s, turn, form.ROWS * NUMBERS * 2)
                q = [window + s, head, first_row, 0]
                tma.async_copy_global_to_shared(q_desc, q, q_ready, memory.q.index(q_slot))
                if form.MASK:
                    rows = [places[s], first_row, MARKS]
                    row_marks = memory.row_marks.index(q_slot)
                    tma.async_copy_global_to_shared(row_marks_desc, rows, q_ready, row_marks)
        for g in range(PIECES):
            for s in gl.static_range(form.STREAMS):
                if window + s < last_window:
                    slot = memory.turns.slot(s, use)
                    memory.turns.wait_empty(s, use)
                    ready = memory.turns.expect(s, use, form.PIECE * (NUMBERS + WIDTH) * 2)
                    keys = [window + s, head, g * form.PIECE, 0]
                    tma.async_copy_global_to_shared(k_desc, keys, ready, memory.k.index(slot))
                    tma.async_copy_global_to_shared(v_desc, keys, ready, memory.v.index(slot))
                    if form.MASK:
                        columns = [places[s], g * form.PIECE, 0]
                        marks = memory.marks.index(slot)
                        tma.async_copy_global_to_shared(marks_desc, columns, ready, marks)
            use += 1
        window += form.STREAMS
        turn += 1


@gluon.jit
def _max(s, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Of every row; first of what one thread holds of it."""
    parts = gl.max(s.reshape([ROWS, s.shape[1] // 8, 8]), 1)
    return gl.max(gl.convert_layout(parts, product_layout(8, WARPS), assert_trivial=True), 1)


@gluon.jit
def _attend_tile(
    memory, slot, q, row_marks, regions, row, first, mask_value, scale, m, pending,
    AT: gl.constexpr, T: gl.constexpr, COMPARE: gl.constexpr, form,
):  # fmt: skip
    """Online softmax over ``T`` keys of a piece, ``AT`` keys into it.

    ``pending`` are products of the tile before that may still be under way: results, sums, and
    the weights that they read.
    """
    ROW: gl.constexpr = m.type.layout
    S_LAYOUT: gl.constexpr = product_layout(T, form.WARPS)
    O_LAYOUT: gl.constexpr = product_layout(form.WIDTH, form.WARPS)
    L_LAYOUT: gl.constexpr = product_layout(8, form.WARPS)
    # scores
    bias = memory.bias.index((first + AT) // CHUNK)
    bias = bias._reinterpret(gl.float16, [form.ROWS, T], bias_layout(T, form.WARPS))
    s = bias.load(S_LAYOUT).to(gl.float32)
    k = rows_of(memory.k.index(slot), AT, T)
    s = warpgroup_mma(q, k.permute((1, 0)), s, is_async=True)
    if form.MASK:
        marks = rows_of(memory.marks.index(slot), AT, T)
        s = warpgroup_mma(row_marks, marks.permute((1, 0)), s, is_async=True)
    made = warpgroup_mma_wait(0, deps=(s,) + pending)  # noqa: RUF005
    s = made[0]
    if COMPARE:
        s = compare(s, regions, row, first + AT, mask_value, form.NUM_TOKENS)
    # softmax
    most = gl.convert_layout(_max(s, form.ROWS, form.WARPS), ROW, assert_trivial=True)
    high = gl.maximum(m, most)
    pivot = gl.where(high == float("-inf"), 0.0, high * scale)
    decay = gl.exp2(m * scale - pivot)
    acc = made[1] * decay[:, None]
    decay = gl.convert_layout(decay, gl.SliceLayout(1, L_LAYOUT), assert_trivial=True)
    l = made[2] * decay[:, None]
    at_row = gl.convert_layout(pivot, gl.SliceLayout(1, S_LAYOUT), assert_trivial=True)
    p = gl.exp2(gl.fma(s, scale, -at_row[:, None])).to(q.dtype)
    # values
    p_v = gl.convert_layout(p, gl.DotOperandLayout(0, O_LAYOUT, 2), assert_trivial=True)
    p_l = gl.convert_layout(p, gl.DotOperandLayout(0, L_LAYOUT, 2), assert_trivial=True)
    ones = memory.ones.slice(0, T, 1).permute((1, 0))
    acc = warpgroup_mma(p_v, rows_of(memory.v.index(slot), AT, T), acc, is_async=True)
    l = warpgroup_mma(p_l, ones, l, is_async=True)
    return high, (acc, l, p_v, p_l)


@gluon.jit
def _attend_piece(
    memory, slot, q, row_marks, regions, row, first, mask_value, scale, m, l, acc,
    KEYS: gl.constexpr, COMPARE: gl.constexpr, form,
):  # fmt: skip
    """Online softmax over the keys of a piece; a tile's values wait for the next one's scores."""
    pending = (acc, l)
    for at in gl.static_range(0, KEYS, form.TILE):
        m, pending = _attend_tile(
            memory, slot, q, row_marks, regions, row, first, mask_value, scale, m, pending,
            at, form.TILE if at + form.TILE <= KEYS else KEYS - at, COMPARE, form,
        )  # fmt: skip
    done = warpgroup_mma_wait(0, deps=pending)
    return m, done[1], done[0]


@gluon.jit
def _attend_window(
    memory, STREAM: gl.constexpr, turn, use, regions, row, mask_value, scale,
    COMPARE: gl.constexpr, form,
):  # fmt: skip
    """All pieces of a window: maxima, sums and unscaled results of the rows."""
    O_LAYOUT: gl.constexpr = product_layout(form.WIDTH, form.WARPS)
    m = gl.full([form.ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, O_LAYOUT))
    l = gl.zeros([form.ROWS, 8], gl.float32, product_layout(8, form.WARPS))
    acc = gl.zeros([form.ROWS, form.WIDTH], gl.float32, O_LAYOUT)
    q_slot = memory.q_turns.slot(STREAM, turn)
    memory.q_turns.wait_full(STREAM, turn)
    q = rows_of(memory.q.index(q_slot), 0, form.ROWS)
    row_marks = q
    if form.MASK:
        row_marks = rows_of(memory.row_marks.index(q_slot), 0, form.ROWS)
    for g in range(form.GROUPS):
        memory.turns.wait_full(STREAM, use)
        m, l, acc = _attend_piece(
            memory, memory.turns.slot(STREAM, use), q, row_marks, regions, row, g * form.PIECE,
            mask_value, scale, m, l, acc, form.PIECE, COMPARE, form,
        )  # fmt: skip
        memory.turns.release(STREAM, use)
        use += 1
    if form.REST > 0:
        memory.turns.wait_full(STREAM, use)
        m, l, acc = _attend_piece(
            memory, memory.turns.slot(STREAM, use), q, row_marks, regions, row,
            form.GROUPS * form.PIECE, mask_value, scale, m, l, acc, form.REST, COMPARE, form,
        )  # fmt: skip
        memory.turns.release(STREAM, use)
        use += 1
    memory.q_turns.release(STREAM, turn)
    return use, m, l, acc


@gluon.jit
def _log2(x):
    """Base-2 logarithm, to 22 bits."""
    return gl.inline_asm_elementwise(
        "lg2.approx.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _finish(out, lse, acc, m, l, scale, shift, window, head, row, first_row, form):
    """Divide, and write the rows of ``out`` and ``lse``."""
    N: gl.constexpr = form.NUM_TOKENS
    total = gl.convert_layout(gl.max(l, 1), m.type.layout, assert_trivial=True)
    nothing = total == 0.0
    value = gl.where(nothing, float("-inf"), ((m + shift) * scale + _log2(total)) * LN_2)
    at = (window.to(gl.int64) * form.NUM_HEADS + head) * N + row
    gl.store(lse + at, value, row < N)
    share = gl.where(nothing, 0.0, 1.0 / total)
    store_rows(out, acc * share[:, None], window, head, first_row, form)


@gluon.jit
def _attend_role(
    out, lse, bias, offsets, kinds, regions, memory, head, first_row, first_window, last_window,
    num_masks, centre, scale, inverse, mask_value, form, stream,
):  # fmt: skip
    """A stream: its share of the bias, then its share of the windows."""
    STREAM: gl.constexpr = stream.INDEX
    ROW: gl.constexpr = gl.SliceLayout(1, product_layout(form.WIDTH, form.WARPS))
    make_bias(memory.bias, bias, offsets, head, first_row, 0, centre, inverse, STREAM, False, form)
    barrier()
    mbarrier.arrive(memory.bias_made)
    mbarrier.wait(memory.bias_made, 0)
    row = first_row + gl.arange(0, form.ROWS, ROW)
    turn = 0
    use = 0
    window = first_window + STREAM
    while window < last_window:
        shift = 0.0
        if form.MASK:
            of_image = window % num_masks
            kind = gl.load(kinds + of_image)
            if kind == MANY:
                use, m, l, acc = _attend_window(
                    memory, STREAM, turn, use, regions + of_image * form.NUM_TOKENS, row,
                    mask_value, scale, True, form,
                )  # fmt: skip
            else:
                use, m, l, acc = _attend_window(
                    memory, STREAM, turn, use, regions, row, mask_value, scale, False, form
                )
            shift = gl.where(kind == MIXED, mask_value, 0.0)
        else:
            use, m, l, acc = _attend_window(
                memory, STREAM, turn, use, regions, row, mask_value, scale, False, form
            )
        _finish(out, lse, acc, m, l, scale, shift, window, head, row, first_row, form)
        window += form.STREAMS
        turn += 1


@gluon.jit
def attend(
    out,  # [num_windows, NUM_TOKENS, NUM_HEADS, HEAD_SIZE]
    lse,  # float32 [num_windows, NUM_HEADS, NUM_TOKENS]
    q_desc,  # [num_windows, NUM_HEADS, NUM_TOKENS, HEAD_SIZE] in boxes of [1, 1, ROWS, WIDTH]
    k_desc,  # in boxes of KEYS tokens, like v_desc
    v_desc,
    row_marks_desc,  # float16 [num_masks, NUM_TOKENS, 2 * MARKS] in boxes of [1, ROWS, MARKS]
    marks_desc,  # in boxes of [1, KEYS, MARKS]
    bias,  # [table_size, NUM_HEADS] or [NUM_HEADS, NUM_TOKENS, NUM_TOKENS]
    offsets,  # int32 [NUM_TOKENS]
    kinds,  # int32 [num_masks]
    regions,  # integers [num_masks, NUM_TOKENS]
    num_windows,
    num_chunks,
    num_masks,
    centre,
    scale,  # softmax_scale · log2(e)
    inverse,  # 1 / softmax_scale
    mask_value,  # divided by softmax_scale
    NUM_HEADS: gl.constexpr,
    NUM_TOKENS: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    BIAS: gl.constexpr,
    MASK: gl.constexpr,
    GROUPS: gl.constexpr,
    REST: gl.constexpr,
    KEYS: gl.constexpr,
    STREAMS: gl.constexpr,
    WARPS: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    LOADING: gl.constexpr,
):
    """The kernel; see above. Grid: tiles of tokens × heads × chunks, tiles of a window together."""
    form = Form(
        NUM_HEADS, NUM_TOKENS, HEAD_SIZE, WIDTH, BIAS, MASK, GROUPS, REST, KEYS, TILE, STREAMS,
        WARPS,
    )  # fmt: skip
    ROWS: gl.constexpr = form.ROWS
    CHUNKS: gl.constexpr = (GROUPS * KEYS + REST) // CHUNK
    Q_SLOTS: gl.constexpr = STREAMS * Q_STAGES
    SLOTS: gl.constexpr = STREAMS * STAGES
    dtype: gl.constexpr = q_desc.dtype
    ONES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ones = gl.full([8, TILE], 1.0, dtype, gl.BlockedLayout([1, 8], [8, 4], [1, WARPS], [1, 0]))
    memory = Memory(
        gl.allocate_shared_memory(gl.float16, [CHUNKS, ROWS * CHUNK], FLAT),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(dtype, [8, TILE], ONES, ones),
        gl.allocate_shared_memory(dtype, [Q_SLOTS, 1, 1, ROWS, WIDTH], q_desc.layout),
        gl.allocate_shared_memory(
            gl.float16, [Q_SLOTS if MASK else 1, 1, ROWS, MARKS], row_marks_desc.layout
        ),
        make_turns(STREAMS, Q_STAGES, 1, 1),
        gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, KEYS, WIDTH], k_desc.layout),
        gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, KEYS, WIDTH], v_desc.layout),
        gl.allocate_shared_memory(
            gl.float16, [SLOTS if MASK else 1, 1, KEYS, MARKS], marks_desc.layout
        ),
        make_turns(STREAMS, STAGES, 1, 1),
    )  # fmt: skip
    mbarrier.init(memory.bias_made, STREAMS)
    fence_async_shared()
    _, head, first_row, first_window, last_window = which_work(num_windows, num_chunks, form)
    work = (
        out, lse, bias, offsets, kinds, regions, memory, head, first_row, first_window,
        last_window, num_masks, centre, scale, inverse, mask_value, form,
    )  # fmt: skip
    load = (
        q_desc, k_desc, v_desc, row_marks_desc, marks_desc, kinds, memory, head, first_row,
        first_window, last_window, num_masks, form,
    )  # fmt: skip
    # A list for each number of them: lists of functions cannot be put together here.
    if STREAMS == 2:
        gl.warp_specialize(
            [
                (_attend_role, work + (Stream(0),)),  # noqa: RUF005
                (_attend_role, work + (Stream(1),)),  # noqa: RUF005
                (_load_role, load),
            ],
            [WARPS, 1],
            [REGISTERS, LOADING],
        )
    elif STREAMS == 3:
        gl.warp_specialize(
            [
                (_attend_role, work + (Stream(0),)),  # noqa: RUF005
                (_attend_role, work + (Stream(1),)),  # noqa: RUF005
                (_attend_role, work + (Stream(2),)),  # noqa: RUF005
                (_load_role, load),
            ],
            [WARPS, WARPS, 1],
            [REGISTERS, REGISTERS, LOADING],
        )
    else:
        gl.warp_specialize(
            [
                (_attend_role, work + (Stream(0),)),  # noqa: RUF005
                (_attend_role, work + (Stream(1),)),  # noqa: RUF005
                (_attend_role, work + (Stream(2),)),  # noqa: RUF005
                (_attend_role, work + (Stream(3),)),  # noqa: RUF005
                (_load_role, load),
            ],
            [WARPS, WARPS, WARPS, 1],
            [REGISTERS, REGISTERS, REGISTERS, LOADING],
        )

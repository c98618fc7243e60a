"""Window attention on Hopper: a tile of bias that stays, and windows that pass by.

::

    s = q kᵀ + (B + M) / scale        p = 2 ** (scale · log2 e · s - pivot)
    out = p v / Σ p                   lse = pivot / log2 e + log Σ p

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
theirs; with one more column, ``-mask_value · (r rᵀ - 1)`` is 0 there and the mask elsewhere.
Windows of one region come first, and without it (``hopper_windows``).

**The pivot is a guess** (``hopper_softmax``). A stream remembers in which turns it was wrong, and
tells the loading warp by a word of bits; those windows come once more, to be gone over carefully,
and then the windows whose regions are too many for marks.

Sums of weights are products with ones: what rounding takes from a weight, it takes from both sides
of the division. Tokens past the end are zeros, and their bias is -inf.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)
from triton.language.core import _aggregate as aggregate

from ...tiles.hopper.layouts import product_layout
from ...tiles.hopper.names import barrier
from ...tiles.hopper.ring import Turns, make_turns
from .hopper_forward_load import bit, load_role
from .hopper_halves import score_type
from .hopper_softmax import attend_carefully, attend_quickly, is_right
from .hopper_tiles import (
    CHUNK,
    FLAT,
    MARKS,
    PIECE,
    Bias,
    Form,
    Stream,
    make_bias,
    store_rows,
)
from .hopper_windows import await_window, which_work

__all__ = ["attend"]

LN_2 = gl.constexpr(0.6931471805599453)


@aggregate
class Memory:
    """What lies in shared memory, and whose turn it is."""

    bias: gl.shared_memory_descriptor  # [columns / CHUNK, ROWS * CHUNK]
    bias_made: gl.shared_memory_descriptor  # a barrier
    ones: gl.shared_memory_descriptor  # [8, PIECE]
    q: gl.shared_memory_descriptor  # [slots, 1, 1, ROWS, WIDTH]
    row_marks: gl.shared_memory_descriptor  # [slots, 1, ROWS, MARKS]
    q_turns: Turns
    windows: gl.shared_memory_descriptor  # int32 [slots, 1]: of which window they are, or -1
    k: gl.shared_memory_descriptor  # [slots, 1, 1, KEYS, WIDTH]
    v: gl.shared_memory_descriptor
    marks: gl.shared_memory_descriptor  # [slots, 1, KEYS, MARKS]
    turns: Turns
    wrong: gl.shared_memory_descriptor  # int32 [STREAMS, ROWS], a bit for a turn
    told: gl.shared_memory_descriptor  # a barrier

    @gluon.constexpr_function
    def __init__(
        self, bias, bias_made, ones, q, row_marks, q_turns, windows, k, v, marks, turns, wrong, told
    ):  # fmt: skip
        self.bias = bias
        self.bias_made = bias_made
        self.ones = ones
        self.q = q
        self.row_marks = row_marks
        self.q_turns = q_turns
        self.windows = windows
        self.k = k
        self.v = v
        self.marks = marks
        self.turns = turns
        self.wrong = wrong
        self.told = told


@gluon.jit
def _log2(x):
    """Base-2 logarithm, to 22 bits."""
    return gl.inline_asm_elementwise(
        "lg2.approx.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _finish(out, lse, acc, total, base, window, head, row, first_row, form):
    """Divide, and write the rows of ``out`` and ``lse``."""
    nothing = total == 0.0
    value = gl.where(nothing, float("-inf"), (base + _log2(total)) * LN_2)
    at = (window.to(gl.int64) * form.NUM_HEADS + head) * form.NUM_TOKENS + row
    gl.store(lse + at, value, row < form.NUM_TOKENS)
    share = gl.where(nothing, 0.0, 1.0 / total)
    store_rows(out, acc * share[:, None], window, head, first_row, form)


@gluon.jit
def _attend_role(
    out, lse, bias, regions, memory, head, first_row, num_masks, scale, mask_value, form, stream,
):  # fmt: skip
    """A stream: its share of the bias, then its share of the windows; the wrong ones once more."""
    STREAM: gl.constexpr = stream.INDEX
    QUICK_KINDS: gl.constexpr = min(form.KINDS, 2)
    PIECES: gl.constexpr = form.GROUPS + (form.REST > 0)
    ROW: gl.constexpr = gl.SliceLayout(1, product_layout(form.WIDTH, form.WARPS))
    dtype: gl.constexpr = memory.q.dtype
    make_bias(memory.bias, bias, head, first_row, 0, STREAM, False, form)
    barrier()
    mbarrier.arrive(memory.bias_made)
    mbarrier.wait(memory.bias_made, 0)
    row = first_row + gl.arange(0, form.ROWS, ROW)
    factor = scale.to(score_type(dtype)).to(gl.float32)  # as scores are multiplied
    turn = 0
    wrong = gl.zeros([form.ROWS], gl.int32, ROW)
    for i in gl.static_range(QUICK_KINDS):
        window = await_window(memory.q_turns, memory.windows, STREAM, turn, form)
        while window >= 0:
            pivot, total, acc = attend_quickly(
                memory, STREAM, turn, (turn - i) * PIECES, factor, i == 1, form
            )
            total = gl.convert_layout(total, ROW, assert_trivial=True)
            wrong = wrong | gl.where(is_right(total, dtype), 0, bit(turn))
            base = pivot * (scale / factor)
            _finish(out, lse, acc, total, base, window, head, row, first_row, form)
            turn += 1
            window = await_window(memory.q_turns, memory.windows, STREAM, turn, form)
        memory.q_turns.release(STREAM, turn)
        turn += 1
    memory.wrong.index(STREAM).store(wrong)
    barrier()
    mbarrier.arrive(memory.told)
    window = await_window(memory.q_turns, memory.windows, STREAM, turn, form)
    while window >= 0:
        theirs = regions
        if form.MASK:
            theirs += window % num_masks * form.NUM_TOKENS
        use = (turn - QUICK_KINDS) * PIECES
        m, total, acc = attend_carefully(
            memory, STREAM, turn, use, theirs, row, mask_value, scale, form
        )
        total = gl.convert_layout(total, ROW, assert_trivial=True)
        _finish(out, lse, acc, total, m, window, head, row, first_row, form)
        turn += 1
        window = await_window(memory.q_turns, memory.windows, STREAM, turn, form)


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
    GROUPS: gl.constexpr,
    REST: gl.constexpr,
    KEYS: gl.constexpr,
    STREAMS: gl.constexpr,
    WARPS: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    LOADING: gl.constexpr,
    TILE: gl.constexpr,
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
    ones = gl.full([8, PIECE], 1.0, dtype, gl.BlockedLayout([1, 8], [8, 4], [1, WARPS], [1, 0]))
    memory = Memory(
        gl.allocate_shared_memory(gl.float16, [CHUNKS, ROWS * CHUNK], FLAT),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(dtype, [8, PIECE], ONES, ones),
        gl.allocate_shared_memory(dtype, [Q_SLOTS, 1, 1, ROWS, WIDTH], q_desc.layout),
        gl.allocate_shared_memory(
            gl.float16, [Q_SLOTS if MASK else 1, 1, ROWS, MARKS], row_marks_desc.layout
        ),
        make_turns(STREAMS, Q_STAGES, 1, 1),
        gl.allocate_shared_memory(gl.int32, [Q_SLOTS, 1], FLAT),
        gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, KEYS, WIDTH], k_desc.layout),
        gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, KEYS, WIDTH], v_desc.layout),
        gl.allocate_shared_memory(
            gl.float16, [SLOTS if MASK else 1, 1, KEYS, MARKS], marks_desc.layout
        ),
        make_turns(STREAMS, STAGES, 1, 1),
        gl.allocate_shared_memory(gl.int32, [STREAMS, ROWS], FLAT),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
    )  # fmt: skip
    mbarrier.init(memory.bias_made, STREAMS)
    mbarrier.init(memory.told, STREAMS)
    fence_async_shared()
    windows, head, first_row = which_work(kinds, num_masks, num_windows, num_chunks, form)
    added = Bias(bias, offsets, centre, entry_stride, head_stride, inverse)
    work = (
        out, lse, added, regions, memory, head, first_row, num_masks, scale, mask_value, form,
    )  # fmt: skip
    load = (
        q_desc, k_desc, v_desc, row_marks_desc, marks_desc, memory, windows, head, first_row, form,
    )  # fmt: skip
    # A list for each number of them: lists of functions cannot be put together here.
    if STREAMS == 2:
        gl.warp_specialize(
            [
                (_attend_role, work + (Stream(0),)),  # noqa: RUF005
                (_attend_role, work + (Stream(1),)),  # noqa: RUF005
                (load_role, load),
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
                (load_role, load),
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
                (load_role, load),
            ],
            [WARPS, WARPS, WARPS, 1],
            [REGISTERS, REGISTERS, REGISTERS, LOADING],
        )

"""Window attention on Hopper: a warpgroup walks the windows, its bias in shared memory.

::

    s = q kᵀ + (B + M) / scale        p = 2 ** (scale · log2 e · (s - max s))
    out = p v / Σ p                   lse = scale · max s + log Σ p

A program owns one head and 64 tokens, and takes a window of every round of ``num_chunks``. What
it adds to the scores is the same in each of them, but for the mask: that tile lies in shared
memory just as threads hold scores, and a product starts from it. So registers hold nothing but
scores, two wide groups of tiles do for a row, and three programs share a multiprocessor: while
one waits for a product, another takes exponentials::

    keys of group      0                1
                       b ─▶ s ─▶ p ─▶ o  b ─▶ s ─▶ p ─▶ o     (b: 16 bytes a load)
    copies                                  q', k' of the next window    v'

Queries, keys and values come by the tensor memory accelerator, each as soon as the last product
with those of the window before is done. Tokens past the end are zeros, and their bias is -inf.
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

from ...tiles.hopper.layouts import wide_rows
from ...tiles.hopper.names import barrier

__all__ = ["attend"]

LN_2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)  # tokens of a program
BOX = gl.constexpr(128)  # tokens that one copy brings
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
TABLE = gl.constexpr(1)


@gluon.constexpr_function
def _bias_layout(columns):
    """A tile of bias as threads hold scores: 16 bytes of one, then of the next."""
    bases = [[0, 1], [8, 0], [0, 8], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0]]
    bases += [[0, 16 << i] for i in range((int(columns) // 16).bit_length() - 1)]
    return gl.SharedLinearLayout(bases)


@gluon.constexpr_function
def _scores(columns):
    """How threads hold scores, or anything that a product makes."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, int(columns), 16])


@gluon.constexpr_function
def _sum(tiles, count):
    """Columns of the first tiles."""
    return sum([int(tile) for tile in tiles][: int(count)])


@gluon.jit
def _make_bias(
    memory, bias, offsets, head, first_row, centre, inverse, NUM_HEADS: gl.constexpr,
    N: gl.constexpr,
):  # fmt: skip
    """Fill the tile of bias, 16 columns at a time; -inf where there is no key."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    i = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))
    u = gl.load(offsets + i, i < N, 0)
    for b in range(memory.shape[0]):
        j = b * 16 + column
        inside = (i < N)[:, None] & (j < N)[None, :]
        other_u = gl.load(offsets + j, j < N, 0)
        at = (u[:, None] - other_u[None, :] + centre) * NUM_HEADS + head
        value = gl.load(bias + at, inside, 0.0).to(gl.float32)
        value = gl.where((j < N)[None, :], value * inverse, float("-inf"))
        place = memory.index(b)._reinterpret(gl.float16, [ROWS, 16], _bias_layout(16))
        place.store(value.to(gl.float16))


@gluon.jit
def _mask(s, regions, row, first, mask_value, N: gl.constexpr):
    """Add what stands between regions."""
    column = first + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    theirs = gl.load(regions + column, column < N, 0)
    ours = gl.load(regions + row, row < N, 0)
    ours = gl.convert_layout(ours, gl.SliceLayout(1, s.type.layout), assert_trivial=True)
    return gl.where(ours[:, None] == theirs[None, :], s, s + mask_value)


@gluon.jit
def _rows(tokens, first, T: gl.constexpr):
    """Some of a window's tokens, as products take them."""
    WIDTH: gl.constexpr = tokens.shape[4]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(WIDTH * 2, 16, rank=2)
    eights = tokens._reinterpret(tokens.dtype, [tokens.shape[0] * (BOX // 8), 8 * WIDTH], FLAT)
    return eights.index(first // 8)._reinterpret(tokens.dtype, [T, WIDTH], LAYOUT)


@gluon.jit
def _fold(x, MAX: gl.constexpr):
    """The largest or the sum of every eighth column: what one thread holds of a row."""
    parts = x.reshape([ROWS, x.shape[1] // 8, 8])
    parts = gl.max(parts, 1) if MAX else gl.sum(parts, 1)
    return gl.convert_layout(parts, _scores(8), assert_trivial=True)


@gluon.jit
def _log2(x):
    """Base-2 logarithm, to 22 bits."""
    return gl.inline_asm_elementwise(
        "lg2.approx.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _fetch(desc, tokens, window, head, ready):
    """Start the copies of a window's keys or values."""
    BOXES: gl.constexpr = tokens.shape[0]
    for b in gl.static_range(BOXES):
        at = [window, head, b * BOX, 0]
        tma.async_copy_global_to_shared(desc, at, ready, tokens.index(b))


@gluon.jit
def _fetch_keys(q_desc, k_desc, q, k, window, head, first_row, ready):
    mbarrier.expect(ready, (k.shape[0] * BOX + ROWS) * k.shape[4] * 2)
    tma.async_copy_global_to_shared(q_desc, [window, head, first_row, 0], ready, q)
    _fetch(k_desc, k, window, head, ready)


@gluon.jit
def _fetch_values(v_desc, v, window, head, ready):
    mbarrier.expect(ready, v.shape[0] * BOX * v.shape[4] * 2)
    _fetch(v_desc, v, window, head, ready)


@gluon.jit
def _window(turn, chunk, num_chunks):
    """This program's window of a round.

    In the next it is the neighbour's: windows at a map's border cost more, for their mask, and
    stand at the same places of every row.
    """
    return turn * num_chunks + (chunk + turn) % num_chunks


@gluon.jit
def _finish(
    out, lse, acc, m, l, scale, window, head, row, first_row, NUM_HEADS: gl.constexpr,
    N: gl.constexpr, HEAD_SIZE: gl.constexpr,
):  # fmt: skip
    """Divide, and write the rows of ``out`` and ``lse``."""
    ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    WIDTH: gl.constexpr = acc.shape[1]
    WIDE: gl.constexpr = wide_rows(WIDTH)
    row_l = gl.convert_layout(gl.sum(l, 1), ROW, assert_trivial=True)
    nothing = row_l == 0.0
    value = gl.where(nothing, float("-inf"), (m * scale + _log2(row_l)) * LN_2)
    at = (window.to(gl.int64) * NUM_HEADS + head) * N + row
    gl.store(lse + at, value, row < N)
    share = gl.where(nothing, 0.0, 1.0 / row_l)
    result = gl.convert_layout((acc * share[:, None]).to(out.dtype.element_ty), WIDE)
    wide_row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    d = gl.arange(0, WIDTH, gl.SliceLayout(0, WIDE))[None, :]
    at = (window.to(gl.int64) * N + wide_row) * (NUM_HEADS * HEAD_SIZE)
    inside = (wide_row < N)[:, None]
    if WIDTH != HEAD_SIZE:
        inside = inside & (d < HEAD_SIZE)
    gl.store(out + at[:, None] + head * HEAD_SIZE + d, result, inside)


@gluon.jit
def attend(
    out,  # [num_windows, NUM_TOKENS, NUM_HEADS, HEAD_SIZE]
    lse,  # float32 [num_windows, NUM_HEADS, NUM_TOKENS]
    q_desc,  # [num_windows, NUM_HEADS, NUM_TOKENS, HEAD_SIZE] in boxes of [1, 1, 64, WIDTH]
    k_desc,  # in boxes of 128 tokens, like v_desc
    v_desc,
    bias,  # [table_size, NUM_HEADS]
    offsets,  # int32 [NUM_TOKENS]
    mixed,  # int32 [num_masks]
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
    MASK: gl.constexpr,
    GROUPS: gl.constexpr,
    TILES: gl.constexpr,
):
    """The kernel; see above. Grid: tiles of tokens × heads × chunks, tiles of a window together."""
    N: gl.constexpr = NUM_TOKENS
    T: gl.constexpr = _sum(TILES, len(TILES))
    BOXES: gl.constexpr = (GROUPS * T + BOX - 1) // BOX
    NUM_TILES: gl.constexpr = (N + ROWS - 1) // ROWS
    dtype: gl.constexpr = q_desc.dtype
    O_LAYOUT: gl.constexpr = _scores(WIDTH)
    ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    # memory
    bias_tiles = gl.allocate_shared_memory(gl.float16, [GROUPS * T // 16, ROWS * 16], FLAT)
    k_tokens = gl.allocate_shared_memory(dtype, [BOXES, 1, 1, BOX, WIDTH], k_desc.layout)
    v_tokens = gl.allocate_shared_memory(dtype, [BOXES, 1, 1, BOX, WIDTH], v_desc.layout)
    q_box = gl.allocate_shared_memory(dtype, [1, 1, ROWS, WIDTH], q_desc.layout)
    q = q_box._reinterpret(dtype, [ROWS, WIDTH], gl.NVMMASharedLayout(WIDTH * 2, 16, rank=2))
    k_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(k_ready, 1)
    mbarrier.init(v_ready, 1)
    fence_async_shared()
    barrier()
    # which tile am I
    program = gl.program_id(0)
    first_row = program % NUM_TILES * ROWS
    head = program // NUM_TILES % NUM_HEADS
    chunk = program // (NUM_TILES * NUM_HEADS)
    num_turns = num_windows // num_chunks
    if _window(num_turns, chunk, num_chunks) < num_windows:
        num_turns += 1
    if num_turns > 0:
        window = _window(0, chunk, num_chunks)
        _fetch_keys(q_desc, k_desc, q_box, k_tokens, window, head, first_row, k_ready)
        _fetch_values(v_desc, v_tokens, window, head, v_ready)
    _make_bias(bias_tiles, bias, offsets, head, first_row, centre, inverse, NUM_HEADS, N)
    barrier()
    row = first_row + gl.arange(0, ROWS, ROW)
    is_mixed = 0
    if MASK:
        is_mixed = gl.load(mixed + chunk % num_masks)
    phase = 0
    window = chunk
    for turn in range(num_turns):
        following = _window(turn + 1, chunk, num_chunks)
        m = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        l = gl.zeros([ROWS, 8], gl.float32, _scores(8))
        acc = gl.zeros([ROWS, WIDTH], gl.float32, O_LAYOUT)
        mbarrier.wait(k_ready, phase)
        for g in range(GROUPS):
            # scores
            s = ()
            for t in gl.static_range(len(TILES)):
                mine = bias_tiles.index((g * T + _sum(TILES, t)) // 16)
                mine = mine._reinterpret(gl.float16, [ROWS, TILES[t]], _bias_layout(TILES[t]))
                s_t = mine.load(_scores(TILES[t])).to(gl.float32)
                if MASK:  # noqa: SIM102
                    if is_mixed != 0:
                        at = regions + window % num_masks * N
                        s_t = _mask(s_t, at, row, g * T + _sum(TILES, t), mask_value, N)
                s = s + (s_t,)  # type: ignore[assignment] # noqa: RUF005
            started = ()
            for t in gl.static_range(len(TILES)):
                k = _rows(k_tokens, g * T + _sum(TILES, t), TILES[t])
                s_t = warpgroup_mma(q, k.permute((1, 0)), s[t], is_async=True)
                started = started + (s_t,)  # type: ignore[assignment] # noqa: RUF005
            s = warpgroup_mma_wait(0, deps=started)
            if g == GROUPS - 1:  # noqa: SIM102
                if turn + 1 < num_turns:
                    barrier()
                    _fetch_keys(
                        q_desc, k_desc, q_box, k_tokens, following, head, first_row, k_ready
                    )
            # softmax
            most = _fold(s[0], True)
            for t in gl.static_range(1, len(TILES)):
                most = gl.maximum(most, _fold(s[t], True))
            high = gl.maximum(m, gl.convert_layout(gl.max(most, 1), ROW, assert_trivial=True))
            pivot = gl.where(high == float("-inf"), 0.0, high * scale)
            decay = gl.exp2(m * scale - pivot)
            row_decay = gl.convert_layout(decay, gl.SliceLayout(1, _scores(8)), assert_trivial=True)
            l = l * row_decay[:, None]
            acc = acc * decay[:, None]
            m = high
            # values
            if g == 0:
                mbarrier.wait(v_ready, phase)
            product = acc
            weights = ()
            for t in gl.static_range(len(TILES)):
                at_row = gl.convert_layout(
                    pivot, gl.SliceLayout(1, _scores(TILES[t])), assert_trivial=True
                )
                p = gl.exp2(gl.fma(s[t], scale, -at_row[:, None]))
                l = l + _fold(p, False)
                p = gl.convert_layout(p.to(dtype), P_LAYOUT)
                v = _rows(v_tokens, g * T + _sum(TILES, t), TILES[t])
                product = warpgroup_mma(p, v, product, is_async=True)
                weights = weights + (p,)  # type: ignore[assignment] # noqa: RUF005
            acc = warpgroup_mma_wait(0, deps=(product,) + weights)[0]  # noqa: RUF005
        if turn + 1 < num_turns:
            barrier()
            _fetch_values(v_desc, v_tokens, following, head, v_ready)
        _finish(out, lse, acc, m, l, scale, window, head, row, first_row, NUM_HEADS, N, HEAD_SIZE)
        window = following
        if MASK:
            is_mixed = gl.load(mixed + window % num_masks)
        phase = phase ^ 1

"""The gradients of attention on Hopper: one walk over the queries, five products a tile.

::

    Pᵀ = exp(k qᵀ - lse)     dPᵀ = v dOᵀ     dSᵀ = Pᵀ ∘ (dPᵀ - delta)

    dV += Pᵀ dO              dK += dSᵀ q     dQ += dS k, in memory

              queries  0   M   2M   3M
    keys ┌─────┐      ┌───┬───┬───┬───┐      a program holds 128 keys and values of a KV head,
         │dK dV│  ←   │ · │ / │ ■ │ ■ │      each of its two warpgroups 64; a warp brings queries
         └─────┘      └───┴─↓─┴─↓─┴─↓─┘
                            dQ  dQ  dQ

What the keys of one program give to a query is a part of its gradient. Both warpgroups leave
``dS`` of a tile in shared memory, each computes 64 × 64 of the part from it, and adds that to what
other programs gave, in float32, **in no fixed order**: the last bits differ from run to run.

Nobody waits for the other in the same step: a part is computed a step after its ``dS``, so one
warpgroup may multiply while the other takes exponentials.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from ...tiles.hopper.layouts import wide_rows
from ...tiles.hopper.ring import Turns, make_turns

__all__ = ["finish_kernel", "gradients_kernel"]

ROWS = gl.constexpr(64)  # of a warpgroup
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))


@aggregate
class Form:
    """What a kernel is compiled for."""

    HEAD_SIZE: gl.constexpr
    WIDTH: gl.constexpr  # columns of a tile: the head's, and zeros
    KEYS: gl.constexpr  # of a program
    TILE_M: gl.constexpr  # queries
    GROUP: gl.constexpr  # query heads that share a KV head
    CAUSAL: gl.constexpr
    HAS_WINDOW: gl.constexpr
    HAS_END: gl.constexpr  # the last keys of a tile may not exist

    @gluon.constexpr_function
    def __init__(self, HEAD_SIZE, WIDTH, KEYS, TILE_M, GROUP, CAUSAL, HAS_WINDOW, HAS_END):
        self.HEAD_SIZE = gl.constexpr(HEAD_SIZE)
        self.WIDTH = gl.constexpr(WIDTH)
        self.KEYS = gl.constexpr(KEYS)
        self.TILE_M = gl.constexpr(TILE_M)
        self.GROUP = gl.constexpr(GROUP)
        self.CAUSAL = gl.constexpr(CAUSAL)
        self.HAS_WINDOW = gl.constexpr(HAS_WINDOW)
        self.HAS_END = gl.constexpr(HAS_END)


@aggregate
class Batch:
    """The sequences, all of one length."""

    num_seqs: gl.tensor
    num_kv_heads: gl.tensor
    query_len: gl.tensor
    pitch: gl.tensor  # rows from one sequence to the next, whole tiles
    seq_len: gl.tensor
    key_tiles: gl.tensor
    section: gl.tensor  # pairs of sequence and KV head that are walked beside each other
    window: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, num_seqs, num_kv_heads, query_len, pitch, seq_len, key_tiles, section, window
    ):  # fmt: skip
        self.num_seqs = num_seqs
        self.num_kv_heads = num_kv_heads
        self.query_len = query_len
        self.pitch = pitch
        self.seq_len = seq_len
        self.key_tiles = key_tiles
        self.section = section
        self.window = window


@aggregate
class Walk:
    """A program's keys, and the tiles of queries that see one of them, in their order."""

    seq: gl.tensor
    kv_head: gl.tensor
    first_key: gl.tensor
    low: gl.tensor  # tiles of queries are low, low + 1, … high - 1
    high: gl.tensor
    start: gl.tensor  # where the round begins

    @gluon.constexpr_function
    def __init__(self, seq, kv_head, first_key, low, high, start):
        self.seq = seq
        self.kv_head = kv_head
        self.first_key = first_key
        self.low = low
        self.high = high
        self.start = start


@aggregate
class Memory:
    """What lies in shared memory, and whose turn it is."""

    k: gl.shared_memory_descriptor  # [2, 1, 1, ROWS, WIDTH]
    v: gl.shared_memory_descriptor
    keys_turns: Turns
    q: gl.shared_memory_descriptor  # [stages, 1, 1, TILE_M, WIDTH]
    d_out: gl.shared_memory_descriptor
    lse2: gl.shared_memory_descriptor  # [stages, 1, TILE_M]
    delta: gl.shared_memory_descriptor
    turns: Turns
    ds: gl.shared_memory_descriptor  # [2 steps * 2 warpgroups, ROWS, TILE_M]
    ds_turns: Turns

    @gluon.constexpr_function
    def __init__(self, k, v, keys_turns, q, d_out, lse2, delta, turns, ds, ds_turns):
        self.k = k
        self.v = v
        self.keys_turns = keys_turns
        self.q = q
        self.d_out = d_out
        self.lse2 = lse2
        self.delta = delta
        self.turns = turns
        self.ds = ds
        self.ds_turns = ds_turns


@aggregate
class Warpgroup:
    """Which of the two."""

    INDEX: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, INDEX):
        self.INDEX = gl.constexpr(INDEX)


@gluon.constexpr_function
def _sums_layout(columns):
    """How threads hold what a product makes."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, int(columns), 16])


@gluon.jit
def _find_walk(batch, form):
    """Sections one after another; in each the first keys first, which most queries see."""
    M: gl.constexpr = form.TILE_M
    program = gl.program_id(0)
    num_pairs = batch.num_seqs * batch.num_kv_heads
    first_pair = program // (batch.section * batch.key_tiles) * batch.section
    rest = program - first_pair * batch.key_tiles
    width = gl.minimum(batch.section, num_pairs - first_pair)
    pair = first_pair + rest % width
    tile = rest // width
    first_key = tile * form.KEYS
    shift = batch.seq_len - batch.query_len
    low = 0
    high = gl.cdiv(batch.query_len, M)
    if form.HAS_WINDOW:
        last = gl.maximum(first_key + form.KEYS - 1 + batch.window - shift, 0)
        high = gl.minimum(high, gl.cdiv(last, M))
    start = 0
    if form.CAUSAL:
        low = gl.minimum(gl.maximum(first_key - shift, 0) // M, high)
        start = low
    else:  # programs begin apart, so that they add to different queries
        start = tile * (form.KEYS // M) % gl.maximum(high, 1)
    seq = pair // batch.num_kv_heads
    return Walk(seq, pair % batch.num_kv_heads, first_key, low, high, start)


@gluon.jit
def _advance(walk, tile, head, step, form):
    """The next tile of the round; after the last the next head's, ``step`` further."""
    tile += 1
    tile = gl.where(tile == walk.high, walk.low, tile)
    if form.GROUP > 1:
        head = gl.where(tile == walk.start, head + step, head)
    return tile, head


@gluon.jit
def _load_role(k_desc, v_desc, q_desc, d_out_desc, lse2_desc, delta_desc, memory, batch, form):
    """One warp: fetch keys and values, then queries and what came back of them."""
    M: gl.constexpr = form.TILE_M
    walk = _find_walk(batch, form)
    ready = memory.keys_turns.expect(0, 0, 2 * form.KEYS * form.WIDTH * 2)
    for w in gl.static_range(form.KEYS // ROWS):
        keys = [walk.seq, walk.kv_head, walk.first_key + w * ROWS, 0]
        tma.async_copy_global_to_shared(k_desc, keys, ready, memory.k.index(w))
        tma.async_copy_global_to_shared(v_desc, keys, ready, memory.v.index(w))
    tile = walk.start
    head = walk.kv_head * form.GROUP
    for use in range(form.GROUP * (walk.high - walk.low)):
        slot = memory.turns.slot(0, use)
        memory.turns.wait_empty(0, use)
        ready = memory.turns.expect(0, use, 2 * M * form.WIDTH * 2 + 2 * M * 4)
        queries = [walk.seq, head, tile * M, 0]
        numbers = [0, (head * batch.num_seqs + walk.seq) * batch.pitch + tile * M]
        tma.async_copy_global_to_shared(q_desc, queries, ready, memory.q.index(slot))
        tma.async_copy_global_to_shared(lse2_desc, numbers, ready, memory.lse2.index(slot))
        tma.async_copy_global_to_shared(d_out_desc, queries, ready, memory.d_out.index(slot))
        tma.async_copy_global_to_shared(delta_desc, numbers, ready, memory.delta.index(slot))
        tile, head = _advance(walk, tile, head, 1, form)


@gluon.jit
def _as_tile(piece, R: gl.constexpr, C: gl.constexpr):
    """Memory as products take it."""
    return piece._reinterpret(piece.dtype, [R, C], SWIZZLED)


@gluon.jit
def _part_of(piece, R: gl.constexpr, C: gl.constexpr, INDEX: gl.constexpr):
    """64 columns of a tile, which lie together."""
    return piece._reinterpret(piece.dtype, [C // 64, R, 64], SWIZZLED).index(INDEX)


@gluon.jit
def _numbers(piece, LAYOUT: gl.constexpr):
    """A tile's ``lse2`` or ``delta``, for each column of a product."""
    flat = piece._reinterpret(gl.float32, [piece.shape[1]], FLAT)
    return flat.load(gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _hide(p, reach, num_keys, window, form):
    """0 where a query does not see a key; ``reach`` is the first query's own key."""
    LAYOUT: gl.constexpr = p.type.layout
    key = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    own = reach + gl.arange(0, form.TILE_M, gl.SliceLayout(0, LAYOUT))[None, :]
    seen = key <= own if form.CAUSAL else key < num_keys
    if form.HAS_WINDOW:
        seen = seen & (key > own - window)
    return gl.where(seen, p, 0.0)


@gluon.jit
def _start_part(memory, step, form, WG: gl.constexpr):
    """Start the products of a warpgroup's 64 × 64 of the queries' gradients."""
    dq = gl.zeros([64, 64], gl.float32, _sums_layout(64))
    for w in gl.static_range(2):
        ds = memory.ds.index(step % 2 * 2 + w)
        if form.WIDTH == 128:  # a tile has 64 rows: half of its columns
            ds = ds.permute((1, 0))
            k = _part_of(memory.k.index(w), ROWS, form.WIDTH, WG)
        else:
            ds = _part_of(ds, ROWS, form.TILE_M, WG).permute((1, 0))
            k = _as_tile(memory.k.index(w), ROWS, form.WIDTH)
        dq = warpgroup_mma(ds, k, dq, use_acc=w > 0, is_async=True)
    return dq


@gluon.jit
def _add_part(d_q, dq, row, form, WG: gl.constexpr):
    """Add a part to the sums of the tile that begins with ``row``, 16 bytes a thread."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    dq = gl.convert_layout(dq, LAYOUT)
    r = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    c = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))[None, :]
    if form.WIDTH == 128:
        c += WG * 64
    else:
        r += WG * 64
    gl.atomic_add(d_q + (row + r).to(gl.int64) * form.WIDTH + c, dq, sem="relaxed")


@gluon.jit
def _step(
    d_q, dk, dv, memory, use, previous_row, reach, num_keys, window, scale, form,
    WG: gl.constexpr,
):  # fmt: skip
    """What a tile of queries gives, and what the tile before it gets."""
    M: gl.constexpr = form.TILE_M
    S_LAYOUT: gl.constexpr = _sums_layout(M)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, _sums_layout(form.WIDTH), 2)
    slot = memory.turns.slot(0, use)
    k = _as_tile(memory.k.index(WG), ROWS, form.WIDTH)
    v = _as_tile(memory.v.index(WG), ROWS, form.WIDTH)
    q = _as_tile(memory.q.index(slot), M, form.WIDTH)
    d_out = _as_tile(memory.d_out.index(slot), M, form.WIDTH)
    memory.turns.wait_full(0, use)
    s = gl.zeros([ROWS, M], gl.float32, S_LAYOUT)
    s = warpgroup_mma(k, q.permute((1, 0)), s, use_acc=False, is_async=True)
    dp = gl.zeros([ROWS, M], gl.float32, S_LAYOUT)
    dp = warpgroup_mma(v, d_out.permute((1, 0)), dp, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    p = gl.exp2(s * scale - _numbers(memory.lse2.index(slot), S_LAYOUT))
    if form.CAUSAL or form.HAS_WINDOW or form.HAS_END:
        p = _hide(p, reach, num_keys, window, form)
    weights = gl.convert_layout(p.to(k.dtype), P_LAYOUT, assert_trivial=True)
    dv = warpgroup_mma(weights, d_out, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    ds = p * (dp - _numbers(memory.delta.index(slot), S_LAYOUT))

    # Where this goes, the other has taken its part of the step before the last one from, and its
    # own of the last step is there.
    memory.ds_turns.wait_full(1 - WG, use)
    ours = memory.ds.index(use % 2 * 2 + WG)
    ours.store(ds.to(k.dtype))
    fence_async_shared()
    dq = _start_part(memory, use + 1, form, WG)
    dk = warpgroup_mma(ours, q, dk, is_async=True)
    dq, dv, weights = warpgroup_mma_wait(1, deps=(dq, dv, weights))
    memory.ds_turns.fill(WG, use + 1)
    _add_part(d_q, dq, previous_row, form, WG)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    memory.turns.release(0, use)
    return dk, dv


@gluon.jit
def _walk_role(d_q, d_k, d_v, memory, batch, scale, softmax_scale, form, warpgroup):
    """A warpgroup: all tiles of queries that see the program's keys."""
    WG: gl.constexpr = warpgroup.INDEX
    M: gl.constexpr = form.TILE_M
    walk = _find_walk(batch, form)
    dk = gl.zeros([ROWS, form.WIDTH], gl.float32, _sums_layout(form.WIDTH))
    dv = gl.zeros([ROWS, form.WIDTH], gl.float32, _sums_layout(form.WIDTH))

    # Before the first step comes one of zeros: its part is added to the first tile.
    zeros = gl.zeros([ROWS, M], memory.ds.dtype, _sums_layout(M))
    memory.ds.index(2 + WG).store(zeros)
    fence_async_shared()
    memory.ds_turns.fill(WG, 0)
    memory.keys_turns.wait_full(0, 0)
    tile = walk.start
    head_row = (walk.kv_head * form.GROUP * batch.num_seqs + walk.seq) * batch.pitch
    previous_row = head_row
    num_keys = batch.seq_len - walk.first_key - WG * ROWS  # from the warpgroup's first on
    num_steps = form.GROUP * (walk.high - walk.low)
    for use in range(num_steps):
        reach = tile * M + num_keys - batch.query_len
        dk, dv = _step(
            d_q, dk, dv, memory, use, previous_row, reach, num_keys, batch.window, scale, form, WG
        )
        previous_row = head_row + tile * M
        tile, head_row = _advance(walk, tile, head_row, batch.num_seqs * batch.pitch, form)
    memory.ds_turns.wait_full(1 - WG, num_steps)
    if num_steps > 0:  # else the compiler prepares this before the loop, where registers are few
        dq = _start_part(memory, num_steps + 1, form, WG)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        _add_part(d_q, dq, previous_row, form, WG)
    _store_rows(d_k, dk * softmax_scale, walk, batch, form, WG)
    _store_rows(d_v, dv, walk, batch, form, WG)


@gluon.jit
def _store_rows(out, value, walk, batch, form, WG: gl.constexpr):
    """Write a warpgroup's rows, in whole sectors."""
    WIDE: gl.constexpr = wide_rows(form.WIDTH)
    value = gl.convert_layout(value.to(out.dtype.element_ty), WIDE)
    key = walk.first_key + WG * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    column = gl.arange(0, form.WIDTH, gl.SliceLayout(0, WIDE))[None, :]
    token = walk.seq.to(gl.int64) * batch.seq_len + key
    at = (token * batch.num_kv_heads + walk.kv_head) * form.HEAD_SIZE
    inside = (key < batch.seq_len)[:, None] & (column < form.HEAD_SIZE)
    gl.store(out + at[:, None] + column, value, inside)


@gluon.jit
def gradients_kernel(
    d_q,  # float32 [num_heads, num_seqs, pitch, WIDTH], zeros; gets sums, not scaled
    d_k,  # [num_seqs, seq_len, num_kv_heads, HEAD_SIZE]
    d_v,  # as d_k
    k_desc,  # [num_seqs, num_kv_heads, seq_len, HEAD_SIZE] in boxes of [1, 1, ROWS, WIDTH]
    v_desc,
    q_desc,  # [num_seqs, num_heads, query_len, HEAD_SIZE] in boxes of [1, 1, TILE_M, WIDTH]
    d_out_desc,
    lse2_desc,  # float32 [1, num_heads * num_seqs * pitch] in boxes of [1, TILE_M]
    delta_desc,
    num_seqs,
    num_kv_heads,
    query_len,
    pitch,
    seq_len,
    key_tiles,
    section,
    window,
    scale,  # softmax_scale · log2(e)
    softmax_scale,
    HEAD_SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    KEYS: gl.constexpr,
    TILE_M: gl.constexpr,
    GROUP: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    HAS_END: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    LOADING: gl.constexpr,
):
    """The kernel; see above. Grid: tiles of keys × KV heads × sequences."""
    form = Form(HEAD_SIZE, WIDTH, KEYS, TILE_M, GROUP, CAUSAL, HAS_WINDOW, HAS_END)
    batch = Batch(
        num_seqs, num_kv_heads, query_len, pitch, seq_len, key_tiles, section, window
    )  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    memory = Memory(
        gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, WIDTH], k_desc.layout),
        gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, WIDTH], v_desc.layout),
        make_turns(1, 1, 1, 1),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, TILE_M, WIDTH], q_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, TILE_M, WIDTH], d_out_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, TILE_M], lse2_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, TILE_M], delta_desc.layout),
        make_turns(1, STAGES, 1, 2),
        gl.allocate_shared_memory(dtype, [4, ROWS, TILE_M], SWIZZLED),
        make_turns(2, 2, 1, 1),
    )
    fence_async_shared()
    work = (d_q, d_k, d_v, memory, batch, scale, softmax_scale, form)
    load = (k_desc, v_desc, q_desc, d_out_desc, lse2_desc, delta_desc, memory, batch, form)
    gl.warp_specialize(
        [
            (_walk_role, work + (Warpgroup(0),)),  # noqa: RUF005
            (_walk_role, work + (Warpgroup(1),)),  # noqa: RUF005
            (_load_role, load),
        ],
        [4, 1],
        [REGISTERS, LOADING],
    )


@triton.jit
def finish_kernel(
    d_q,  # [num_seqs, query_len, num_heads, HEAD_SIZE]
    sums,  # float32 [num_heads, num_seqs, pitch, WIDTH]
    num_seqs,
    num_heads,
    query_len,
    pitch,
    softmax_scale,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_M: tl.constexpr,
):
    """Scale the sums of ``TILE_M`` queries of a head, and round them. Grid: tiles × pairs."""
    tiles = tl.cdiv(query_len, TILE_M)
    token = tl.program_id(0) % tiles * TILE_M + tl.arange(0, TILE_M)
    pair = (tl.program_id(0) // tiles).to(tl.int64)
    head, seq = pair // num_seqs, pair % num_seqs
    column = tl.arange(0, WIDTH)
    x = tl.load(sums + (pair * pitch + token)[:, None] * WIDTH + column)
    at = ((seq * query_len + token) * num_heads + head) * HEAD_SIZE
    inside = (token < query_len)[:, None] & (column < HEAD_SIZE)
    tl.store(d_q + at[:, None] + column, x * softmax_scale, mask=inside)

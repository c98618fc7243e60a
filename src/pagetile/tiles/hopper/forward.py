"""Attention forward on Hopper: two warps load, or four, two or three warpgroups compute.

::

    out[r] = Σ_n p[r, n] v[n] / l[r],  p[r, n] = 2 ** (s[r, n] - m[r]),  s = q · k · scale · log2 e

A program takes tiles of queries one after another (``schedule``). Each warpgroup has 64 of a
tile's rows, tokens × ``PACK`` heads, and walks the keys from right to left, masked tiles first;
a tile's last product goes with the next tile's first::

    loading      Q K2 K1 K0 │ Q' K1' K0' │ ...      and  V2 V1 V0 │ V1' V0' │ ...
    computing    S2 softmax │ S1 O2 softmax │ S0 O1 softmax │ S1' O0 softmax' │ S0' O1' ...

While one warpgroup does a softmax, another multiplies. Keys and values come in boxes of ``BOX``
rows: a page, a part of one, or, of ragged tensors, a tile. Where boxes would be small, rows are
gathered, by two warps for keys and two for values. Results that fill a warpgroup's rows go back
by way of shared memory, too, where they are ``STAGED``. What lies past a sequence's end is read as
zeros, or overwritten with zeros inside its last box, or, gathered, as the last key again: no NaN
that a sequence does not have comes into a product.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .finish import finish, times
from .gather import GATHERING_WARPS, make_pages
from .layouts import num_parts, part_of, part_size, product_layout
from .load import (
    COLUMNS,
    HEAD,
    LAST,
    NUM_FULL,
    NUM_RIGHT,
    NUM_TILES,
    NUM_TOKENS,
    REACH,
    ROWS,
    TOKEN,
    Form,
    load_keys_role,
    load_values_role,
)
from .ring import make_ring
from .schedule import Batch, make_orders
from .softmax import (
    LOG2_E,
    Scoring,
    cap,
    hide,
    lean,
    meet,
    pack,
    pass_turn,
    take_turn,
    unpack,
    weigh,
)

__all__ = ["forward_kernel"]


@gluon.jit
def _compute_role(
    out, staged, lse, sinks, num_heads, token_stride, head_stride, scoring,
    orders, q_ring, k_ring, v_ring, form, WG: gl.constexpr,
):  # fmt: skip
    """One warpgroup: its rows of every tile."""
    TILE_N: gl.constexpr = k_ring.tiles.shape[1]
    WIDTH: gl.constexpr = k_ring.tiles.shape[2]
    S_LAYOUT: gl.constexpr = product_layout(TILE_N)
    if form.TAKE_TURNS and WG == form.WARPGROUPS - 1:
        pass_turn(0)
    tile_use = 0
    use = 0
    q_ring.turns.wait_full(0, tile_use)
    num_tiles = orders.read(tile_use, NUM_TILES)
    if num_tiles > 0:
        k_ring.turns.wait_full(0, use)
    s = gl.zeros([ROWS, TILE_N], gl.float32, S_LAYOUT)
    s = _score(q_ring.tile(tile_use, WG), k_ring.operand(use, form.ATOMS), s, form)
    s = warpgroup_mma_wait(0, deps=(s,))
    if num_tiles > 0:
        k_ring.turns.release(0, use)
    slope = _find_slope(s, scoring, num_tiles > 0, orders, tile_use, form)
    weights, reach, m, l = _begin(s, orders, tile_use, scoring, slope, form, WG)
    while num_tiles > 0:
        q = q_ring.tile(tile_use, WG)
        p = pack(weights, q.dtype)
        acc = _no_results(form)
        last = orders.read(tile_use, LAST)
        if not form.GATHER and last < TILE_N:
            v_ring.turns.wait_full(0, use)
            if WG == 0:
                _clear_rows(v_ring.tile(use, 0), gl.maximum(last, 0), form)
            meet(form.WARPGROUPS)
        first_full = orders.read(tile_use, NUM_RIGHT)
        first_left = first_full + orders.read(tile_use, NUM_FULL)
        # Of tiles that need no mask a loop of their own would be faster, but in heads of up to 128
        # ptxas loses the queries' descriptor between two loops.
        state = (use, p, acc, m, l, reach)
        what = (q, k_ring, v_ring, first_full, first_left, scoring, slope, form)
        if WIDTH <= 128:
            state = _walk(0, num_tiles - 1, None, state, what, WG)
        else:
            if form.CAUSAL:
                state = _walk(0, first_full, True, state, what, WG)
            state = _walk(first_full, first_left, False, state, what, WG)
            if form.HAS_WINDOW:
                state = _walk(first_left, num_tiles - 1, True, state, what, WG)
        use, p, acc, m, l, _ = state
        first = orders.read(tile_use, TOKEN)
        num_tokens = orders.read(tile_use, NUM_TOKENS)
        head = orders.read(tile_use, HEAD)
        q_ring.turns.release(0, tile_use)

        # The last values are multiplied while the next queries begin. After the last of all
        # tiles, what is in memory plays the next: it costs nothing, and nobody looks at it.
        tile_use += 1
        q_ring.turns.wait_full(0, tile_use)
        num_tiles = orders.read(tile_use, NUM_TILES)
        s, acc = _multiply(
            q_ring.tile(tile_use, WG), k_ring, v_ring, use, p, acc, num_tiles > 0, form, WG
        )
        slope = _find_slope(s, scoring, num_tiles > 0, orders, tile_use, form)
        weights, reach, next_m, next_l = _begin(s, orders, tile_use, scoring, slope, form, WG)
        acc = _wait_for(acc)
        v_ring.turns.release(0, use)
        use += 1
        finish(
            out, staged, lse, sinks, num_heads, token_stride, head_stride, first, num_tokens,
            head, acc, m, l, form, WG,
        )  # fmt: skip
        m = next_m
        l = next_l
    if form.STAGED:
        tma.store_wait(0)


@gluon.jit
def _begin(s, orders, tile_use, scoring, slope, form, WG: gl.constexpr):
    """From the scores of a row's rightmost keys to weights, and the state of the softmax."""
    ROW: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    reach = gl.arange(0, ROWS, ROW) // form.PACK
    reach += orders.read(tile_use, REACH) + WG * (ROWS // form.PACK)
    s = _bend(s, reach, orders.read(tile_use, LAST), scoring, slope, True, form)
    m = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    l = gl.zeros([ROWS], gl.float32, ROW)
    weights, _, m, l = weigh(s, m, l, scoring.scale)
    return weights, reach, m, l


@gluon.jit
def _find_slope(s, scoring, exists, orders, tile_use, form):
    """ALiBi's slope for each row of a tile, in units of its scores; 0.0 if there are none."""
    slope = 0.0
    if form.HAS_ALIBI:
        at = gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout)) % form.PACK
        at += orders.read(tile_use, HEAD) * form.PACK
        slope = gl.load(scoring.slopes + at, exists, other=0.0) * (LOG2_E / scoring.scale)
    return slope


@gluon.jit
def _bend(s, reach, last, scoring, slope, masked, form):
    """Products capped, biased and masked: scores but for ``scale``."""
    if form.HAS_CAP:
        if masked:
            s = hide(s, reach, scoring.window, last, 0.0, form.CAUSAL, form.HAS_WINDOW)
        s = cap(s, scoring.inner)
    if form.HAS_ALIBI:
        s = lean(s, reach, slope)
    if masked:
        s = hide(s, reach, scoring.window, last, float("-inf"), form.CAUSAL, form.HAS_WINDOW)
    return s


@gluon.jit
def _no_results(form):
    """Sums of values that nothing was added to: one for each part of a head's columns."""
    acc = ()
    for i in gl.static_range(num_parts(form.HEAD_SIZE)):
        acc = acc + (_zeros(part_size(form.HEAD_SIZE, i)),)  # type: ignore[assignment] # noqa: RUF005
    return acc


@gluon.jit
def _zeros(COLUMNS: gl.constexpr):
    return gl.zeros([ROWS, COLUMNS], gl.float32, product_layout(COLUMNS))


@gluon.jit
def _wait_for(acc):
    """Wait until the products with values are done."""
    done = warpgroup_mma_wait(0, deps=acc)
    if len(acc) == 1:
        done = (done,)
    return done


@gluon.jit
def _score(q, k, s, form):
    """Begin the product of queries and keys."""
    for i in gl.static_range(num_parts(form.HEAD_SIZE)):
        k_part = part_of(k, form.HEAD_SIZE, i).permute((1, 0))
        s = warpgroup_mma(part_of(q, form.HEAD_SIZE, i), k_part, s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def _add_values(p, v, acc, form):
    """Begin to add the values of a tile, weighted by ``pack``'s pairs."""
    sums = ()
    for i in gl.static_range(num_parts(form.HEAD_SIZE)):
        weights = unpack(p, v.dtype, gl.DotOperandLayout(0, acc[i].type.layout, 2))
        part = warpgroup_mma(weights, part_of(v, form.HEAD_SIZE, i), acc[i], is_async=True)
        sums = sums + (part,)  # type: ignore[assignment] # noqa: RUF005
    return sums


@gluon.jit
def _multiply(q, k_ring, v_ring, use, p, acc, has_next, form, WG: gl.constexpr):
    """Scores of the keys of the next use; the product with this use's values goes on."""
    TILE_N: gl.constexpr = k_ring.tiles.shape[1]
    S_LAYOUT: gl.constexpr = product_layout(TILE_N)
    s = gl.zeros([ROWS, TILE_N], gl.float32, S_LAYOUT)
    if has_next:
        k_ring.turns.wait_full(0, use + 1)
    if form.TAKE_TURNS:
        take_turn(WG)
    s = _score(q, k_ring.operand(use + 1, form.ATOMS), s, form)
    v_ring.turns.wait_full(0, use)
    acc = _add_values(p, v_ring.operand(use, form.ATOMS), acc, form)
    if form.TAKE_TURNS:
        pass_turn((WG + 1) % form.WARPGROUPS)
    s = warpgroup_mma_wait(num_parts(form.HEAD_SIZE), deps=(s,))  # all but the values' products
    if has_next:
        k_ring.turns.release(0, use + 1)
    return s, acc


@gluon.jit
def _walk(first, end, MASKED: gl.constexpr, state, what, WG: gl.constexpr):
    """Some tiles to the left; ``MASKED``: whether they need a mask, or None: those at the ends."""
    use, p, acc, m, l, reach = state
    q, k_ring, v_ring, first_full, first_left, scoring, slope, form = what
    for step in range(first, end):
        reach += k_ring.tiles.shape[1]
        masked = (step < first_full) | (step >= first_left) if MASKED is None else MASKED
        p, acc, m, l = _attend_tile(
            q, k_ring, v_ring, use, p, acc, m, l, reach, scoring, slope, masked, form, WG
        )
        use += 1
    return use, p, acc, m, l, reach


@gluon.jit
def _attend_tile(
    q, k_ring, v_ring, use, p, acc, m, l, reach, scoring, slope, masked, form,
    WG: gl.constexpr,
):  # fmt: skip
    """One step to the left: this use's values, and the softmax of the next use's scores."""
    TILE_N: gl.constexpr = k_ring.tiles.shape[1]
    s, acc = _multiply(q, k_ring, v_ring, use, p, acc, True, form, WG)
    s = _bend(s, reach, TILE_N, scoring, slope, masked, form)
    weights, decay, m, l = weigh(s, m, l, scoring.scale)
    acc = _wait_for(acc)
    v_ring.turns.release(0, use)
    return pack(weights, q.dtype), times(acc, decay), m, l


@gluon.jit
def _clear_rows(tile, first, form):
    """Zero a tile's rows from ``first`` to the end of its box."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    EIGHTS: gl.constexpr = tile.shape[0] // 8
    CHUNKS: gl.constexpr = tile.shape[1] // COLUMNS
    parts = tile._reinterpret(tile.dtype, [CHUNKS * EIGHTS, 8, COLUMNS], tile.layout)
    row = gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))[:, None]
    for i in range(first // 8, gl.cdiv(first, form.BOX) * (form.BOX // 8)):
        for c in gl.static_range(CHUNKS):
            part = parts.index(i * CHUNKS + c if form.ATOMS else c * EIGHTS + i)
            part.store(gl.where(row < first - i * 8, part.load(LAYOUT), 0.0))
    fence_async_shared()


@gluon.jit
def _compute_role_0(
    out, staged, lse, sinks, num_heads, token_stride, head_stride, scoring,
    orders, q_ring, k_ring, v_ring, form,
):  # fmt: skip
    _compute_role(
        out, staged, lse, sinks, num_heads, token_stride, head_stride, scoring,
        orders, q_ring, k_ring, v_ring, form, 0,
    )  # fmt: skip


@gluon.jit
def _compute_role_1(
    out, staged, lse, sinks, num_heads, token_stride, head_stride, scoring,
    orders, q_ring, k_ring, v_ring, form,
):  # fmt: skip
    _compute_role(
        out, staged, lse, sinks, num_heads, token_stride, head_stride, scoring,
        orders, q_ring, k_ring, v_ring, form, 1,
    )  # fmt: skip


@gluon.jit
def _compute_role_2(
    out, staged, lse, sinks, num_heads, token_stride, head_stride, scoring,
    orders, q_ring, k_ring, v_ring, form,
):  # fmt: skip
    _compute_role(
        out, staged, lse, sinks, num_heads, token_stride, head_stride, scoring,
        orders, q_ring, k_ring, v_ring, form, 2,
    )  # fmt: skip


@gluon.jit
def forward_kernel(
    # outputs
    out,  # [num_tokens, num_heads, head_size]
    out_desc,  # the same in boxes as q's, where results are STAGED
    lse,  # [num_tokens, num_heads] float32
    # inputs
    q_desc,  # [num_tokens, num_heads, head_size] in boxes of [64 / PACK, PACK, 64]
    k,  # [num_blocks, block_size, num_kv_heads, head_size] in boxes of [1, BOX, 1, 64]; or pointers
    v,
    slopes,  # [num_heads] float32, where it HAS_ALIBI
    sinks,  # [num_heads] float32, where it HAS_SINKS
    # metadata
    cu_seqlens_q,  # [num_seqs + 1]
    lengths,  # [num_seqs] keys of each sequence; or, of ragged ones, cu_seqlens_k [num_seqs + 1]
    block_tables,  # [num_seqs, max_blocks_per_seq]
    # scalars
    num_seqs,
    block_rows,
    num_heads,
    group,
    num_tiles,
    seq_tiles,
    section,
    short,
    window,
    scale,  # of products, or under a cap of their hyperbolic tangents
    inner,  # of products under a cap
    # strides
    table_stride,
    token_stride,
    head_stride,
    k_block,  # of the caches: where rows are gathered
    k_slot,
    k_head,
    v_block,
    v_slot,
    v_head,
    # constants
    HEAD_SIZE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    HAS_CAP: gl.constexpr,
    HAS_ALIBI: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    UNIFORM: gl.constexpr,
    WIDTH: gl.constexpr,
    PACK: gl.constexpr,
    BOX: gl.constexpr,
    ATOMS: gl.constexpr,
    GATHER: gl.constexpr,
    TILE_N: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    Q_STAGES: gl.constexpr,
    STAGES: gl.constexpr,
    STAGED: gl.constexpr,
    TAKE_TURNS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Attention of every sequence's queries over its keys; see the top of the file."""
    form = Form(
        HEAD_SIZE, BLOCK_SIZE, BOX, ATOMS, GATHER, PACK, WARPGROUPS, CAUSAL, HAS_WINDOW,
        HAS_CAP, HAS_ALIBI, HAS_SINKS, UNIFORM, STAGED, TAKE_TURNS,
    )  # fmt: skip
    batch = Batch(
        cu_seqlens_q, lengths, block_tables, table_stride, num_seqs, block_rows,
        num_tiles, seq_tiles, section, num_heads // PACK, group, short, window,
    )  # fmt: skip
    scoring = Scoring(window, scale, inner, slopes)
    q_ring = make_ring(q_desc.dtype, ROWS, WIDTH, Q_STAGES, WARPGROUPS, WARPGROUPS)
    k_ring = make_ring(q_desc.dtype, TILE_N, WIDTH, STAGES, 1, WARPGROUPS)
    v_ring = make_ring(q_desc.dtype, TILE_N, WIDTH, STAGES, 1, WARPGROUPS)
    orders = make_orders(Q_STAGES)
    staged = ()
    if STAGED:
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        staged = (  # type: ignore[assignment]
            out_desc, gl.allocate_shared_memory(q_desc.dtype, [WARPGROUPS, ROWS, WIDTH], LAYOUT)
        )  # fmt: skip
    if GATHER:
        k = make_pages(k, k_block, k_slot, k_head, TILE_N)
        v = make_pages(v, v_block, v_slot, v_head, TILE_N)
    fence_async_shared()
    compute = (
        out, staged, lse, sinks, num_heads, token_stride, head_stride, scoring,
        orders, q_ring, k_ring, v_ring, form,
    )  # fmt: skip
    # What the others leave of a multiprocessor's registers, which go round in eights.
    EVEN: gl.constexpr = 65536 // (WARPGROUPS + 1) // 128 // 8 * 8
    LOADING: gl.constexpr = GATHERING_WARPS if GATHER else 1
    LOAD: gl.constexpr = (WARPGROUPS + 1) * EVEN - WARPGROUPS * REGISTERS
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_compute_role_0, compute),
                (_compute_role_1, compute),
                (load_keys_role, (q_desc, k, batch, orders, q_ring, k_ring, form)),
                (load_values_role, (v, batch, v_ring, form)),
            ],
            [4, LOADING, LOADING],
            [REGISTERS, LOAD, LOAD],
        )
    else:
        gl.warp_specialize(
            [
                (_compute_role_0, compute),
                (_compute_role_1, compute),
                (_compute_role_2, compute),
                (load_keys_role, (q_desc, k, batch, orders, q_ring, k_ring, form)),
                (load_values_role, (v, batch, v_ring, form)),
            ],
            [4, 4, LOADING, LOADING],
            [REGISTERS, REGISTERS, LOAD, LOAD],
        )

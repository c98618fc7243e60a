"""Attention forward on Hopper with warp specialisation: loading warps and 2 or 3 warpgroups.

::

    out[r] = Σ_n p[r, n] v[n] / l[r],  p[r, n] = 2 ** (s[r, n] - m[r]),  s = q · k · scale · log2 e

The grid is persistent: a program computes tiles of queries one after another (``schedule``). Each
warpgroup has 64 of a tile's rows, tokens × ``PACK`` heads (the last ``64 % PACK`` rows are empty:
whatever they hold stays in them, and is not stored), and visits the keys from right to left,
masked tiles first; a tile's last product overlaps the next tile's first::

    loading      Q K2 K1 K0 │ Q' K1' K0' │ ...      and  V2 V1 V0 │ V1' V0' │ ...
    computing    S2 softmax │ S1 O2 softmax │ S0 O1 softmax │ S1' O0 softmax' │ S0' O1' ...

While one warpgroup computes a softmax, another multiplies (``PINGPONG``). One warp loads keys and
one values by TMA, in boxes of ``BOX`` rows: a page, a part of one, or, for ragged tensors, a tile.
If boxes would be small, two warps each gather rows instead (``gather``); rows of 8-bit caches are
always gathered, and converted on the way (``PACKED``), unless the previous kernel unpacked them
(``WAITS``). With ``STAGED`` full tiles of results are stored by TMA. No NaN from outside of a
sequence enters a product: rows past its end are zeros, or if gathered repeat the last key. If tiles
are few, programs may split a tile's keys (``SPLITS``, see ``splits`` and ``merge``). If queries
have a single slot in shared memory, a warpgroup releases its part after its last product with keys
(``EARLY``), so that the next queries arrive while it multiplies the last values.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .finish import finish, times
from .gather import GATHERING_WARPS, make_pages
from .gather_packed import HeadScales, make_token_scales
from .layouts import num_parts, part_of, part_size, product_layout
from .load import (
    CAUSAL_LIMIT,
    COLUMNS,
    COUNT,
    HEAD,
    K_SCALE,
    NUM_FULL,
    NUM_KEYS,
    NUM_RIGHT,
    NUM_TILES,
    NUM_TOKENS,
    RECORD,
    ROWS,
    SLOT,
    SPLIT,
    TOKEN,
    V_SCALE,
    KernelConfig,
    load_keys_role,
    load_values_role,
)
from .merge import finish_split
from .ring import make_ring
from .roles import specialise
from .schedule import LIST_FIELDS, Batch, TileLists, make_tile_metadata, make_tile_queue
from .softmax import (
    LOG2_E,
    Scoring,
    add_alibi,
    apply_mask,
    bound_of,
    bounded_weights,
    cap,
    pack,
    scheduler_arrive,
    scheduler_wait,
    unpack,
    update_softmax,
    warpgroup_barrier,
)
from .splits import make_last_wave, make_split_schedule


@gluon.jit
def _compute_role(
    out, staged, lse, sinks, num_heads, token_stride, head_stride, scoring, schedule,
    metadata, q_ring, k_ring, v_ring, k_scales, config, warpgroup,
):  # fmt: skip
    """One warpgroup: compute its rows of every tile."""
    WG: gl.constexpr = warpgroup.INDEX
    TILE_N: gl.constexpr = k_ring.tiles.shape[1]
    WIDTH: gl.constexpr = max(k_ring.tiles.shape[2] * config.KEY_TILES, v_ring.tiles.shape[2])
    S_LAYOUT: gl.constexpr = product_layout(TILE_N)
    if config.PINGPONG and WG == config.WARPGROUPS - 1:
        scheduler_arrive(0)
    STREAM: gl.constexpr = WG if config.EARLY else 0
    RELEASES_Q: gl.constexpr = config.EARLY and not config.HOLDS_Q
    tile_use = 0
    use = 0
    q_ring.barriers.wait_full(STREAM, tile_use)
    num_tiles = metadata.read(tile_use, NUM_TILES)
    if num_tiles > 0:
        k_ring.barriers.wait_full(0, use)
    s = gl.zeros([ROWS, TILE_N], gl.float32, S_LAYOUT)
    q = _take_queries(q_ring, tile_use, k_ring, config, WG)
    s = _score(q, _find_keys(k_ring, use, config), s, config)
    s = warpgroup_mma_wait(0, deps=(s,))
    if num_tiles > 0:
        k_ring.barriers.release(0, use)
    if RELEASES_Q:
        q_ring.barriers.release_if(STREAM, tile_use, num_tiles == 1)
    s = _scale_keys(s, k_scales, use)
    given = scoring
    scoring = _scale_scores(given, metadata, tile_use, config)
    slope = _find_slope(s, scoring, num_tiles > 0, metadata, tile_use, config)
    weights, causal_limit, m, l = _first_softmax(s, metadata, tile_use, scoring, slope, config, WG)
    while num_tiles > 0:
        if not config.HOLDS_Q:
            q = _find_queries(q_ring, tile_use, config, WG)
        p = pack(weights, v_ring.tiles.dtype)
        acc = _no_results(config)
        num_keys = metadata.read(tile_use, NUM_KEYS)
        if not config.GATHER and num_keys < TILE_N:
            v_ring.barriers.wait_full(0, use)
            if WG == 0:
                _clear_rows(v_ring.tile(use, 0), gl.maximum(num_keys, 0), config)
            warpgroup_barrier(config.WARPGROUPS)
        first_full = metadata.read(tile_use, NUM_RIGHT)
        first_left = first_full + metadata.read(tile_use, NUM_FULL)
        # A separate loop over tiles without a mask would be faster, but with heads of up to 128
        # ptxas reloads the queries' descriptor between the two loops.
        state = (use, p, acc, m, l, causal_limit)
        listed = scoring.lists
        if config.SPARSE and (config.CAUSAL or config.HAS_WINDOW or config.HAS_ALIBI):
            listed += metadata.read(tile_use, RECORD) + LIST_FIELDS
            # From here on ``causal_limit`` counts from the sequence's first key.
            causal_limit += gl.load(listed) * TILE_N
            state = (use, p, acc, m, l, causal_limit)
        operands = (
            q, k_ring, v_ring, k_scales, first_full, first_left, listed, scoring, slope, config,
            q_ring, tile_use, num_tiles - 2,
        )  # fmt: skip
        if WIDTH <= 128:
            state = _attend_tiles(0, num_tiles - 1, None, state, operands, WG)
        else:
            if config.CAUSAL or (config.SPARSE and config.HAS_WINDOW):
                state = _attend_tiles(0, first_full, True, state, operands, WG)
            state = _attend_tiles(first_full, first_left, False, state, operands, WG)
            if config.HAS_WINDOW and not config.SPARSE:
                state = _attend_tiles(first_left, num_tiles - 1, True, state, operands, WG)
        use, p, acc, m, l, _ = state
        first = metadata.read(tile_use, TOKEN)
        num_tokens = metadata.read(tile_use, NUM_TOKENS)
        head = metadata.read(tile_use, HEAD)
        if config.SPLITS:
            place = (
                metadata.read(tile_use, SPLIT), metadata.read(tile_use, COUNT),
                metadata.read(tile_use, SLOT),
            )  # fmt: skip
        if config.SCALES == "head":
            v_scale = metadata.read(tile_use, V_SCALE).to(gl.float32, bitcast=True)
        if not config.EARLY:
            q_ring.barriers.release(0, tile_use)

        # The last product with values overlaps the next tile's first product with keys. After the
        # last tile that is one extra product on stale data, whose result is discarded.
        tile_use += 1
        if RELEASES_Q:  # this product runs while the next queries are loaded
            if config.PINGPONG:
                scheduler_wait(WG)
            v_ring.barriers.wait_full(0, use)
            acc = _add_values(p, v_ring.operand(use, config.ATOMS), acc, config)
        q_ring.barriers.wait_full(STREAM, tile_use)
        num_tiles = metadata.read(tile_use, NUM_TILES)
        q = _take_queries(q_ring, tile_use, k_ring, config, WG)
        if RELEASES_Q:
            s, acc = _score_next(q, k_ring, use, acc, num_tiles > 0, config, WG)
            q_ring.barriers.release_if(STREAM, tile_use, num_tiles == 1)
        else:
            s, acc = _multiply(q, k_ring, v_ring, use, p, acc, num_tiles > 0, config, WG)
        s = _scale_keys(s, k_scales, use + 1)
        scoring = _scale_scores(given, metadata, tile_use, config)
        slope = _find_slope(s, scoring, num_tiles > 0, metadata, tile_use, config)
        weights, causal_limit, next_m, next_l = _first_softmax(
            s, metadata, tile_use, scoring, slope, config, WG
        )
        acc = _wait_for(acc)
        v_ring.barriers.release(0, use)
        use += 1
        if config.BOUNDED:
            m = bound_of(l, scoring.scale)
        if config.SCALES == "head":
            acc = times(acc, gl.where(l == 0.0, 0.0, v_scale))
        if config.SPLITS:
            finish_split(
                out, staged, lse, sinks, num_heads, token_stride, head_stride, first, num_tokens,
                head, acc, m, l, place, schedule, v_ring.tiles.shape[2], config, WG,
            )  # fmt: skip
        else:
            finish(
                out, staged, lse, sinks, num_heads, token_stride, head_stride, first, num_tokens,
                head, acc, m, l, config, WG,
            )  # fmt: skip
        m = next_m
        l = next_l
    if config.STAGED:
        tma.store_wait(0)


@gluon.jit
def _first_softmax(s, metadata, tile_use, scoring, slope, config, WG: gl.constexpr):
    """Return the weights of a tile's rightmost keys, and the softmax's state after them."""
    ROW: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    # A thread has rows n and n + 8. Where their tokens are not a constant number apart, both rows'
    # limits would take a register in the loop, so this is the first row's: see _find_row_limits.
    causal_limit = 0
    if ROWS % config.PACK == 0:
        causal_limit = gl.arange(0, ROWS, ROW) // config.PACK
    causal_limit += metadata.read(tile_use, CAUSAL_LIMIT) + WG * (ROWS // config.PACK)
    num_keys = metadata.read(tile_use, NUM_KEYS)
    m = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    l = gl.zeros([ROWS], gl.float32, ROW)
    if config.BOUNDED:
        weights, l = _update_bounded_softmax(s, l, causal_limit, num_keys, scoring, True, config)
    else:
        s = _apply_score_mods(s, causal_limit, num_keys, scoring, slope, True, config)
        weights, _, m, l = update_softmax(s, m, l, scoring.scale)
    return weights, causal_limit, m, l


@gluon.jit
def _scale_keys(s, k_scales, use):
    """Multiply products by each key's scale, with scales per token."""
    if len(k_scales) > 0:
        scale = k_scales[0].of_use(use).load(gl.SliceLayout(0, s.type.layout))
        s *= scale[None, :]
    return s


@gluon.jit
def _scale_scores(scoring, metadata, tile_use, config):
    """Include the scale of the tile's KV head in the scoring, with scales per head."""
    if config.SCALES == "head":
        scale = metadata.read(tile_use, K_SCALE).to(gl.float32, bitcast=True)
        scoring = scoring.times(scale, config.HAS_CAP)
    return scoring


@gluon.jit
def _find_slope(s, scoring, exists, metadata, tile_use, config):
    """ALiBi's slope for each row of a tile, divided by the scale of scores; 0.0 without ALiBi."""
    slope = 0.0
    if config.HAS_ALIBI:
        at = gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout)) % config.PACK
        at += metadata.read(tile_use, HEAD) * config.PACK
        slope = gl.load(scoring.slopes + at, exists, other=0.0) * (LOG2_E / scoring.scale)
    return slope


@gluon.jit
def _find_row_limits(causal_limit, s, config):
    """Each row's own key."""
    if ROWS % config.PACK > 0:
        row = gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout))
        causal_limit = row // config.PACK + causal_limit
    return causal_limit


@gluon.jit
def _apply_score_mods(s, causal_limit, num_keys, scoring, slope, masked, config):
    """Apply cap, ALiBi and mask to products; ``scale`` is applied later."""
    causal_limit = _find_row_limits(causal_limit, s, config)
    if config.HAS_CAP:
        if masked:
            s = apply_mask(
                s, causal_limit, scoring.window, num_keys, 0.0, config.CAUSAL, config.HAS_WINDOW
            )
        s = cap(s, scoring.inner)
    if config.HAS_ALIBI:
        s = add_alibi(s, causal_limit, slope)
    if masked:
        s = apply_mask(
            s,
            causal_limit,
            scoring.window,
            num_keys,
            float("-inf"),
            config.CAUSAL,
            config.HAS_WINDOW,
        )
    return s


@gluon.jit
def _update_bounded_softmax(s, l, causal_limit, num_keys, scoring, masked, config):
    """Return the weights of a tile's capped and masked products, and the new sum of each row.

    A capped score is bounded, so there is no maximum and no rescaling. The mask comes after the
    exponentials: a branch between them and ``cap`` would keep them from overlapping.
    """
    causal_limit = _find_row_limits(causal_limit, s, config)
    if masked:
        s = apply_mask(
            s, causal_limit, scoring.window, num_keys, 0.0, config.CAUSAL, config.HAS_WINDOW
        )
    weights = bounded_weights(cap(s, scoring.inner), scoring.scale)
    if masked:
        weights = apply_mask(
            weights, causal_limit, scoring.window, num_keys, 0.0, config.CAUSAL, config.HAS_WINDOW
        )
    return weights, l + gl.sum(weights, 1)


@gluon.jit
def _no_results(config):
    """Return zero accumulators, one for each part of a head's columns."""
    acc = ()
    for i in gl.static_range(num_parts(config.V_SIZE)):
        acc = acc + (_zeros(part_size(config.V_SIZE, i)),)  # type: ignore[assignment] # noqa: RUF005
    return acc


@gluon.jit
def _zeros(COLUMNS: gl.constexpr):
    return gl.zeros([ROWS, COLUMNS], gl.float32, product_layout(COLUMNS))


@gluon.jit
def _wait_for(acc):
    """Wait for the products with values."""
    done = warpgroup_mma_wait(0, deps=acc)
    if len(acc) == 1:
        done = (done,)
    return done


@gluon.jit
def _find_queries(ring, use, config, WG: gl.constexpr):
    """A warpgroup's queries in shared memory: a tile, or a tuple of ``KEY_TILES``."""
    tiles = ring.tile(use, WG * config.KEY_TILES)
    if config.KEY_TILES > 1:
        tiles = (tiles,)
        for i in gl.static_range(1, config.KEY_TILES):
            tiles = tiles + (ring.tile(use, WG * config.KEY_TILES + i),)  # noqa: RUF005
    return tiles


@gluon.jit
def _take_queries(ring, use, k_ring, config, WG: gl.constexpr):
    """A warpgroup's queries: in shared memory or, with ``HOLDS_Q``, as parts in registers."""
    q = _find_queries(ring, use, config, WG)
    if config.HOLDS_Q:
        LAYOUT: gl.constexpr = gl.DotOperandLayout(0, product_layout(k_ring.tiles.shape[1]), 2)
        parts = ()
        for i in gl.static_range(num_parts(config.HEAD_SIZE)):
            parts = parts + (part_of(q, config.HEAD_SIZE, i).load(LAYOUT),)  # type: ignore[assignment] # noqa: RUF005
        ring.barriers.release(WG, use)
        q = parts
    return q


@gluon.jit
def _find_keys(ring, use, config):
    """A use's keys as operands: a tile, or a tuple of ``KEY_TILES``."""
    tiles = ring.operand(use, config.ATOMS)
    if config.KEY_TILES > 1:
        tiles = (tiles,)
        for i in gl.static_range(1, config.KEY_TILES):
            tiles = tiles + (ring.tile(use, i),)  # noqa: RUF005
    return tiles


@gluon.jit
def _score(q, k, s, config):
    """Start the product of queries and keys."""
    SIZE: gl.constexpr = config.HEAD_SIZE
    TILES: gl.constexpr = config.KEY_TILES
    for i in gl.static_range(num_parts(SIZE, TILES)):
        q_part = q[i] if config.HOLDS_Q else part_of(q[i] if TILES > 1 else q, SIZE, i, TILES)
        k_part = part_of(k[i] if TILES > 1 else k, SIZE, i, TILES).permute((1, 0))
        s = warpgroup_mma(q_part, k_part, s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def _add_values(p, v, acc, config):
    """Start adding a tile's values, weighted by the result of ``pack``."""
    sums = ()
    for i in gl.static_range(num_parts(config.V_SIZE)):
        weights = unpack(p, v.dtype, gl.DotOperandLayout(0, acc[i].type.layout, 2))
        part = warpgroup_mma(weights, part_of(v, config.V_SIZE, i), acc[i], is_async=True)
        sums = sums + (part,)  # type: ignore[assignment] # noqa: RUF005
    return sums


@gluon.jit
def _multiply(q, k_ring, v_ring, use, p, acc, has_next, config, WG: gl.constexpr):
    """Return the scores of the next use's keys; the product with this use's values is in flight."""
    TILE_N: gl.constexpr = k_ring.tiles.shape[1]
    S_LAYOUT: gl.constexpr = product_layout(TILE_N)
    s = gl.zeros([ROWS, TILE_N], gl.float32, S_LAYOUT)
    if has_next:
        k_ring.barriers.wait_full(0, use + 1)
    if config.PINGPONG:
        scheduler_wait(WG)
    s = _score(q, _find_keys(k_ring, use + 1, config), s, config)
    v_ring.barriers.wait_full(0, use)
    acc = _add_values(p, v_ring.operand(use, config.ATOMS), acc, config)
    if config.PINGPONG:
        scheduler_arrive((WG + 1) % config.WARPGROUPS)
    s = warpgroup_mma_wait(num_parts(config.V_SIZE), deps=(s,))  # but not for the values' products
    if has_next:
        k_ring.barriers.release(0, use + 1)
    return s, acc


@gluon.jit
def _score_next(q, k_ring, use, acc, has_next, config, WG: gl.constexpr):
    """Return the scores of the next tile's first keys, after the product in flight."""
    TILE_N: gl.constexpr = k_ring.tiles.shape[1]
    s = gl.zeros([ROWS, TILE_N], gl.float32, product_layout(TILE_N))
    if has_next:
        k_ring.barriers.wait_full(0, use + 1)
    s = _score(q, _find_keys(k_ring, use + 1, config), s, config)
    if config.PINGPONG:
        scheduler_arrive((WG + 1) % config.WARPGROUPS)
    if len(acc) == 1:
        s, first = warpgroup_mma_wait(0, deps=(s, acc[0]))
        acc = (first,)
    else:
        s, first, second = warpgroup_mma_wait(0, deps=(s, acc[0], acc[1]))
        acc = (first, second)
    if has_next:
        k_ring.barriers.release(0, use + 1)
    return s, acc


@gluon.jit
def _attend_tiles(first, end, MASKED: gl.constexpr, state, operands, WG: gl.constexpr):
    """Attend to key tiles ``first`` to ``end``, right to left; ``MASKED``: None masks both ends."""
    use, p, acc, m, l, causal_limit = state
    (
        q, k_ring, v_ring, k_scales, first_full, first_left, listed, scoring, slope, config,
        q_ring, tile_use, last_step,
    ) = operands  # fmt: skip
    for step in range(first, end):
        limit = causal_limit
        if config.SPARSE:
            if config.CAUSAL or config.HAS_WINDOW or config.HAS_ALIBI:
                limit = causal_limit - gl.load(listed + step + 1) * k_ring.tiles.shape[1]
        else:
            causal_limit += k_ring.tiles.shape[1]
            limit = causal_limit
        masked = (step < first_full) | (step >= first_left) if MASKED is None else MASKED
        p, acc, m, l = _attend_tile(
            q, k_ring, v_ring, k_scales, use, p, acc, m, l, limit, scoring, slope, masked, config,
            WG, q_ring, tile_use, step == last_step,
        )  # fmt: skip
        use += 1
    return use, p, acc, m, l, causal_limit


@gluon.jit
def _attend_tile(
    q, k_ring, v_ring, k_scales, use, p, acc, m, l, causal_limit, scoring, slope, masked, config,
    WG: gl.constexpr, q_ring, tile_use, is_last,
):  # fmt: skip
    """One step: the product with this use's values, and the softmax of the next use's scores."""
    TILE_N: gl.constexpr = k_ring.tiles.shape[1]
    s, acc = _multiply(q, k_ring, v_ring, use, p, acc, True, config, WG)
    if config.EARLY and not config.HOLDS_Q:
        q_ring.barriers.release_if(WG, tile_use, is_last)
    s = _scale_keys(s, k_scales, use + 1)
    if config.BOUNDED:
        weights, l = _update_bounded_softmax(s, l, causal_limit, TILE_N, scoring, masked, config)
        acc = _wait_for(acc)
        v_ring.barriers.release(0, use)
    else:
        s = _apply_score_mods(s, causal_limit, TILE_N, scoring, slope, masked, config)
        weights, decay, m, l = update_softmax(s, m, l, scoring.scale)
        acc = _wait_for(acc)
        v_ring.barriers.release(0, use)
        acc = times(acc, decay)
    return pack(weights, v_ring.tiles.dtype), acc, m, l


@gluon.jit
def _clear_rows(tile, first, config):
    """Zero a tile's rows from ``first`` to the end of their box."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    EIGHTS: gl.constexpr = tile.shape[0] // 8
    CHUNKS: gl.constexpr = tile.shape[1] // COLUMNS
    parts = tile._reinterpret(tile.dtype, [CHUNKS * EIGHTS, 8, COLUMNS], tile.layout)
    row = gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))[:, None]
    for i in range(first // 8, gl.cdiv(first, config.BOX) * (config.BOX // 8)):
        for c in gl.static_range(CHUNKS):
            part = parts.index(i * CHUNKS + c if config.ATOMS else c * EIGHTS + i)
            part.store(gl.where(row < first - i * 8, part.load(LAYOUT), 0.0))
    fence_async_shared()


@gluon.jit
def forward_kernel(
    # outputs
    out,  # [num_tokens, num_heads, V_SIZE]
    out_desc,  # out in boxes like q's, if STAGED
    lse,  # [num_tokens, num_heads] float32
    # inputs
    q_desc,  # [num_tokens, num_heads, head_size] in boxes of [64 // PACK, PACK, 64]
    k,  # [num_blocks, block_size, num_kv_heads, head_size] in boxes of [1, BOX, 1, 64]; or pointers
    v,
    slopes,  # [num_heads] float32, if HAS_ALIBI
    sinks,  # [num_heads] float32, if HAS_SINKS
    # metadata
    cu_seqlens_q,  # [num_seqs + 1]
    lengths,  # seq_lens [num_seqs] if paged, else cu_seqlens_k [num_seqs + 1]
    block_tables,  # [num_seqs, max_blocks_per_seq]
    lists,  # int32 [num_seqs or 1, num_heads or 1, seq_tiles, list_pitch], if SPARSE
    drawn,  # int32 [1] of 0, left as 0, if DRAWS: see ``TileQueue``
    # scalars
    num_seqs,
    block_rows,
    num_heads,
    group,
    num_tiles,
    seq_tiles,
    short,
    window,
    scale,  # of products; with a cap, of their tanh
    inner,  # of products before tanh, with a cap
    list_pitch,
    # strides
    list_seq,  # in records
    list_head,
    table_stride,
    token_stride,
    head_stride,
    k_block,  # of the caches, if GATHER
    k_slot,
    k_head,
    v_block,
    v_slot,
    v_head,
    # scales of packed caches
    k_scale,  # float32 [num_kv_heads] or [num_blocks, block_size, num_kv_heads]
    v_scale,
    ks_block,
    ks_slot,
    ks_head,
    vs_block,
    vs_slot,
    vs_head,
    # scratch memory if SPLITS: see ``SplitSchedule``
    accs,
    sums,
    arrivals,
    # constants
    HEAD_SIZE: gl.constexpr,
    V_SIZE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    HAS_CAP: gl.constexpr,
    HAS_ALIBI: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    UNIFORM: gl.constexpr,
    WIDTH: gl.constexpr,
    V_WIDTH: gl.constexpr,
    KEY_TILES: gl.constexpr,
    PACK: gl.constexpr,
    BOX: gl.constexpr,
    ATOMS: gl.constexpr,
    GATHER: gl.constexpr,
    TILE_N: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    Q_STAGES: gl.constexpr,
    STAGES: gl.constexpr,
    STAGED: gl.constexpr,
    PINGPONG: gl.constexpr,
    REGISTERS: gl.constexpr,
    SPARSE: gl.constexpr,
    SPLITS: gl.constexpr,
    DRAWS: gl.constexpr,
    EARLY: gl.constexpr,
    HOLDS_Q: gl.constexpr,
    PACKED: gl.constexpr,
    SCALES: gl.constexpr,
    WAITS: gl.constexpr,  # whether it is launched before the previous kernel ends
):
    """See the module docstring. Grid: at most one program per multiprocessor."""
    gdc_launch_dependents()
    # float16 holds all 8-bit values, and converting to it takes fewer instructions than bfloat16.
    V_DTYPE: gl.constexpr = gl.float16 if SCALES == "head" else q_desc.dtype
    BOUNDED: gl.constexpr = HAS_CAP and not HAS_ALIBI and gl.bfloat16 == V_DTYPE
    config = KernelConfig(
        HEAD_SIZE, V_SIZE, BLOCK_SIZE, BOX, ATOMS, GATHER, PACK, WARPGROUPS,
        WARPGROUPS * (ROWS // PACK), CAUSAL, HAS_WINDOW, HAS_CAP, HAS_ALIBI, HAS_SINKS, UNIFORM,
        STAGED, PINGPONG, SPARSE, SPLITS, KEY_TILES, DRAWS, EARLY, PACKED, SCALES, HOLDS_Q, BOUNDED,
    )  # fmt: skip
    batch = Batch(
        cu_seqlens_q, lengths, block_tables, table_stride, num_seqs, block_rows,
        num_tiles, seq_tiles, num_heads // PACK, group, short, window,
        TileLists(lists, list_seq, list_head, list_pitch),
    )  # fmt: skip
    scoring = Scoring(window, scale, inner, slopes, lists)
    q_ring = make_ring(
        q_desc.dtype,
        ROWS,
        WIDTH,
        Q_STAGES,
        WARPGROUPS * KEY_TILES,
        1 if EARLY else WARPGROUPS,
        WARPGROUPS if EARLY else 1,
    )
    k_ring = make_ring(q_desc.dtype, TILE_N, WIDTH, STAGES, KEY_TILES, WARPGROUPS)
    v_ring = make_ring(V_DTYPE, TILE_N, V_WIDTH, STAGES, 1, WARPGROUPS)
    metadata = make_tile_metadata(
        4 if EARLY else Q_STAGES, 16 if SPARSE or SPLITS or SCALES == "head" else 8
    )
    schedule = ()
    if SPLITS and DRAWS:
        schedule = make_last_wave(
            batch, accs, sums, arrivals, config.TOKENS, TILE_N, V_WIDTH, config
        )
    elif SPLITS:
        schedule = make_split_schedule(
            batch, accs, sums, arrivals, config.TOKENS, TILE_N, V_WIDTH, CAUSAL,
            HAS_WINDOW,
        )  # fmt: skip
    queue = ()
    if DRAWS:
        queue = make_tile_queue(drawn)
    staged = ()
    if STAGED:
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        staged = (  # type: ignore[assignment]
            out_desc, gl.allocate_shared_memory(q_desc.dtype, [WARPGROUPS, ROWS, V_WIDTH], LAYOUT)
        )  # fmt: skip
    if GATHER:
        k = make_pages(k, k_block, k_slot, k_head, TILE_N)
        v = make_pages(v, v_block, v_slot, v_head, TILE_N)
    k_scales = ()
    if SCALES == "head":
        k, v = (k, (HeadScales(k_scale, v_scale, ks_head, vs_head),)), (v, ())
    elif SCALES == "token":
        of_keys = make_token_scales(
            k_scale, ks_block, ks_slot, ks_head, TILE_N, 2 * STAGES, False
        )  # fmt: skip
        of_values = make_token_scales(v_scale, vs_block, vs_slot, vs_head, TILE_N, 1, True)
        k_scales = (of_keys,)  # type: ignore[assignment]
        k, v = (k, k_scales), (v, (of_values,))
    fence_async_shared()
    if WAITS:  # only lengths have been read so far, which the previous kernel does not write
        gdc_wait()
    compute = (
        out, staged, lse, sinks, num_heads, token_stride, head_stride, scoring, schedule,
        metadata, q_ring, k_ring, v_ring, k_scales, config,
    )  # fmt: skip
    # Loading warps get the registers that warpgroups leave, in multiples of eight.
    EVEN: gl.constexpr = 65536 // (WARPGROUPS + 1) // 128 // 8 * 8
    LOADING: gl.constexpr = GATHERING_WARPS if GATHER else 1
    LOAD: gl.constexpr = (WARPGROUPS + 1) * EVEN - WARPGROUPS * REGISTERS
    keys = q_desc, k, batch, schedule, queue, metadata, q_ring, k_ring, config
    values = v, batch, schedule, queue, v_ring, config
    specialise(
        _compute_role, compute, WARPGROUPS, 4, REGISTERS,
        [(load_keys_role, keys), (load_values_role, values)], LOADING, LOAD,
    )  # fmt: skip

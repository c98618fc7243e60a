"""The computing warpgroups of the forward kernel."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_wait

from .config import ROWS
from .finish import finish, times
from .layouts import product_layout
from .merge import finish_split
from .metadata import (
    COUNT,
    HEAD,
    NUM_FULL,
    NUM_KEYS,
    NUM_RIGHT,
    NUM_TILES,
    NUM_TOKENS,
    RECORD,
    SLOT,
    SPLIT,
    TOKEN,
    V_SCALE,
)
from .products import (
    add_values,
    clear_rows,
    find_keys,
    find_queries,
    multiply_next,
    no_results,
    score_next,
    start_scores,
    take_queries,
    wait_for_values,
)
from .roles import scheduler_arrive, scheduler_wait, warpgroup_barrier
from .schedule import LIST_FIELDS
from .scores import finish_scores, scale_keys, start_softmax, update_bounded_softmax
from .softmax import bound_of, pack, update_softmax


@gluon.jit
def compute_role(
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
    # After the last tile a softmax takes a microsecond for nothing. Where threads hold queries, a
    # branch around it makes every tile 2 % slower (heads of 80, H200). With splits or 8-bit caches
    # ptxas would read registers there that it has not written.
    SKIPS: gl.constexpr = not (config.HOLDS_Q or config.SPLITS or config.PACKED != "none")
    tile_use = 0
    use = 0
    q_ring.barriers.wait_full(STREAM, tile_use)
    num_tiles = metadata.read(tile_use, NUM_TILES)
    if num_tiles > 0:
        k_ring.barriers.wait_full(0, use)
    s = gl.zeros([ROWS, TILE_N], gl.float32, S_LAYOUT)
    q = take_queries(q_ring, tile_use, k_ring, config, WG)
    s = start_scores(q, find_keys(k_ring, use, config), s, config)
    s = warpgroup_mma_wait(0, deps=(s,))
    if num_tiles > 0:
        k_ring.barriers.release(0, use)
    if RELEASES_Q:
        q_ring.barriers.release_if(STREAM, tile_use, num_tiles == 1)
    given = scoring
    scoring, slope, weights, causal_limit, m, l = start_softmax(
        s, k_scales, use, given, num_tiles > 0, False, metadata, tile_use, config, WG
    )
    while num_tiles > 0:
        if not config.HOLDS_Q:
            q = find_queries(q_ring, tile_use, config, WG)
        p = pack(weights, v_ring.tiles.dtype)
        acc = no_results(config)
        num_keys = metadata.read(tile_use, NUM_KEYS)
        if not config.GATHER and num_keys < TILE_N:
            v_ring.barriers.wait_full(0, use)
            if WG == 0:
                clear_rows(v_ring.tile(use, 0), gl.maximum(num_keys, 0), config)
            warpgroup_barrier(config.WARPGROUPS)
        first_full = metadata.read(tile_use, NUM_RIGHT)
        first_left = first_full + metadata.read(tile_use, NUM_FULL)
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
        # Separate loops over tiles with and without a mask are faster, but with heads of up to 128
        # ptxas reloads the queries' descriptor between two loops.
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
            acc = add_values(p, v_ring.operand(use, config.ATOMS), acc, config)
        q_ring.barriers.wait_full(STREAM, tile_use)
        num_tiles = metadata.read(tile_use, NUM_TILES)
        q = take_queries(q_ring, tile_use, k_ring, config, WG)
        if RELEASES_Q:
            s, acc = score_next(q, k_ring, use, acc, num_tiles > 0, config, WG)
            q_ring.barriers.release_if(STREAM, tile_use, num_tiles == 1)
        else:
            s, acc = multiply_next(q, k_ring, v_ring, use, p, acc, num_tiles > 0, config, WG)
        scoring, slope, weights, causal_limit, next_m, next_l = start_softmax(
            s, k_scales, use + 1, given, num_tiles > 0, SKIPS, metadata, tile_use, config, WG
        )
        acc = wait_for_values(acc)
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
    s, acc = multiply_next(q, k_ring, v_ring, use, p, acc, True, config, WG)
    if config.EARLY and not config.HOLDS_Q:
        q_ring.barriers.release_if(WG, tile_use, is_last)
    s = scale_keys(s, k_scales, use + 1)
    if config.BOUNDED:
        weights, l = update_bounded_softmax(s, l, causal_limit, TILE_N, scoring, masked, config)
        acc = wait_for_values(acc)
        v_ring.barriers.release(0, use)
    else:
        s = finish_scores(s, causal_limit, TILE_N, scoring, slope, masked, config)
        weights, decay, m, l = update_softmax(s, m, l, scoring.scale)
        acc = wait_for_values(acc)
        v_ring.barriers.release(0, use)
        acc = times(acc, decay)
    return pack(weights, v_ring.tiles.dtype), acc, m, l

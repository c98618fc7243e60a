"""Products of the forward kernel by ``wgmma``: scores of queries and keys, and sums of values."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .config import COLUMNS, ROWS
from .layouts import num_parts, part_of, part_size, product_layout
from .roles import scheduler_arrive, scheduler_wait
from .softmax import unpack


@gluon.jit
def take_queries(ring, use, k_ring, config, WG: gl.constexpr):
    """A warpgroup's queries: in shared memory or, with ``HOLDS_Q``, as parts in registers."""
    q = find_queries(ring, use, config, WG)
    if config.HOLDS_Q:
        LAYOUT: gl.constexpr = gl.DotOperandLayout(0, product_layout(k_ring.tiles.shape[1]), 2)
        parts = ()
        for i in gl.static_range(num_parts(config.HEAD_SIZE)):
            parts = parts + (part_of(q, config.HEAD_SIZE, i).load(LAYOUT),)  # type: ignore[assignment] # noqa: RUF005
        ring.barriers.release(WG, use)
        q = parts
    return q


@gluon.jit
def find_queries(ring, use, config, WG: gl.constexpr):
    """A warpgroup's queries in shared memory: a tile, or a tuple of ``KEY_TILES``."""
    tiles = ring.tile(use, WG * config.KEY_TILES)
    if config.KEY_TILES > 1:
        tiles = (tiles,)
        for i in gl.static_range(1, config.KEY_TILES):
            tiles = tiles + (ring.tile(use, WG * config.KEY_TILES + i),)  # noqa: RUF005
    return tiles


@gluon.jit
def find_keys(ring, use, config):
    """A use's keys as operands: a tile, or a tuple of ``KEY_TILES``."""
    tiles = ring.operand(use, config.ATOMS)
    if config.KEY_TILES > 1:
        tiles = (tiles,)
        for i in gl.static_range(1, config.KEY_TILES):
            tiles = tiles + (ring.tile(use, i),)  # noqa: RUF005
    return tiles


@gluon.jit
def start_scores(q, k, s, config):
    """Start the product of queries and keys."""
    SIZE: gl.constexpr = config.HEAD_SIZE
    TILES: gl.constexpr = config.KEY_TILES
    for i in gl.static_range(num_parts(SIZE, TILES)):
        q_part = q[i] if config.HOLDS_Q else part_of(q[i] if TILES > 1 else q, SIZE, i, TILES)
        k_part = part_of(k[i] if TILES > 1 else k, SIZE, i, TILES).permute((1, 0))
        s = warpgroup_mma(q_part, k_part, s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def add_values(p, v, acc, config):
    """Start adding a tile's values, weighted by the result of ``pack``."""
    sums = ()
    for i in gl.static_range(num_parts(config.V_SIZE)):
        weights = unpack(p, v.dtype, gl.DotOperandLayout(0, acc[i].type.layout, 2))
        part = warpgroup_mma(weights, part_of(v, config.V_SIZE, i), acc[i], is_async=True)
        sums = sums + (part,)  # type: ignore[assignment] # noqa: RUF005
    return sums


@gluon.jit
def multiply_next(q, k_ring, v_ring, use, p, acc, has_next, config, WG: gl.constexpr):
    """Return the scores of the next use's keys; the product with this use's values is in flight."""
    TILE_N: gl.constexpr = k_ring.tiles.shape[1]
    S_LAYOUT: gl.constexpr = product_layout(TILE_N)
    s = gl.zeros([ROWS, TILE_N], gl.float32, S_LAYOUT)
    if has_next:
        k_ring.barriers.wait_full(0, use + 1)
    if config.PINGPONG:
        scheduler_wait(WG)
    s = start_scores(q, find_keys(k_ring, use + 1, config), s, config)
    v_ring.barriers.wait_full(0, use)
    acc = add_values(p, v_ring.operand(use, config.ATOMS), acc, config)
    if config.PINGPONG:
        scheduler_arrive((WG + 1) % config.WARPGROUPS)
    s = warpgroup_mma_wait(num_parts(config.V_SIZE), deps=(s,))  # but not for the values' products
    if has_next:
        k_ring.barriers.release(0, use + 1)
    return s, acc


@gluon.jit
def score_next(q, k_ring, use, acc, has_next, config, WG: gl.constexpr):
    """Return the scores of the next tile's first keys, after the product in flight."""
    TILE_N: gl.constexpr = k_ring.tiles.shape[1]
    s = gl.zeros([ROWS, TILE_N], gl.float32, product_layout(TILE_N))
    if has_next:
        k_ring.barriers.wait_full(0, use + 1)
    s = start_scores(q, find_keys(k_ring, use + 1, config), s, config)
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
def no_results(config):
    """Return zero accumulators, one for each part of a head's columns."""
    acc = ()
    for i in gl.static_range(num_parts(config.V_SIZE)):
        acc = acc + (_zeros(part_size(config.V_SIZE, i)),)  # type: ignore[assignment] # noqa: RUF005
    return acc


@gluon.jit
def _zeros(COLUMNS: gl.constexpr):
    return gl.zeros([ROWS, COLUMNS], gl.float32, product_layout(COLUMNS))


@gluon.jit
def wait_for_values(acc):
    """Wait for the products with values."""
    done = warpgroup_mma_wait(0, deps=acc)
    if len(acc) == 1:
        done = (done,)
    return done


@gluon.jit
def clear_rows(tile, first, config):
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

"""Loading and iteration shared by the gradient kernels on Hopper.

One warp of a program loads K and V first, then for each tile of queries Q, dO, ``lse2`` and
``delta``. See ``hopper_gradients`` for the products.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma

from ...tiles.hopper.layouts import product_layout, wide_rows
from ...tiles.hopper.record import record
from ...tiles.hopper.ring import PipelineBarriers, make_barriers

ROWS = gl.constexpr(64)  # keys of a warpgroup's product
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))


@record
class HopperGradientsConfig:
    """The constants that the gradient kernels are compiled for."""

    HEAD_SIZE: gl.constexpr
    WIDTH: gl.constexpr  # columns of a tile: the head's, and zeros
    KEYS: gl.constexpr  # of a program
    TILE_M: gl.constexpr  # queries
    GROUP: gl.constexpr  # query heads that share a KV head
    CAUSAL: gl.constexpr
    HAS_WINDOW: gl.constexpr
    HAS_END: gl.constexpr  # seq_len is not a multiple of the tile, so its end is masked


@record
class GradientsBatch:
    """The sequences, all of one length."""

    num_seqs: gl.tensor
    num_kv_heads: gl.tensor
    query_len: gl.tensor
    pitch: gl.tensor  # rows from one sequence to the next, whole tiles
    seq_len: gl.tensor
    key_tiles: gl.tensor
    section: gl.tensor  # pairs of sequence and KV head whose tiles are neighbours in the grid
    window: gl.tensor


@record
class QueryWalk:
    """A program's keys, and the tiles of queries that see any of them, as a cycle."""

    seq: gl.tensor
    kv_head: gl.tensor
    first_key: gl.tensor
    low: gl.tensor  # tiles of queries are low, low + 1, … high - 1
    high: gl.tensor
    start: gl.tensor  # the first tile of the cycle


@record
class GradientsMemory:
    """Tiles in shared memory, and their barriers."""

    k: gl.shared_memory_descriptor  # [KEYS / ROWS, 1, 1, ROWS, WIDTH]
    v: gl.shared_memory_descriptor
    keys_barriers: PipelineBarriers
    q: gl.shared_memory_descriptor  # [stages, 1, 1, TILE_M, WIDTH]
    d_out: gl.shared_memory_descriptor
    lse2: gl.shared_memory_descriptor  # [stages, 1, TILE_M]
    delta: gl.shared_memory_descriptor
    barriers: PipelineBarriers


@gluon.jit
def make_memory(k_desc, q_desc, lse2_desc, STAGES: gl.constexpr, config):
    """Allocate shared memory for a program's keys and values and ``STAGES`` tiles of queries."""
    dtype: gl.constexpr = q_desc.dtype
    PARTS: gl.constexpr = config.KEYS // ROWS
    keys: gl.constexpr = [PARTS, 1, 1, ROWS, config.WIDTH]
    queries: gl.constexpr = [STAGES, 1, 1, config.TILE_M, config.WIDTH]
    rows: gl.constexpr = [STAGES, 1, config.TILE_M]
    return GradientsMemory(
        gl.allocate_shared_memory(dtype, keys, k_desc.layout),
        gl.allocate_shared_memory(dtype, keys, k_desc.layout),
        make_barriers(1, 1, 1, 1),
        gl.allocate_shared_memory(dtype, queries, q_desc.layout),
        gl.allocate_shared_memory(dtype, queries, q_desc.layout),
        gl.allocate_shared_memory(gl.float32, rows, lse2_desc.layout),
        gl.allocate_shared_memory(gl.float32, rows, lse2_desc.layout),
        make_barriers(1, STAGES, 1, 2),
    )


@gluon.jit
def find_walk(batch, config):
    """Find this program's work: section by section, in each the first keys first.

    The first keys are seen by the most queries, so the longest programs start first.
    """
    M: gl.constexpr = config.TILE_M
    program = gl.program_id(0)
    num_pairs = batch.num_seqs * batch.num_kv_heads
    first_pair = program // (batch.section * batch.key_tiles) * batch.section
    rest = program - first_pair * batch.key_tiles
    width = gl.minimum(batch.section, num_pairs - first_pair)
    pair = first_pair + rest % width
    tile = rest // width
    first_key = tile * config.KEYS
    shift = batch.seq_len - batch.query_len
    low = 0
    high = gl.cdiv(batch.query_len, M)
    if config.HAS_WINDOW:
        last = gl.maximum(first_key + config.KEYS - 1 + batch.window - shift, 0)
        high = gl.minimum(high, gl.cdiv(last, M))
    start = 0
    if config.CAUSAL:
        low = gl.minimum(gl.maximum(first_key - shift, 0) // M, high)
        start = low
    else:  # programs start at different tiles, so that their atomics rarely collide
        start = tile * (config.KEYS // M) % gl.maximum(high, 1)
    seq = pair // batch.num_kv_heads
    return QueryWalk(seq, pair % batch.num_kv_heads, first_key, low, high, start)


@gluon.jit
def advance(walk, tile, head, step, config):
    """The next tile of the cycle; after its last tile, the next head, ``step`` further."""
    tile += 1
    tile = gl.where(tile == walk.high, walk.low, tile)
    if config.GROUP > 1:
        head = gl.where(tile == walk.start, head + step, head)
    return tile, head


@gluon.jit
def load_role(k_desc, v_desc, q_desc, d_out_desc, lse2_desc, delta_desc, memory, batch, config):
    """One warp: load K and V, then tiles of Q, dO, ``lse2`` and ``delta``."""
    M: gl.constexpr = config.TILE_M
    walk = find_walk(batch, config)
    ready = memory.keys_barriers.expect(0, 0, 2 * config.KEYS * config.WIDTH * 2)
    for w in gl.static_range(config.KEYS // ROWS):
        keys = [walk.seq, walk.kv_head, walk.first_key + w * ROWS, 0]
        tma.async_copy_global_to_shared(k_desc, keys, ready, memory.k.index(w))
        tma.async_copy_global_to_shared(v_desc, keys, ready, memory.v.index(w))
    tile = walk.start
    head = walk.kv_head * config.GROUP
    for use in range(config.GROUP * (walk.high - walk.low)):
        slot = memory.barriers.slot(0, use)
        memory.barriers.wait_empty(0, use)
        ready = memory.barriers.expect(0, use, 2 * M * config.WIDTH * 2 + 2 * M * 4)
        queries = [walk.seq, head, tile * M, 0]
        rows = [0, (head * batch.num_seqs + walk.seq) * batch.pitch + tile * M]
        tma.async_copy_global_to_shared(q_desc, queries, ready, memory.q.index(slot))
        tma.async_copy_global_to_shared(lse2_desc, rows, ready, memory.lse2.index(slot))
        tma.async_copy_global_to_shared(d_out_desc, queries, ready, memory.d_out.index(slot))
        tma.async_copy_global_to_shared(delta_desc, rows, ready, memory.delta.index(slot))
        tile, head = advance(walk, tile, head, 1, config)


@gluon.jit
def as_tile(piece, R: gl.constexpr, C: gl.constexpr):
    """A stage of shared memory as an operand of ``wgmma``."""
    return piece._reinterpret(piece.dtype, [R, C], SWIZZLED)


@gluon.jit
def numbers(piece, s):
    """A tile's ``lse2`` or ``delta``, for each column of ``s``."""
    LAYOUT: gl.constexpr = s.type.layout
    flat = piece._reinterpret(gl.float32, [piece.shape[1]], FLAT)
    return flat.load(gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def start_scores(a, b, config):
    """Start the product of a warpgroup's keys or values with a tile's ``q`` or ``d_out``."""
    s = gl.zeros([ROWS, config.TILE_M], gl.float32, product_layout(config.TILE_M))
    return warpgroup_mma(a, b.permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def recompute_weights(s, lse2, causal_limit, num_keys, window, scale, config):
    """P = exp2(S · scale - lse2), and 0 where masked."""
    p = gl.exp2(s * scale - numbers(lse2, s))
    if config.CAUSAL or config.HAS_WINDOW or config.HAS_END:
        p = _apply_mask(p, causal_limit, num_keys, window, config)
    return p


@gluon.jit
def _apply_mask(p, causal_limit, num_keys, window, config):
    """Zero the weights of invisible keys; ``causal_limit`` is the first query's position."""
    LAYOUT: gl.constexpr = p.type.layout
    key = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    own = causal_limit + gl.arange(0, config.TILE_M, gl.SliceLayout(0, LAYOUT))[None, :]
    seen = key <= own if config.CAUSAL else key < num_keys
    if config.HAS_WINDOW:
        seen = seen & (key > own - window)
    return gl.where(seen, p, 0.0)


@gluon.jit
def store_rows(out, value, first_row, FIRST_COLUMN: gl.constexpr, walk, batch, config):
    """Store a warpgroup's rows or columns of ``dK`` or ``dV`` in whole 32-byte sectors."""
    COLUMNS: gl.constexpr = value.shape[1]
    WIDE: gl.constexpr = wide_rows(COLUMNS)
    value = gl.convert_layout(value.to(out.dtype.element_ty), WIDE)
    key = walk.first_key + first_row + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    column = FIRST_COLUMN + gl.arange(0, COLUMNS, gl.SliceLayout(0, WIDE))[None, :]
    token = walk.seq.to(gl.int64) * batch.seq_len + key
    at = (token * batch.num_kv_heads + walk.kv_head) * config.HEAD_SIZE
    inside = (key < batch.seq_len)[:, None] & (column < config.HEAD_SIZE)
    gl.store(out + at[:, None] + column, value, inside)

"""The loading warps of attention on Hopper: which tiles, and their copies into the rings.

One warp finds the tiles of queries, tells the computing warpgroups what they need to know of
each, and loads queries and keys; another finds the same tiles and loads values. Copies are made
by the tensor memory accelerator, which needs a descriptor and a place, and no registers; where
they would be small, rows are copied by two warps each instead of one (``gather``).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate as aggregate

from .gather import gather_tiles
from .names import barrier
from .schedule import find_tile, key_tiles, tile_of_turn

__all__ = ["COLUMNS", "ROWS", "Form", "load_keys_role", "load_values_role"]

ROWS = gl.constexpr(64)  # of a warpgroup
COLUMNS = gl.constexpr(64)  # of an atom: what a swizzled row of 128 bytes holds

# What is told of a tile of queries. Keys count from the first of its rightmost tile.
NUM_TILES = gl.constexpr(0)  # of keys; 0: there is no more work
NUM_RIGHT = gl.constexpr(1)  # that need a mask, beside the rightmost
NUM_FULL = gl.constexpr(2)  # that need none
REACH = gl.constexpr(3)  # the first token's own key
LAST = gl.constexpr(4)  # number of keys
TOKEN = gl.constexpr(5)  # the first token's row in q
NUM_TOKENS = gl.constexpr(6)  # from there to the sequence's end
HEAD = gl.constexpr(7)


@aggregate
class Form:
    """What a kernel is compiled for."""

    HEAD_SIZE: gl.constexpr
    BLOCK_SIZE: gl.constexpr  # 0: keys are ragged, not paged
    BOX: gl.constexpr
    ATOMS: gl.constexpr
    GATHER: gl.constexpr
    PACK: gl.constexpr
    WARPGROUPS: gl.constexpr
    CAUSAL: gl.constexpr
    HAS_WINDOW: gl.constexpr
    HAS_CAP: gl.constexpr
    HAS_ALIBI: gl.constexpr
    HAS_SINKS: gl.constexpr
    UNIFORM: gl.constexpr
    STAGED: gl.constexpr
    TAKE_TURNS: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        HEAD_SIZE,
        BLOCK_SIZE,
        BOX,
        ATOMS,
        GATHER,
        PACK,
        WARPGROUPS,
        CAUSAL,
        HAS_WINDOW,
        HAS_CAP,
        HAS_ALIBI,
        HAS_SINKS,
        UNIFORM,
        STAGED,
        TAKE_TURNS,
    ):
        self.HEAD_SIZE = gl.constexpr(HEAD_SIZE)
        self.BLOCK_SIZE = gl.constexpr(BLOCK_SIZE)
        self.BOX = gl.constexpr(BOX)
        self.ATOMS = gl.constexpr(ATOMS)
        self.GATHER = gl.constexpr(GATHER)
        self.PACK = gl.constexpr(PACK)
        self.WARPGROUPS = gl.constexpr(WARPGROUPS)
        self.CAUSAL = gl.constexpr(CAUSAL)
        self.HAS_WINDOW = gl.constexpr(HAS_WINDOW)
        self.HAS_CAP = gl.constexpr(HAS_CAP)
        self.HAS_ALIBI = gl.constexpr(HAS_ALIBI)
        self.HAS_SINKS = gl.constexpr(HAS_SINKS)
        self.UNIFORM = gl.constexpr(UNIFORM)
        self.STAGED = gl.constexpr(STAGED)
        self.TAKE_TURNS = gl.constexpr(TAKE_TURNS)


@gluon.jit
def _next_tile(batch, turn, form):
    """Where this program's tile of a turn lies, and whether there is one."""
    TOKENS: gl.constexpr = form.WARPGROUPS * ROWS // form.PACK
    number = tile_of_turn(turn)
    known = gl.minimum(number, batch.num_tiles - 1)
    seq, token, head = find_tile(batch, known, TOKENS, form.UNIFORM)
    q_start = gl.load(batch.cu_seqlens_q + seq)
    query_len = gl.load(batch.cu_seqlens_q + seq + 1) - q_start
    k_start = 0
    seq_len = gl.load(batch.lengths + seq)
    if form.BLOCK_SIZE == 0:
        k_start = seq_len
        seq_len = gl.load(batch.lengths + seq + 1) - k_start
    exists = (number < batch.num_tiles) & (token < query_len) & (query_len > batch.short)
    table = batch.block_tables + seq.to(gl.int64) * batch.table_stride
    kv_head = head * form.PACK // batch.group
    keys = (table, k_start, seq_len, batch.block_rows, kv_head)
    return exists, q_start, query_len, token, head, keys


@gluon.jit
def load_keys_role(q_desc, k, batch, orders, q_ring, k_ring, form):
    """Find tiles of queries, tell of them, load them and their keys."""
    TILE_N: gl.constexpr = k_ring.tiles.shape[1]
    TOKENS: gl.constexpr = form.WARPGROUPS * ROWS // form.PACK
    tile_use = 0
    use = 0
    for turn in range(gl.cdiv(batch.num_tiles, gl.num_programs(0))):
        exists, q_start, query_len, token, head, keys = _next_tile(batch, turn, form)
        if exists:
            seq_len = keys[2]
            position = seq_len - query_len + token
            begin, full_begin, full_end, end = key_tiles(
                position, seq_len, batch.window, TOKENS, TILE_N, form.CAUSAL, form.HAS_WINDOW
            )
            origin = (end - 1) * TILE_N
            q_ring.turns.wait_empty(0, tile_use)
            orders.write(tile_use, NUM_TILES, end - begin)
            orders.write(tile_use, NUM_RIGHT, end - 1 - full_end)
            orders.write(tile_use, NUM_FULL, full_end - full_begin)
            orders.write(tile_use, REACH, position - origin)
            orders.write(tile_use, LAST, seq_len - origin)
            orders.write(tile_use, TOKEN, q_start + token)
            orders.write(tile_use, NUM_TOKENS, query_len - token)
            orders.write(tile_use, HEAD, head)
            _join(form)
            _load_queries(q_desc, q_ring, tile_use, q_start + token, head, form)
            tile_use += 1
            use = _load_tiles(k, k_ring, use, begin, end, keys, form)
    q_ring.turns.wait_empty(0, tile_use)
    orders.write(tile_use, NUM_TILES, 0)
    _join(form)
    q_ring.turns.fill(0, tile_use)


@gluon.jit
def _join(form):
    """Where two warps have written, both have, before one of them says so."""
    if form.GATHER:
        barrier()


@gluon.jit
def load_values_role(v, batch, v_ring, form):
    """Find the same tiles of queries, and load their values."""
    TILE_N: gl.constexpr = v_ring.tiles.shape[1]
    TOKENS: gl.constexpr = form.WARPGROUPS * ROWS // form.PACK
    use = 0
    for turn in range(gl.cdiv(batch.num_tiles, gl.num_programs(0))):
        exists, _, query_len, token, _, keys = _next_tile(batch, turn, form)
        if exists:
            seq_len = keys[2]
            begin, _, _, end = key_tiles(
                seq_len - query_len + token,
                seq_len,
                batch.window,
                TOKENS,
                TILE_N,
                form.CAUSAL,
                form.HAS_WINDOW,
            )
            use = _load_tiles(v, v_ring, use, begin, end, keys, form)


@gluon.jit
def _load_queries(desc, ring, use, token, head, form):
    PACK: gl.constexpr = form.PACK
    CHUNKS: gl.constexpr = ring.tiles.shape[2] // COLUMNS
    ready = ring.expect(use)
    for part in gl.static_range(form.WARPGROUPS):
        boxes = ring.tile(use, part)._reinterpret(
            ring.tiles.dtype, [CHUNKS, ROWS // PACK, PACK, COLUMNS], desc.layout
        )
        at = token + part * (ROWS // PACK)
        for c in gl.static_range(CHUNKS):
            where = [at, head * PACK, c * COLUMNS]
            tma.async_copy_global_to_shared(desc, where, ready, boxes.index(c))


@gluon.jit
def _load_tiles(source, ring, use, begin, end, keys, form):
    """Bring tiles of keys or values from the right to the left; the ring's next use."""
    TILE_N: gl.constexpr = ring.tiles.shape[1]
    if form.GATHER:
        use = gather_tiles(source, ring, use, begin, end, keys, form)
    else:
        key = end * TILE_N
        for _ in range(end - begin):
            key -= TILE_N
            _load_tile(source, ring, use, key, keys, form)
            use += 1
    return use


@gluon.jit
def _load_tile(desc, ring, use, key, keys, form):
    """Start the copies of a tile of keys or values, in boxes; past the end it gets zeros."""
    BOXES: gl.constexpr = ring.tiles.shape[1] // form.BOX
    rows = _find_rows(keys, key, BOXES, form)  # asked for while the slot is still in use
    ring.turns.wait_empty(0, use)
    ready = ring.expect(use)
    tile = ring.tile(use, 0)
    for i in gl.static_range(BOXES):
        _load_box(desc, tile, i, keys[4], rows[i], ready, form)


@gluon.jit
def _load_box(desc, tile, INDEX: gl.constexpr, kv_head, row, ready, form):
    BOXES: gl.constexpr = tile.shape[0] // form.BOX
    CHUNKS: gl.constexpr = tile.shape[1] // COLUMNS
    if form.ATOMS:
        boxes = tile._reinterpret(
            tile.dtype, [BOXES, 1, form.BOX // 8, CHUNKS, 8, COLUMNS], desc.layout
        )
        where = [kv_head, row, 0, 0, 0]
        tma.async_copy_global_to_shared(desc, where, ready, boxes.index(INDEX))
    else:
        SHARE: gl.constexpr = desc.block_shape[1]  # chunks of a box
        boxes = tile._reinterpret(
            tile.dtype, [CHUNKS // SHARE * BOXES, 1, SHARE, form.BOX, COLUMNS], desc.layout
        )
        for c in gl.static_range(CHUNKS // SHARE):
            where = [kv_head, 0, row, c * COLUMNS]
            tma.async_copy_global_to_shared(desc, where, ready, boxes.index(c * BOXES + INDEX))


@gluon.jit
def _find_rows(keys, key, COUNT: gl.constexpr, form):
    """Where neighbouring boxes start, in rows or groups of them; of no page: before all rows."""
    table, k_start, seq_len, block_rows, _ = keys
    GROUP: gl.constexpr = 8 if form.ATOMS else 1
    rows = ()
    for i in gl.static_range(COUNT):
        at = key + i * form.BOX
        row = k_start + at
        if form.BLOCK_SIZE > 0:
            block = gl.load(table + at // form.BLOCK_SIZE, at < seq_len, other=-1)
            row = block * block_rows + at % form.BLOCK_SIZE // GROUP
        rows = rows + (row,)  # type: ignore[assignment] # noqa: RUF005
    return rows

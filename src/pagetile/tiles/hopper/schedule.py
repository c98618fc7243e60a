"""Which tile of queries comes next, and which keys it needs.

A program takes tiles one after another, every program its own: the longest first, forth and
back, so that all end together. Programs that run at the same time share keys: a *section* is as
many pairs of sequence and head as have keys that fit in the second-level cache together::

    turn 0   program  0  1  2  3     longest tiles of the first section
    turn 1            3  2  1  0
    turn 2            0  1  2  3     ...
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

__all__ = ["Batch", "Orders", "find_tile", "key_tiles", "make_orders", "tile_of_turn"]


@aggregate
class Batch:
    """The sequences, and how they are cut into tiles of queries."""

    cu_seqlens_q: gl.tensor  # pointer to [num_seqs + 1]
    lengths: gl.tensor  # pointer: seq_lens [num_seqs], or cu_seqlens_k [num_seqs + 1]
    block_tables: gl.tensor  # pointer to [num_seqs, max_blocks_per_seq]
    table_stride: gl.tensor
    num_seqs: gl.tensor
    block_rows: gl.tensor  # rows of the cache, or groups of eight, from one block to the next
    num_tiles: gl.tensor
    seq_tiles: gl.tensor  # tiles of a sequence; of a batch of unequal ones, tiles of all
    section: gl.tensor  # pairs of sequence and head
    num_heads: gl.tensor  # head groups: tiles beside each other that take the same tokens
    group: gl.tensor  # query heads that share a KV head
    short: gl.tensor  # sequences with up to so many queries are another kernel's
    window: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
        cu_seqlens_q,
        lengths,
        block_tables,
        table_stride,
        num_seqs,
        block_rows,
        num_tiles,
        seq_tiles,
        section,
        num_heads,
        group,
        short,
        window,
    ):
        self.cu_seqlens_q = cu_seqlens_q
        self.lengths = lengths
        self.block_tables = block_tables
        self.table_stride = table_stride
        self.num_seqs = num_seqs
        self.block_rows = block_rows
        self.num_tiles = num_tiles
        self.seq_tiles = seq_tiles
        self.section = section
        self.num_heads = num_heads
        self.group = group
        self.short = short
        self.window = window


@gluon.jit
def tile_of_turn(turn):
    """The number of the tile that this program takes; at or beyond ``num_tiles``: none."""
    width = gl.num_programs(0)
    place = gl.program_id(0)
    if turn % 2 == 1:
        place = width - 1 - place
    return turn * width + place


@gluon.jit
def find_tile(batch, number, TOKENS: gl.constexpr, UNIFORM: gl.constexpr):
    """Sequence, first token in it, and head of a tile; the token may lie past the end."""
    if UNIFORM:
        whole = number // (batch.section * batch.seq_tiles)
        first_pair = whole * batch.section
        rest = number - first_pair * batch.seq_tiles
        width = gl.minimum(batch.section, batch.num_seqs * batch.num_heads - first_pair)
        pair = first_pair + rest % width
        tile = batch.seq_tiles - 1 - rest // width
        return pair // batch.num_heads, tile * TOKENS, pair % batch.num_heads
    else:
        # Sequence i starts at tile cu_seqlens_q[i] // TOKENS + i, which leaves room for all.
        tile = batch.seq_tiles - 1 - number // batch.num_heads
        low = 0
        high = batch.num_seqs
        while high - low > 1:
            middle = (low + high) // 2
            if gl.load(batch.cu_seqlens_q + middle) // TOKENS + middle <= tile:
                low = middle
            else:
                high = middle
        start = gl.load(batch.cu_seqlens_q + low) // TOKENS + low
        return low, (tile - start) * TOKENS, number % batch.num_heads


@gluon.jit
def key_tiles(
    position,
    seq_len,
    window,
    TOKENS: gl.constexpr,
    TILE_N: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
):
    """Tiles of keys for tokens from ``position`` on, of which the walk goes from right to left.

    Returns ``begin``, ``full_begin``, ``full_end``, ``end``: tiles from ``full_begin`` on and
    before ``full_end`` need no mask. There is at least one tile, and the last is not among them.
    """
    begin = 0
    end = seq_len
    full_begin = 0
    full_end = seq_len
    if CAUSAL:
        end = gl.minimum(position + TOKENS, seq_len)
        full_end = gl.minimum(position + 1, seq_len)
    if HAS_WINDOW:
        begin = gl.maximum(position - window + 1, 0) // TILE_N
        full_begin = (gl.maximum(position + TOKENS - window, 0) + TILE_N - 1) // TILE_N
    end = gl.maximum((gl.maximum(end, 0) + TILE_N - 1) // TILE_N, begin + 1)
    full_end = gl.minimum(gl.maximum(full_end, 0) // TILE_N, end - 1)
    full_end = gl.maximum(full_end, begin)
    full_begin = gl.minimum(gl.maximum(full_begin, begin), full_end)
    return begin, full_begin, full_end, end


@aggregate
class Orders:
    """What the loading warp tells the others of each tile: numbers in shared memory."""

    fields: gl.shared_memory_descriptor  # [STAGES * 8, 1] int32
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, fields, STAGES):
        self.fields = fields
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def write(self, use, FIELD: gl.constexpr, value):
        """Say one number of a use."""
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        field = self.fields.index(use % self.STAGES * 8 + FIELD)
        field.store(gl.full([1], value, gl.int32, LAYOUT))

    @gluon.jit
    def read(self, use, FIELD: gl.constexpr):
        """One number of a use, which must be full."""
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        return gl.max(self.fields.index(use % self.STAGES * 8 + FIELD).load(LAYOUT), 0)


@gluon.jit
def make_orders(STAGES: gl.constexpr):
    """Room for the orders of ``STAGES`` tiles."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Orders(gl.allocate_shared_memory(gl.int32, [STAGES * 8, 1], LAYOUT), STAGES)

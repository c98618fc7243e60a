"""The persistent schedule: which tile of queries a program computes next, and which keys it needs.

A program's first tile is its program id, and it draws every further one by an atomic counter. So
programs end together, and work on neighbouring tiles, which share keys in L2. Pairs of sequence and
head are grouped in *sections* of two or three tiles per program; in a section the longest tiles
come first::

    numbers   0 ...                                                    ... num_tiles - 1
              tiles 9 of pairs 0 to 2, tiles 8, ..., tiles 0 │ tiles 9 of pairs 3 to 5, ...

With unequal lengths, sequences with more keys come first, and each one's heads are grouped in such
sections. That takes a lane for each sequence. With more sequences than lanes, tiles are assigned
round-robin instead, in alternating direction.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .dividing import MOST_DRAWN_SEQS
from .record import record
from .ring import PipelineBarriers, make_barriers

_MOST_DRAWN_SEQS = gl.constexpr(MOST_DRAWN_SEQS)
LIST_FIELDS = gl.constexpr(4)  # header words of a record
OUT_OF_BOUNDS = gl.constexpr(1 << 30)  # a key that no tensor has


@record
class TileLists:
    """Lists of the tiles of keys that block-sparse attention visits: a record per tile of queries.

    A record is int32: the tile of queries, the numbers of partial and full tiles of keys, 0, and
    these tiles. A head's records are sorted by length, the longest first.
    """

    lists: gl.tensor  # pointer to [num_seqs or 1, num_heads or 1, seq_tiles, pitch]
    seq_stride: gl.tensor  # in records
    head_stride: gl.tensor
    pitch: gl.tensor

    @gluon.jit
    def find(self, seq, head, rank):
        """The offset of a head's record number ``rank``."""
        return (seq * self.seq_stride + head * self.head_stride + rank) * self.pitch


@record
class Batch:
    """The sequences, and how they are cut into tiles of queries."""

    cu_seqlens_q: gl.tensor  # pointer to [num_seqs + 1]
    lengths: gl.tensor  # pointer: seq_lens [num_seqs], or cu_seqlens_k [num_seqs + 1]
    block_tables: gl.tensor  # pointer to [num_seqs, max_blocks_per_seq]
    table_stride: gl.tensor
    num_seqs: gl.tensor
    block_rows: gl.tensor  # rows of the cache, or groups of eight, from one block to the next
    num_tiles: gl.tensor
    seq_tiles: gl.tensor  # tiles of a sequence if all have one length, else tiles of the batch
    num_heads: gl.tensor  # groups of PACK query heads
    group: gl.tensor  # query heads that share a KV head
    short: gl.tensor  # sequences with up to this many queries are left to another kernel
    window: gl.tensor
    tile_lists: TileLists


@gluon.jit
def tile_of_iteration(iteration):
    """The number of this program's tile in an iteration, which may be past the last."""
    width = gl.num_programs(0)
    place = gl.program_id(0)
    if iteration % 2 == 1:
        place = width - 1 - place
    return iteration * width + place


@record
class TileQueue:
    """A queue of a program's tile numbers, from the warp that draws them to the one of values."""

    drawn: gl.tensor  # pointer to an int32 counter of drawn tiles; 0 before and after the launch
    numbers: gl.shared_memory_descriptor  # [2, 1] int32
    barriers: PipelineBarriers

    @gluon.jit
    def draw(self):
        """Draw a tile: return how many were drawn before, which takes about a microsecond."""
        return gl.atomic_add(self.drawn, 1, sem="relaxed", scope="gpu")

    @gluon.jit
    def push_drawn(self, use, drawn, num_tiles):
        """Push and return the tile number of a result of ``draw``, which may be past the last."""
        # Every program draws once for each of its tiles, so this is the last draw: reset.
        gl.store(self.drawn, 0, drawn == num_tiles - 1)
        number = drawn + gl.num_programs(0)
        self.push(use, number)
        return number

    @gluon.jit
    def push(self, use, number):
        """Push a number."""
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        self.barriers.wait_empty(0, use)
        field = self.numbers.index(self.barriers.slot(0, use))
        field.store(gl.full([1], number, gl.int32, LAYOUT))
        self.barriers.fill(0, use)

    @gluon.jit
    def pop(self, use):
        """Pop the next number."""
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        self.barriers.wait_full(0, use)
        number = gl.max(self.numbers.index(self.barriers.slot(0, use)).load(LAYOUT), 0)
        self.barriers.release(0, use)
        return number


@gluon.jit
def make_tile_queue(drawn):
    """Make an empty queue; ``drawn`` points to a 0 that all programs share."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], LAYOUT)
    return TileQueue(drawn, numbers, make_barriers(1, 2, 1, 1))


@gluon.jit
def add(a, b):
    """The operation of ``associative_scan``."""
    return a + b


@gluon.jit
def find_tile(batch, number, seqs, TOKENS: gl.constexpr, config):
    """Sequence, first token in it, and head of a tile; the token may be past the end.

    ``seqs`` is the result of ``measure_seqs``.
    """
    if config.UNIFORM:
        pair, tile = _place_in_sections(
            batch.num_tiles - 1 - number, batch.seq_tiles, batch.num_seqs * batch.num_heads
        )
        seq, head = pair // batch.num_heads, pair % batch.num_heads
    elif config.DRAWS:
        seq, tile, head = _find_in_longest(batch, number, seqs)
    else:
        # Sequence i is given tiles from cu_seqlens_q[i] // TOKENS + i on, which suffices for all.
        tile = batch.seq_tiles - 1 - number // batch.num_heads
        head = number % batch.num_heads
        seq = 0
        high = batch.num_seqs
        while high - seq > 1:
            middle = (seq + high) // 2
            if gl.load(batch.cu_seqlens_q + middle) // TOKENS + middle <= tile:
                seq = middle
            else:
                high = middle
        tile -= gl.load(batch.cu_seqlens_q + seq) // TOKENS + seq
    return seq, tile * TOKENS, head


@gluon.jit
def _place_in_sections(rest, num_tiles, num_pairs):
    """Pair and tile of number ``rest``, counted from the last, for pairs of equal length.

    A section has two tiles per program, or three if there are so few tiles that the long ones of a
    last section would end late.
    """
    programs = gl.num_programs(0)
    at_once = gl.where(num_pairs * num_tiles <= 6 * programs, 3, 2)
    section = gl.cdiv(at_once * programs, num_tiles)
    whole = rest // (section * num_tiles)
    end_pair = num_pairs - whole * section
    rest -= whole * section * num_tiles
    width = gl.minimum(section, end_pair)
    return end_pair - 1 - rest % width, rest // width


@gluon.jit
def count_seq_tiles(batch, TOKENS: gl.constexpr):
    """The index and number of tiles of each of up to ``MOST_DRAWN_SEQS`` sequences."""
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    seq = gl.arange(0, _MOST_DRAWN_SEQS, FLAT)
    exists = seq < batch.num_seqs
    query_len = gl.load(batch.cu_seqlens_q + seq + 1, exists, other=0)
    query_len -= gl.load(batch.cu_seqlens_q + seq, exists, other=0)
    return seq, gl.where(query_len > batch.short, (query_len + TOKENS - 1) // TOKENS, 0)


@gluon.jit
def measure_seqs(batch, TOKENS: gl.constexpr, config):
    """Each drawn sequence's index, tiles of all heads and keys; () if tiles are found without."""
    seqs = ()
    if config.DRAWS and not config.UNIFORM:
        seq, num_tiles = count_seq_tiles(batch, TOKENS)
        exists = seq < batch.num_seqs
        seq_len = gl.load(batch.lengths + seq, exists, other=0)
        if config.BLOCK_SIZE == 0:
            seq_len = gl.load(batch.lengths + seq + 1, exists, other=0) - seq_len
        seqs = (seq, num_tiles * batch.num_heads, seq_len)  # type: ignore[assignment]
    return seqs


@gluon.jit
def count_tiles(batch, seqs, config):
    """The number of tiles of all sequences and heads."""
    return batch.num_tiles if config.UNIFORM else gl.sum(seqs[1], 0)


@gluon.jit
def _find_in_longest(batch, number, seqs):
    """Sequence, tile and head of a tile number, with the longest sequences first."""
    seq, num_tiles, seq_len = seqs
    # Sequences with more keys than ``low`` have more than ``number`` tiles.
    low = gl.min(gl.where(num_tiles > 0, seq_len, OUT_OF_BOUNDS), 0) - 1
    high = gl.max(gl.where(num_tiles > 0, seq_len, 0), 0)
    while high - low > 1:
        middle = (low + high) // 2
        has_more = gl.sum(gl.where(seq_len > middle, num_tiles, 0), 0) > number
        low = gl.where(has_more, middle, low)
        high = gl.where(has_more, high, middle)
    number -= gl.sum(gl.where(seq_len > high, num_tiles, 0), 0)
    equal = gl.where(seq_len == high, num_tiles, 0)
    ends = gl.associative_scan(equal, 0, add)
    found = (number < ends) & (number >= ends - equal)
    rest = gl.sum(gl.where(found, ends, 0), 0) - 1 - number
    own_tiles = gl.max(gl.where(found, equal, 1), 0) // batch.num_heads
    head, tile = _place_in_sections(rest, gl.maximum(own_tiles, 1), batch.num_heads)
    return gl.max(gl.where(found, seq, 0), 0), tile, head


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
    """Tiles of keys for a tile of queries from ``position`` on; they are visited right to left.

    Returns ``begin``, ``full_begin``, ``full_end``, ``end``: tiles ``full_begin`` to ``full_end``
    need no mask. There is at least one tile, and the last one counts as masked.
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


@gluon.jit
def listed_tiles(record, seq_len, TILE_N: gl.constexpr):
    """Return ``(num_tiles, num_right, num_full, origin, num_keys)`` of a record.

    ``num_right`` tiles after the first need a mask, and then ``num_full`` need none. ``origin`` is
    the first key of the first tile, and ``num_keys`` exist from there on: 0 if the list is empty,
    in which case one tile out of bounds is visited.
    """
    num_partial = gl.load(record + 1)
    num_full = gl.load(record + 2)
    origin = gl.load(record + LIST_FIELDS) * TILE_N
    num_tiles = gl.maximum(num_partial + num_full, 1)
    num_right = gl.maximum(num_partial - 1, 0)
    num_keys = gl.where(num_partial + num_full > 0, seq_len - origin, 0)
    return num_tiles, num_right, num_tiles - 1 - num_right, origin, num_keys

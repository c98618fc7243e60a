"""Gather rows of 8-bit caches, and convert them on the way to shared memory.

As in ``gather``, two warps load a tile's keys and two its values, but through registers, where 16
elements of a lane become 32 bytes: keys of the queries' type, values of float16. A tile is loaded
in chunks, of which four are in flight while an earlier one is converted::

    load      0 1 2 3   4 5 6 7   0' 1' 2' 3'   4' ...        ' = the next tile to the left
    convert             0 1 2 3   4  5  6  7    0' ...

The conversion is exact. Per-head scales (``HeadScales``) are applied by the computing warpgroups to
scores and results. Per-token scales (``TokenScales``) are applied to scores there, but to values
here, which rounds them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .layouts import num_parts, part_size, part_start
from .names import barrier
from .packed import SIGNS, scale_words, widen_words
from .record import record

PER_WORD = gl.constexpr(4)  # 8-bit values of an int32
UNIT = gl.constexpr(4)  # words of a load, 16 bytes
IN_FLIGHT = gl.constexpr(4)  # chunks
SMALLEST_SCALE = gl.constexpr(1e-30)


@record
class HeadScales:
    """Scales of each KV head's keys and values."""

    k_scale: gl.tensor  # pointer to float32 [num_kv_heads]
    v_scale: gl.tensor
    k_stride: gl.tensor
    v_stride: gl.tensor

    @gluon.jit
    def load(self, kv_head):
        """A head's scales of keys and of values."""
        k_scale = gl.load(self.k_scale + kv_head * self.k_stride)
        return k_scale, gl.load(self.v_scale + kv_head * self.v_stride)

    @gluon.jit
    def bits(self, kv_head):
        """A head's scales as int32 bits, with the key's scale made positive.

        The largest product must be the largest score, so a negative sign is applied to the keys
        instead, and 0 becomes a tiny positive number.
        """
        k_scale, v_scale = self.load(kv_head)
        k_scale = gl.abs(k_scale)
        k_scale = gl.where(k_scale < SMALLEST_SCALE, SMALLEST_SCALE, k_scale)  # keeps NaN
        return k_scale.to(gl.int32, bitcast=True), v_scale.to(gl.int32, bitcast=True)


@record
class TokenScales:
    """Scales of each token's key or value, and shared memory for those of tiles."""

    base: gl.tensor  # pointer to float32 [num_blocks, block_size, num_kv_heads]
    block: gl.tensor  # strides
    slot: gl.tensor
    head: gl.tensor
    tiles: gl.shared_memory_descriptor  # float32 [DEPTH, TILE_N]
    DEPTH: gl.constexpr
    ARE_OF_VALUES: gl.constexpr

    @gluon.jit
    def find(self, key, block, kv_head, config):
        """The scales of a tile's tokens."""
        at = block.to(gl.int64) * self.block + key % config.BLOCK_SIZE * self.slot
        return gl.load(self.base + at + kv_head * self.head)

    @gluon.jit
    def of_use(self, use):
        """The shared memory of a use's scales."""
        return self.tiles.index(use % self.DEPTH)


@gluon.jit
def make_token_scales(
    base, block, slot, head, TILE_N: gl.constexpr, DEPTH: gl.constexpr, ARE_OF_VALUES: gl.constexpr
):  # fmt: skip
    """Make ``TokenScales`` with shared memory for ``DEPTH`` tiles.

    Scales of values are read by the warps that write them, and scales of keys by the computing
    warpgroups after they have released the keys' slot. So ``DEPTH`` is twice the ring's slots for
    keys: then no scales are overwritten before they are read.
    """
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = gl.allocate_shared_memory(gl.float32, [DEPTH, TILE_N], LAYOUT)
    return TokenScales(base, block, slot, head, tiles, DEPTH, ARE_OF_VALUES)


@gluon.constexpr_function
def chunk_rows(tile_n, head_size, warpgroups):
    """Rows of a chunk: a power of two that leaves at least ``IN_FLIGHT`` chunks in a tile.

    A chunk is two loads of each of 64 lanes, or one where three warpgroups leave few registers.
    """
    columns = sum(part_size(head_size, part) for part in range(num_parts(head_size)))
    rows = (2048 if int(warpgroups) == 2 else 1024) // columns
    return min(int(tile_n) // int(IN_FLIGHT), 1 << (rows.bit_length() - 1))


@gluon.constexpr_function
def chunk_layout(rows, words, warps):
    """The layout of a chunk's words: a lane holds four neighbours of a row.

    Eight lanes store at a time. They have no bank conflicts if they fill half a row of a swizzled
    atom in two rows, so four lanes are side by side and the next four in the row below.
    """
    columns = [[0, 1 << i] for i in range(int(words).bit_length() - 1)]
    below = [[1 << i, 0] for i in range(int(rows).bit_length() - 1)]
    wide = len(columns[2:])
    lanes = columns[2 : 2 + min(wide, 2)] + below[:1] + columns[4:] + below[1:]
    num_lanes = 5 + int(warps).bit_length() - 1
    lanes += [[0, 0]] * (num_lanes - len(lanes))
    return gl.DistributedLinearLayout(
        reg_bases=columns[:2] + lanes[num_lanes:],
        lane_bases=lanes[:5],
        warp_bases=lanes[5:num_lanes],
        block_bases=[],
        shape=[int(rows), int(words)],
    )


@gluon.jit
def gather_packed_tiles(source, ring, use, begin, end, keys, SIZE: gl.constexpr, config):
    """Load and convert tiles from the right to the left; returns the ring's next use.

    ``source`` is ``(pages, scales)``. Of per-head scales only the sign of a key's is applied here.
    """
    pages, scales = source
    BY_TOKEN: gl.constexpr = config.SCALES == "token"
    TILE_N: gl.constexpr = ring.tiles.shape[1]
    ROWS: gl.constexpr = chunk_rows(TILE_N, SIZE, config.WARPGROUPS)
    CHUNKS: gl.constexpr = TILE_N // ROWS
    seq_len, kv_head = keys[2], keys[4]
    if seq_len > 0:
        signs = 0
        if not BY_TOKEN and len(scales) > 0:
            signs = gl.where(scales[0].load(kv_head)[0] < 0, SIGNS, 0)
        key, block = _find_blocks(keys, end - 1, begin, TILE_N, config)
        _write_places(pages, key, block, kv_head, config)
        if BY_TOKEN:
            of_tile = scales[0].find(key, block, kv_head, config)
        key, block = _find_blocks(keys, end - 2, begin, TILE_N, config)
        chunks = ()
        for i in gl.static_range(IN_FLIGHT):
            chunk = _load_chunk(pages, i * ROWS, ROWS, SIZE)
            chunks = chunks + (chunk,)  # type: ignore[assignment] # noqa: RUF005
        for n in range(end - 1, begin - 1, -1):
            tile = ring.tile(use, 0)
            ring.barriers.wait_empty(0, use)
            if BY_TOKEN:
                scales[0].of_use(use).store(of_tile)
            for i in gl.static_range(CHUNKS):
                chunk = chunks[0]  # type: ignore[misc]
                _store_chunk(tile, i * ROWS, chunk, signs, scales, use, SIZE, config)
                if i + IN_FLIGHT == CHUNKS:  # the next tile's; after the last, its own again
                    _write_places(pages, key, block, kv_head, config)
                    if BY_TOKEN:
                        of_tile = scales[0].find(key, block, kv_head, config)
                    key, block = _find_blocks(keys, n - 2, begin, TILE_N, config)
                chunk = _load_chunk(pages, (i + IN_FLIGHT) % CHUNKS * ROWS, ROWS, SIZE)
                chunks = chunks[1:] + (chunk,)  # type: ignore[assignment] # noqa: RUF005
                if i + IN_FLIGHT // 2 + 1 == CHUNKS:
                    barrier()  # else ptxas moves the next tile's loads to the end of this one
            _fill(ring, use)
            use += 1
    else:
        for _ in range(begin, end):
            ring.barriers.wait_empty(0, use)
            _store_zeros(ring.tile(use, 0), SIZE)
            _fill(ring, use)
            use += 1
    return use


@gluon.jit
def _fill(ring, use):
    """Wait until both warps have stored their parts of a slot, and signal that it is full."""
    fence_async_shared()
    barrier()
    ring.barriers.fill(0, use)


@gluon.jit
def _find_blocks(keys, n, begin, TILE_N: gl.constexpr, config):
    """Keys of tile ``max(n, begin)``, and their block ids."""
    FINDING: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    # Past the end the last key is repeated: its weight is 0, and it adds no NaN.
    key = gl.maximum(n, begin) * TILE_N + gl.arange(0, TILE_N, FINDING)
    key = gl.minimum(key, keys[2] - 1)
    return key, gl.load(keys[0] + key // config.BLOCK_SIZE)


@gluon.jit
def _write_places(pages, key, block, kv_head, config):
    """Write where a tile's rows begin, in units of 16 bytes."""
    place = block * pages.block + key % config.BLOCK_SIZE * pages.slot + kv_head * pages.head
    pages.places.store(place.to(pages.places.dtype, bitcast=True))


@gluon.jit
def _load_chunk(pages, FIRST: gl.constexpr, ROWS: gl.constexpr, SIZE: gl.constexpr):
    """Load the words of ``ROWS`` rows from ``FIRST`` on of the current tile: a tensor per part."""
    chunk = ()
    for part in gl.static_range(num_parts(SIZE)):
        words = _load_part(pages, FIRST, ROWS, SIZE, part)
        chunk = chunk + (words,)  # type: ignore[assignment] # noqa: RUF005
    return chunk


@gluon.jit
def _load_part(
    pages, FIRST: gl.constexpr, ROWS: gl.constexpr, SIZE: gl.constexpr, PART: gl.constexpr
):  # fmt: skip
    WORDS: gl.constexpr = part_size(SIZE, PART) // PER_WORD
    START: gl.constexpr = part_start(SIZE, PART) // PER_WORD
    LAYOUT: gl.constexpr = chunk_layout(ROWS, WORDS, gl.num_warps())
    column = START + gl.arange(0, WORDS, gl.SliceLayout(0, LAYOUT))[None, :]
    place = pages.places.slice(FIRST, ROWS).load(gl.SliceLayout(1, LAYOUT))
    at = pages.base + column + place.to(gl.int64)[:, None] * UNIT
    # .cg: every byte is read once, so do not cache in L1.
    if START + WORDS > SIZE // PER_WORD:
        words = gl.load(at, column < SIZE // PER_WORD, other=0, cache_modifier=".cg")
    else:
        words = gl.load(at, cache_modifier=".cg")
    return words


@gluon.jit
def _words_of(
    tile, FIRST: gl.constexpr, ROWS: gl.constexpr, SIZE: gl.constexpr, PART: gl.constexpr
):
    """A part of ``ROWS`` rows of a tile in shared memory, as int32 pairs of 16-bit elements."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    TILE_N: gl.constexpr = tile.shape[0]
    PAIRS: gl.constexpr = tile.shape[1] // 2
    words = tile._reinterpret(gl.int32, [TILE_N, PAIRS], LAYOUT).slice(FIRST, ROWS)
    if part_size(SIZE, PART) < 2 * PAIRS:
        words = words.slice(part_start(SIZE, PART) // 2, part_size(SIZE, PART) // 2, dim=1)
    return words


@gluon.jit
def _store_chunk(
    tile, FIRST: gl.constexpr, chunk, signs, scales, use, SIZE: gl.constexpr, config
):  # fmt: skip
    """Convert a chunk, and store it in its rows of the tile."""
    for part in gl.static_range(num_parts(SIZE)):
        pairs = _convert(chunk[part], FIRST, signs, scales, use, tile.dtype, config)
        _words_of(tile, FIRST, pairs.shape[0], SIZE, part).store(pairs)


@gluon.jit
def _convert(
    words, FIRST: gl.constexpr, signs, scales, use, dtype: gl.constexpr, config
):  # fmt: skip
    if config.SCALES == "token":
        if scales[0].ARE_OF_VALUES:
            ROWS: gl.constexpr = words.shape[0]
            rows = scales[0].of_use(use).slice(FIRST, ROWS)
            scale = rows.load(gl.SliceLayout(1, words.type.layout))
            pairs = scale_words(words, scale[:, None], config.PACKED, dtype)
        else:
            pairs = widen_words(words, signs, config.PACKED, dtype)
    else:
        pairs = widen_words(words, signs, config.PACKED, dtype)
    return pairs


@gluon.jit
def _store_zeros(tile, SIZE: gl.constexpr):
    """Zero the parts of a tile that products read."""
    TILE_N: gl.constexpr = tile.shape[0]
    for first in gl.static_range(0, TILE_N, 8):
        for part in gl.static_range(num_parts(SIZE)):
            words = _words_of(tile, first, 8, SIZE, part)
            words.store(_zeros(words.shape[1]))


@gluon.jit
def _zeros(WORDS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    return gl.zeros([8, WORDS], gl.int32, LAYOUT)

"""Gather rows of pages by ``cp.async``, if TMA boxes would be small (``ForwardConfig.gathers``).

Every lane copies 16 bytes at a time. A row's address is computed by one thread, which loaded the
block id one tile earlier, and is passed through shared memory::

    one thread for one or two rows       block id ─▶ address ─▶ shared memory
    two, four or eight lanes per row     address ─▶ copies of a part of its columns

``cp.async`` writes by the generic proxy and ``wgmma`` reads by the async proxy, so the threads wait
for their copies and fence before one of them signals that the slot is full, as TMA does. Past a
sequence's end its last key is repeated, or zeros if it has none; columns past a head's width are
zeros as far as products read them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .layouts import num_parts, part_of, part_size, part_start
from .names import barrier
from .record import record

GATHERING_WARPS = gl.constexpr(2)  # warps that gather keys, and as many for values
UNIT = gl.constexpr(8)  # elements of a copy, 16 bytes


@record
class Pages:
    """The pages of keys or values, and shared memory for the addresses of a tile's rows."""

    base: gl.tensor  # pointer to [num_blocks, block_size, num_kv_heads, HEAD_SIZE]
    block: gl.tensor  # strides, in units, of the type that places are computed in
    slot: gl.tensor
    head: gl.tensor
    places: gl.shared_memory_descriptor  # uint32 or int64 [TILE_N], in units


@gluon.jit
def make_pages(base, block, slot, head, TILE_N: gl.constexpr):
    """Make ``Pages`` with room for the addresses of ``TILE_N`` rows."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLACE: gl.constexpr = gl.uint32 if block.dtype == gl.int32 else gl.int64
    places = gl.allocate_shared_memory(PLACE, [TILE_N], LAYOUT)
    return Pages(base, block, slot, head, places)


@gluon.jit
def gather_tiles(pages, ring, use, begin, end, keys, SIZE: gl.constexpr, config):
    """Load tiles of keys or values from the right to the left; returns the ring's next use."""
    TILE_N: gl.constexpr = ring.tiles.shape[1]
    FINDING: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    table, _, seq_len, _, kv_head = keys
    # Past the end the last key is repeated: its weight is 0, and it adds no NaN.
    key = (end - 1) * TILE_N + gl.arange(0, TILE_N, FINDING)
    key = gl.minimum(key, gl.maximum(seq_len - 1, 0))
    block = gl.load(table + key // config.BLOCK_SIZE, seq_len > 0, other=0)
    for n in range(end - 1, begin - 1, -1):
        place = block * pages.block + key % config.BLOCK_SIZE * pages.slot + kv_head * pages.head
        pages.places.store(place.to(pages.places.dtype, bitcast=True))
        if n > begin:
            key = (n - 1) * TILE_N + gl.arange(0, TILE_N, FINDING)
            block = gl.load(table + key // config.BLOCK_SIZE)
        ring.barriers.wait_empty(0, use)
        TILES: gl.constexpr = ring.PARTS
        for part in gl.static_range(num_parts(SIZE, TILES)):
            tile = ring.tile(use, part if TILES > 1 else 0)
            _copy_part(pages, tile, seq_len > 0, SIZE, part, TILES)
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        ring.barriers.fill(0, use)
        use += 1
    return use


@gluon.jit
def _copy_part(
    pages, tile, exists, HEAD_SIZE: gl.constexpr, PART: gl.constexpr, TILES: gl.constexpr
):
    """Start the copies of a part of a tile's columns."""
    TILE_N: gl.constexpr = tile.shape[0]
    SIZE: gl.constexpr = part_size(HEAD_SIZE, PART, TILES)
    START: gl.constexpr = part_start(HEAD_SIZE, PART, TILES)
    LANES: gl.constexpr = min(8, SIZE // UNIT)
    AT_ONCE: gl.constexpr = 64  # rows, as registers allow
    COPYING: gl.constexpr = gl.BlockedLayout(
        [1, UNIT], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0]
    )
    column = START + gl.arange(0, SIZE, gl.SliceLayout(0, COPYING))[None, :]
    mask = gl.full([AT_ONCE, SIZE], exists, gl.int1, COPYING)
    if START + SIZE > HEAD_SIZE:
        mask = mask & (column < HEAD_SIZE)
    for first in gl.static_range(0, TILE_N, AT_ONCE):
        place = pages.places.slice(first, AT_ONCE).load(gl.SliceLayout(1, COPYING))
        at = pages.base + column + place.to(gl.int64)[:, None] * UNIT
        part = part_of(tile.slice(first, AT_ONCE), HEAD_SIZE, PART, TILES)
        async_copy.async_copy_global_to_shared(part, at, mask)

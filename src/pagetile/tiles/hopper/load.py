"""The loading warps of attention on Hopper: they find tiles and copy them into the rings.

One warp finds the tiles of queries, writes each tile's metadata for the computing warpgroups, and
loads queries and keys; another finds the same tiles and loads values. Copies are made by TMA, or if
boxes would be small row by row, by two warps each instead of one (``gather``).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from .config import COLUMNS, ROWS
from .gather import gather_tiles
from .gather_packed import gather_packed_tiles
from .metadata import (
    CAUSAL_LIMIT,
    COUNT,
    HEAD,
    K_SCALE,
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
from .names import barrier
from .schedule import (
    LIST_FIELDS,
    OUT_OF_BOUNDS,
    count_tiles,
    find_tile,
    key_tiles,
    listed_tiles,
    measure_seqs,
    tile_of_iteration,
)
from .splits import cut_range, find_in_waves, find_split


@gluon.jit
def _find_work(batch, schedule, number, seqs, TILE_N: gl.constexpr, config):
    """Find tile ``number``, and whether it exists."""
    TOKENS: gl.constexpr = config.TOKENS
    num_tiles = schedule.num_splits if config.SPLITS else batch.num_tiles
    known = number if config.DRAWS else gl.minimum(number, num_tiles - 1)
    place = (0, 1, 0, 0)
    if config.SPLITS and config.DRAWS:
        seq, token, head, place = find_in_waves(
            batch, schedule, known, seqs, TOKENS, TILE_N, config
        )
    elif config.SPLITS:
        seq, token, head, place = find_split(
            batch, schedule, known, TOKENS, TILE_N, config.CAUSAL, config.HAS_WINDOW
        )
    else:
        seq, token, head = find_tile(batch, known, seqs, TOKENS, config)
    q_start = gl.load(batch.cu_seqlens_q + seq)
    query_len = gl.load(batch.cu_seqlens_q + seq + 1) - q_start
    k_start = 0
    seq_len = gl.load(batch.lengths + seq)
    if config.BLOCK_SIZE == 0:
        k_start = seq_len
        seq_len = gl.load(batch.lengths + seq + 1) - k_start
    exists = (number < num_tiles) & (token < query_len) & (query_len > batch.short)
    if config.SPLITS:
        exists = exists & (place[0] < place[1])
    table = batch.block_tables + seq.to(gl.int64) * batch.table_stride
    kv_head = head * config.PACK // batch.group
    keys = (table, k_start, seq_len, batch.block_rows, kv_head)
    record = 0
    if config.SPARSE:
        rank = batch.seq_tiles - 1 - token // TOKENS
        record = batch.tile_lists.find(seq, head, rank)
        token = gl.load(batch.tile_lists.lists + record) * TOKENS
    return exists, q_start, query_len, token, head, keys, record, place


@gluon.jit
def load_keys_role(q_desc, k, batch, schedule, queue, metadata, q_ring, k_ring, config):
    """Find tiles of queries, write their metadata, and load them and their keys."""
    seqs = measure_seqs(batch, config.TOKENS, config)
    tile_use = 0
    use = 0
    if config.DRAWS:
        count = 0
        number = gl.program_id(0)
        num_tiles = schedule.num_splits if config.SPLITS else count_tiles(batch, seqs, config)
        queue.push(count, number)
        while number < num_tiles:
            tile_use, use, number = _load_work(
                q_desc, k, batch, schedule, queue, seqs, count, num_tiles, number, metadata, q_ring,
                k_ring, tile_use, use, config,
            )  # fmt: skip
            count += 1
    else:
        num_tiles = schedule.num_splits if config.SPLITS else batch.num_tiles
        for iteration in range(gl.cdiv(num_tiles, gl.num_programs(0))):
            tile_use, use, _ = _load_work(
                q_desc, k, batch, schedule, queue, seqs, 0, num_tiles, tile_of_iteration(iteration),
                metadata, q_ring, k_ring, tile_use, use, config,
            )  # fmt: skip
    if config.EARLY:
        metadata.write(tile_use, NUM_TILES, 0)
        for w in gl.static_range(config.WARPGROUPS):
            q_ring.barriers.wait_empty(w, tile_use)
            q_ring.barriers.fill(w, tile_use)
    else:
        q_ring.barriers.wait_empty(0, tile_use)
        metadata.write(tile_use, NUM_TILES, 0)
        _loader_barrier(config)
        q_ring.barriers.fill(0, tile_use)


@gluon.jit
def _load_work(
    q_desc, k, batch, schedule, queue, seqs, count, num_numbers, number, metadata, q_ring, k_ring,
    tile_use, use, config,
):  # fmt: skip
    """Load tile ``number``'s queries and keys, if it exists, and draw the next number meanwhile.

    Returns the rings' next uses, and the drawn number.
    """
    TILE_N: gl.constexpr = k_ring.tiles.shape[1]
    TOKENS: gl.constexpr = config.TOKENS
    exists, q_start, query_len, token, head, keys, record, place = _find_work(
        batch, schedule, number, seqs, TILE_N, config
    )
    next_number = 0
    drawn = 0
    if exists:
        seq_len = keys[2]
        position = seq_len - query_len + token
        if config.SPARSE:
            begin, end = 0, 0
            num_tiles, num_right, num_full, origin, num_keys = listed_tiles(
                batch.tile_lists.lists + record, seq_len, TILE_N
            )
        else:
            begin, full_begin, full_end, end = key_tiles(
                position, seq_len, batch.window, TOKENS, TILE_N, config.CAUSAL,
                config.HAS_WINDOW,
            )  # fmt: skip
            if config.SPLITS:
                begin, full_begin, full_end, end = cut_range(
                    begin, full_begin, full_end, end, place
                )
            origin = (end - 1) * TILE_N
            num_tiles, num_right = end - begin, end - 1 - full_end
            num_full, num_keys = full_end - full_begin, seq_len - origin
        if config.SCALES == "head":
            k_scale, v_scale = k[1][0].bits(keys[4])
        # The first keys before the queries: while the previous ones are still in use, and where
        # nothing is computed yet, since keys take another read, of the block table. With splits
        # ptxas would read registers that it has not written.
        IN_BOXES: gl.constexpr = not (config.GATHER or config.SPARSE)
        if IN_BOXES and (config.EARLY or not config.SPLITS):  # noqa: SIM102
            if config.EARLY or tile_use == 0:
                use = _load_tiles(k, k_ring, use, end - 1, end, keys, config.HEAD_SIZE, config)
                end -= 1
        if not config.EARLY:
            q_ring.barriers.wait_empty(0, tile_use)
        if config.SCALES == "head":
            metadata.write(tile_use, K_SCALE, k_scale)
            metadata.write(tile_use, V_SCALE, v_scale)
        metadata.write(tile_use, NUM_TILES, num_tiles)
        metadata.write(tile_use, NUM_RIGHT, num_right)
        metadata.write(tile_use, NUM_FULL, num_full)
        metadata.write(tile_use, CAUSAL_LIMIT, position - origin)
        metadata.write(tile_use, NUM_KEYS, num_keys)
        if config.SPARSE:
            metadata.write(tile_use, RECORD, record)
        if config.SPLITS:
            metadata.write(tile_use, SPLIT, place[0])
            metadata.write(tile_use, COUNT, place[1])
            metadata.write(tile_use, SLOT, place[2])
        metadata.write(tile_use, TOKEN, q_start + token)
        metadata.write(tile_use, NUM_TOKENS, query_len - token)
        metadata.write(tile_use, HEAD, head)
        _loader_barrier(config)
        _load_queries(q_desc, q_ring, tile_use, q_start + token, head, config)
        tile_use += 1
        if config.DRAWS:
            drawn = queue.draw()
        if config.SPARSE:
            listed = batch.tile_lists.lists + record
            use = _load_listed(k, k_ring, use, listed, keys, config)
        else:
            use = _load_tiles(k, k_ring, use, begin, end, keys, config.HEAD_SIZE, config)
    elif config.DRAWS:
        drawn = queue.draw()
    if config.DRAWS:
        next_number = queue.push_drawn(count + 1, drawn, num_numbers)
    return tile_use, use, next_number


@gluon.jit
def _loader_barrier(config):
    """Synchronise the two warps of a gathering role before one of them signals."""
    if config.GATHER:
        barrier()


@gluon.jit
def load_values_role(v, batch, schedule, queue, v_ring, config):
    """Find the same tiles of queries, and load their values."""
    seqs = measure_seqs(batch, config.TOKENS, config)
    use = 0
    if config.DRAWS:
        count = 0
        number = queue.pop(count)
        num_tiles = schedule.num_splits if config.SPLITS else count_tiles(batch, seqs, config)
        while number < num_tiles:
            use = _load_values(v, batch, schedule, seqs, number, v_ring, use, config)
            count += 1
            number = queue.pop(count)
    else:
        num_tiles = schedule.num_splits if config.SPLITS else batch.num_tiles
        for iteration in range(gl.cdiv(num_tiles, gl.num_programs(0))):
            number = tile_of_iteration(iteration)
            use = _load_values(v, batch, schedule, seqs, number, v_ring, use, config)


@gluon.jit
def _load_values(v, batch, schedule, seqs, number, v_ring, use, config):
    """Load tile ``number``'s values, if it exists; returns the ring's next use."""
    TILE_N: gl.constexpr = v_ring.tiles.shape[1]
    TOKENS: gl.constexpr = config.TOKENS
    exists, _, query_len, token, _, keys, record, place = _find_work(
        batch, schedule, number, seqs, TILE_N, config
    )
    if exists:
        if config.SPARSE:
            listed = batch.tile_lists.lists + record
            use = _load_listed(v, v_ring, use, listed, keys, config)
        else:
            seq_len = keys[2]
            begin, full_begin, full_end, end = key_tiles(
                seq_len - query_len + token, seq_len, batch.window, TOKENS, TILE_N,
                config.CAUSAL, config.HAS_WINDOW,
            )  # fmt: skip
            if config.SPLITS:
                begin, _, _, end = cut_range(begin, full_begin, full_end, end, place)
            use = _load_tiles(v, v_ring, use, begin, end, keys, config.V_SIZE, config)
    return use


@gluon.jit
def _load_queries(desc, ring, use, token, head, config):
    """Load all warpgroups' queries; if ``EARLY``, each one's as it releases the previous ones."""
    FILLED: gl.constexpr = ROWS // config.PACK * config.PACK  # rows of a box
    BYTES: gl.constexpr = config.KEY_TILES * FILLED * ring.tiles.shape[2] * 2
    if config.EARLY:
        for w in gl.static_range(config.WARPGROUPS):
            ring.barriers.wait_empty(w, use)
            ready = ring.barriers.expect(w, use, BYTES)
            _load_rows(desc, ring, use, token, head, ready, config, w)
    else:
        ready = ring.barriers.expect(0, use, config.WARPGROUPS * BYTES)
        for w in gl.static_range(config.WARPGROUPS):
            _load_rows(desc, ring, use, token, head, ready, config, w)


@gluon.jit
def _load_rows(desc, ring, use, token, head, ready, config, WG: gl.constexpr):
    """Load a warpgroup's queries."""
    PACK: gl.constexpr = config.PACK
    SHAPE: gl.constexpr = desc.block_shape
    CHUNKS: gl.constexpr = ring.tiles.shape[2] // COLUMNS
    for i in gl.static_range(config.KEY_TILES):
        boxes = ring.tile(use, WG * config.KEY_TILES + i)._reinterpret(
            ring.tiles.dtype, [CHUNKS, SHAPE[0], SHAPE[1], COLUMNS], desc.layout
        )
        for c in gl.static_range(CHUNKS):
            where = [token + WG * (ROWS // PACK), head * PACK, (i * CHUNKS + c) * COLUMNS]
            tma.async_copy_global_to_shared(desc, where, ready, boxes.index(c))


@gluon.jit
def _load_tiles(source, ring, use, begin, end, keys, SIZE: gl.constexpr, config):
    """Load tiles of keys or values from the right to the left; returns the ring's next use."""
    TILE_N: gl.constexpr = ring.tiles.shape[1]
    if config.PACKED != "none":
        use = gather_packed_tiles(source, ring, use, begin, end, keys, SIZE, config)
    elif config.GATHER:
        use = gather_tiles(source, ring, use, begin, end, keys, SIZE, config)
    else:
        desc = source[0] if config.SCALES == "head" else source
        key = end * TILE_N
        for _ in range(end - begin):
            key -= TILE_N
            _load_tile(desc, ring, use, key, keys, config)
            use += 1
    return use


@gluon.jit
def _load_listed(source, ring, use, listed, keys, config):
    """Load the tiles of a list, at least one; returns the ring's next use."""
    TILE_N: gl.constexpr = ring.tiles.shape[1]
    count = gl.load(listed + 1) + gl.load(listed + 2)
    for i in range(gl.maximum(count, 1)):
        # With an empty list, load a tile out of bounds: zeros.
        key = gl.where(count > 0, gl.load(listed + LIST_FIELDS + i) * TILE_N, OUT_OF_BOUNDS)
        _load_tile(source, ring, use, key, keys, config)
        use += 1
    return use


@gluon.jit
def _load_tile(desc, ring, use, key, keys, config):
    """Start the TMA copies of a tile of keys or values, in boxes; past the end it is zeros."""
    BOXES: gl.constexpr = ring.tiles.shape[1] // config.BOX
    rows = _find_rows(keys, key, BOXES, config)  # while the slot is still in use
    ring.barriers.wait_empty(0, use)
    ready = ring.expect(use)
    for part in gl.static_range(ring.PARTS):
        tile = ring.tile(use, part)
        for i in gl.static_range(BOXES):
            _load_box(desc, tile, i, keys[4], rows[i], part * COLUMNS, ready, config)


@gluon.jit
def _load_box(desc, tile, INDEX: gl.constexpr, kv_head, row, COLUMN: gl.constexpr, ready, config):
    BOXES: gl.constexpr = tile.shape[0] // config.BOX
    CHUNKS: gl.constexpr = tile.shape[1] // COLUMNS
    if config.ATOMS:
        boxes = tile._reinterpret(
            tile.dtype, [BOXES, 1, config.BOX // 8, CHUNKS, 8, COLUMNS], desc.layout
        )
        where = [kv_head, row, 0, 0, 0]
        tma.async_copy_global_to_shared(desc, where, ready, boxes.index(INDEX))
    else:
        SHARE: gl.constexpr = desc.block_shape[1]  # chunks of a box
        boxes = tile._reinterpret(
            tile.dtype, [CHUNKS // SHARE * BOXES, 1, SHARE, config.BOX, COLUMNS], desc.layout
        )
        for c in gl.static_range(CHUNKS // SHARE):
            where = [kv_head, 0, row, COLUMN + c * COLUMNS]
            tma.async_copy_global_to_shared(desc, where, ready, boxes.index(c * BOXES + INDEX))


@gluon.jit
def _find_rows(keys, key, COUNT: gl.constexpr, config):
    """First rows of a tile's boxes, in rows or groups of eight; past the end out of bounds."""
    table, k_start, seq_len, block_rows, _ = keys
    GROUP: gl.constexpr = 8 if config.ATOMS else 1
    rows = ()
    for i in gl.static_range(COUNT):
        at = key + i * config.BOX
        row = k_start + at
        if config.BLOCK_SIZE > 0:
            block = gl.load(table + at // config.BLOCK_SIZE, at < seq_len, other=-1)
            row = block * block_rows + at % config.BLOCK_SIZE // GROUP
        rows = rows + (row,)  # type: ignore[assignment] # noqa: RUF005
    return rows

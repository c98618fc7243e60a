"""Split the keys of tiles of queries among CTAs, if tiles alone would leave multiprocessors idle.

A *split* is a range of keys of one tile of queries. Tiles of all sequences are cut at the same
multiples of ``split_tiles`` tiles of keys, counted from a tile's first, so that CTAs with the same
keys run at the same time and share them in L2. Splits are numbered by sequence, then from left to
right, and CTAs take them round-robin::

    keys       0        split_tiles  2 × split_tiles
    tile 1     ├─ split 0 ─┼─ split 2 ─┼─ 4 ─┤         numbers of a sequence with two tiles
    tile 0     ├─ split 1 ─┼─ split 3 ─┼─ 5 ─┤         of queries and one head

``split_tiles`` is chosen by every program from the lengths alone: the same batch gets the same
splits on every call, and a captured launch can be replayed with other lengths. For each number of
splits of the longest tile, the cost is estimated in tiles of keys that one multiprocessor computes.
The cheapest is taken, of equals the one with the longest splits::

    waves = ⌈splits / programs⌉
    cost  = max(split_tiles, waves × mean tiles of a split)    tiles of keys
          + ITEM_COST × waves                                  prologue, epilogue, partial result
          + SPLIT_COST + MERGE_COST × splits of the longest    only if any tile is cut

That is a ``SplitSchedule``. From one and a half waves of tiles on, a ``LastWave`` splits only the
tiles that remain after whole waves, the last ones of ``schedule``'s order, each into equal splits::

    programs   ├─ tile ─┼─ tile ─┼─ split ─┤
               ├─ tile ─┼─ tile ─┼─ split ─┤     instead of a third wave with few tiles
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .dividing import ITEM_COST, LEAST_KEYS, MERGE_COST, MOST_SEQS, MOST_SPLITS, SLOTS, SPLIT_COST
from .record import record
from .schedule import add, count_seq_tiles, find_tile, key_tiles

_AT_ONCE = gl.constexpr(128)  # sequences that are measured at a time
_LEAST_KEYS = gl.constexpr(LEAST_KEYS)
_MOST_SPLITS = gl.constexpr(MOST_SPLITS)
_MOST_SEQS = gl.constexpr(MOST_SEQS)
_SLOTS = gl.constexpr(SLOTS)
_ITEM_COST = gl.constexpr(ITEM_COST)
_SPLIT_COST = gl.constexpr(SPLIT_COST)
_MERGE_COST = gl.constexpr(MERGE_COST)


@record
class SplitSchedule:
    """How a launch splits keys, and scratch memory for partial results."""

    starts: gl.shared_memory_descriptor  # [MOST_SEQS, 1] int32: splits of all sequences before each
    num_splits: gl.tensor  # of all sequences and heads
    split_tiles: gl.tensor  # tiles of keys of a split, at most
    accs: gl.tensor  # pointer to [SLOTS, WARPGROUPS, ROWS, V_WIDTH] float32
    sums: gl.tensor  # pointer to [SLOTS, WARPGROUPS, 2, ROWS] float32: m and l
    arrivals: gl.tensor  # pointer to [SLOTS, WARPGROUPS] int32 of zeros, left as zeros

    @gluon.jit
    def start_of(self, seq):
        """The number of splits of all sequences before ``seq``."""
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        return gl.max(self.starts.index(seq).load(LAYOUT), 0)


@record
class LastWave:
    """How a launch splits the keys of its last tiles: those that remain after whole waves."""

    num_whole: gl.tensor  # tiles that are not split, which come first
    num_cut: gl.tensor  # tiles that are split, at least 1
    num_parts: gl.tensor  # splits of each
    num_splits: gl.tensor  # work items: whole tiles and splits
    accs: gl.tensor  # as of a SplitSchedule
    sums: gl.tensor
    arrivals: gl.tensor


@gluon.jit
def make_last_wave(
    batch, accs, sums, arrivals, TOKENS: gl.constexpr, TILE_N: gl.constexpr,
    V_WIDTH: gl.constexpr, config,
):  # fmt: skip
    """Choose how many tiles are split, and into how many splits, by the cost above."""
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    seq, num_tiles = count_seq_tiles(batch, TOKENS)
    _, first, longest = _measure(batch, seq, TOKENS, TILE_N, config.CAUSAL, config.HAS_WINDOW)
    work = gl.sum(num_tiles.to(gl.float32) * (first + longest).to(gl.float32), 0) * 0.5
    tiles = gl.sum(num_tiles, 0)
    mean = work / gl.maximum(tiles, 1)  # tiles of keys of a tile of queries
    tiles *= batch.num_heads
    programs = gl.num_programs(0)
    parts = 1 + gl.arange(0, _MOST_SPLITS, FLAT)
    length = mean / parts.to(gl.float32)
    merging = _SPLIT_COST + (_MERGE_COST * V_WIDTH / 128) * parts.to(gl.float32)
    merging = gl.where(parts > 1, merging, 0.0)
    is_short = (parts > 1) & (length * TILE_N < _LEAST_KEYS)
    best = float("inf")
    num_cut = 0
    num_parts = 1
    for waves in gl.static_range(2):  # whole waves that are split besides the remaining tiles
        cut = tiles % programs + waves * programs
        rounds = (cut * parts + programs - 1) // programs
        cost = (tiles - cut) / programs * (mean + _ITEM_COST)
        costs = cost + rounds.to(gl.float32) * (length + _ITEM_COST) + merging
        costs = gl.where(is_short | (cut * parts > _SLOTS), float("inf"), costs)
        costs = gl.where((cut == 0) | (cut > tiles), float("inf"), costs)
        least = gl.min(costs, 0)
        fewest = gl.min(gl.where(costs == least, parts, _MOST_SPLITS), 0)
        is_better = least < best
        num_cut = gl.where(is_better, cut, num_cut)
        num_parts = gl.where(is_better, fewest, num_parts)
        best = gl.minimum(best, least)
    num_cut = gl.where(num_parts > 1, num_cut, 0)
    num_whole = tiles - num_cut
    num_splits = num_whole + num_cut * num_parts
    return LastWave(num_whole, gl.maximum(num_cut, 1), num_parts, num_splits, accs, sums, arrivals)


@gluon.jit
def find_in_waves(
    batch, schedule, number, seqs, TOKENS: gl.constexpr, TILE_N: gl.constexpr, config
):  # fmt: skip
    """Sequence, first token in it, and head of split ``number``, and its place in the tile.

    The place is ``(split, count, slot, split_tiles)``: the split's index among the ``count`` of its
    tile, the scratch slot of the first, and the tiles of keys of a split.
    """
    rest = number - schedule.num_whole
    is_cut = rest >= 0
    tile = gl.where(is_cut, schedule.num_whole + rest % schedule.num_cut, number)
    split = gl.where(is_cut, rest // schedule.num_cut, 0)
    slot = gl.where(is_cut, rest % schedule.num_cut * schedule.num_parts, 0)
    seq, token, head = find_tile(batch, tile, seqs, TOKENS, config)
    query_len = gl.load(batch.cu_seqlens_q + seq + 1) - gl.load(batch.cu_seqlens_q + seq)
    seq_len = gl.load(batch.lengths + seq)
    begin, _, _, end = key_tiles(
        seq_len - query_len + token, seq_len, batch.window, TOKENS, TILE_N, config.CAUSAL,
        config.HAS_WINDOW,
    )  # fmt: skip
    parts = gl.where(is_cut, schedule.num_parts, 1)
    split_tiles = (end - begin + parts - 1) // parts
    count = (end - begin + split_tiles - 1) // split_tiles
    return seq, token, head, (split, count, slot, split_tiles)


@gluon.jit
def _measure(
    batch, seq, TOKENS: gl.constexpr, TILE_N: gl.constexpr, CAUSAL: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """A sequence's number of tiles of queries, and the tiles of keys of its first and longest."""
    exists = seq < batch.num_seqs
    start = gl.load(batch.cu_seqlens_q + seq, exists, other=0)
    query_len = gl.load(batch.cu_seqlens_q + seq + 1, exists, other=0) - start
    seq_len = gl.load(batch.lengths + seq, exists, other=0)
    num_tiles = (query_len + TOKENS - 1) // TOKENS
    position = seq_len - query_len
    begin, _, _, end = key_tiles(
        position, seq_len, batch.window, TOKENS, TILE_N, CAUSAL, HAS_WINDOW
    )
    first = end - begin
    if HAS_WINDOW:
        longest = gl.maximum((gl.maximum(seq_len, 0) + TILE_N - 1) // TILE_N - begin, 1)
        if CAUSAL:  # the most tiles that the windows of one tile's tokens overlap
            longest = gl.minimum(longest, (batch.window + TOKENS + TILE_N - 3) // TILE_N + 1)
    else:
        last = position + (num_tiles - 1) * TOKENS
        begin, _, _, end = key_tiles(
            last, seq_len, batch.window, TOKENS, TILE_N, CAUSAL, HAS_WINDOW
        )
        longest = gl.maximum(end - begin, first)
    return gl.where(query_len > batch.short, num_tiles, 0), first, longest


@gluon.jit
def _count_splits(tiles, per_tile):
    """⌈tiles / split_tiles⌉ by a reciprocal, which is faster than integer division.

    Exact below 2 ** 21 tiles: half a tile from the next integer, so past any error of rounding.
    """
    return ((tiles.to(gl.float32) - 0.5) * per_tile).to(gl.int32) + 1


@gluon.jit
def _choose_split_tiles(
    batch, TOKENS: gl.constexpr, TILE_N: gl.constexpr, V_WIDTH: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Tiles of keys of a split, by the cost above."""
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    GRID: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [gl.num_warps(), 1], [1, 0])
    BY_SEQ: gl.constexpr = gl.SliceLayout(1, GRID)
    BY_CHOICE: gl.constexpr = gl.SliceLayout(0, GRID)
    at_once = gl.arange(0, _AT_ONCE, FLAT)
    # Reduce elementwise over blocks of sequences first: a reduction across warps takes a barrier.
    longest = gl.full([_AT_ONCE], 1, gl.int32, FLAT)
    work = gl.full([_AT_ONCE], 0.0, gl.float32, FLAT)  # tiles of queries times tiles of keys
    for start in range(0, batch.num_seqs, _AT_ONCE):
        tiles, first, most = _measure(batch, start + at_once, TOKENS, TILE_N, CAUSAL, HAS_WINDOW)
        longest = gl.maximum(longest, gl.where(tiles > 0, most, 1))
        work += tiles.to(gl.float32) * (first + most).to(gl.float32)
    longest = gl.max(longest, 0)
    work = gl.sum(work, 0) * 0.5 * batch.num_heads
    choice = 1 + gl.arange(0, _MOST_SPLITS, BY_CHOICE)
    split_tiles = gl.maximum((longest + choice - 1) // choice, _LEAST_KEYS // TILE_N)
    per_tile = (1.0 / split_tiles.to(gl.float32))[None, :]
    numbers = gl.full([_AT_ONCE, _MOST_SPLITS], 0, gl.int32, GRID)  # numbered splits
    doubled = gl.full([_AT_ONCE, _MOST_SPLITS], 0, gl.int32, GRID)  # twice the splits with keys
    for start in range(0, batch.num_seqs, _AT_ONCE):
        seq = start + gl.arange(0, _AT_ONCE, BY_SEQ)
        tiles, first, most = _measure(batch, seq, TOKENS, TILE_N, CAUSAL, HAS_WINDOW)
        of_longest = _count_splits(most[:, None], per_tile)
        numbers += tiles[:, None] * of_longest
        doubled += tiles[:, None] * (_count_splits(first[:, None], per_tile) + of_longest)
    numbers = gl.sum(numbers, 0)
    doubled = gl.sum(doubled, 0)
    numbers *= batch.num_heads
    splits = gl.maximum((doubled * batch.num_heads + 1) // 2, 1)
    waves = ((splits + gl.num_programs(0) - 1) // gl.num_programs(0)).to(gl.float32)
    cost = gl.maximum(split_tiles.to(gl.float32), waves * (work / splits.to(gl.float32)))
    cost += _ITEM_COST * waves
    of_longest = (longest + split_tiles - 1) // split_tiles
    merging = _SPLIT_COST + (_MERGE_COST * V_WIDTH / 128) * of_longest.to(gl.float32)
    cost += gl.where(of_longest > 1, merging, 0.0)
    cost = gl.where((of_longest > 1) & (numbers > _SLOTS), float("inf"), cost)
    return gl.max(gl.where(cost == gl.min(cost, 0), split_tiles, 0), 0)


@gluon.jit
def make_split_schedule(
    batch, accs, sums, arrivals, TOKENS: gl.constexpr, TILE_N: gl.constexpr,
    V_WIDTH: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Choose the splits of all tiles, and number them."""
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    split_tiles = _choose_split_tiles(batch, TOKENS, TILE_N, V_WIDTH, CAUSAL, HAS_WINDOW)
    blocks = gl.allocate_shared_memory(gl.int32, [_MOST_SEQS // _AT_ONCE, _AT_ONCE], SHARED)
    at_once = gl.arange(0, _AT_ONCE, FLAT)
    before = 0
    for start in range(0, batch.num_seqs, _AT_ONCE):
        tiles, _, longest = _measure(batch, start + at_once, TOKENS, TILE_N, CAUSAL, HAS_WINDOW)
        splits = tiles * ((longest + split_tiles - 1) // split_tiles) * batch.num_heads
        ends = gl.associative_scan(splits, 0, add)
        blocks.index(start // _AT_ONCE).store(before + ends - splits)
        before += gl.sum(splits, 0)
    starts = blocks._reinterpret(gl.int32, [_MOST_SEQS, 1], SHARED)
    return SplitSchedule(starts, before, split_tiles, accs, sums, arrivals)


@gluon.jit
def find_split(
    batch, schedule, number, TOKENS: gl.constexpr, TILE_N: gl.constexpr, CAUSAL: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Sequence, first token, head and place of split ``number``, as ``find_in_waves`` returns them.

    Every tile of a sequence is given as many numbers as its longest; a tile with fewer keys has
    fewer splits, and the other numbers do not exist.
    """
    low = 0
    high = batch.num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if schedule.start_of(middle) <= number:
            low = middle
        else:
            high = middle
    tiles, _, longest = _measure(batch, low, TOKENS, TILE_N, CAUSAL, HAS_WINDOW)
    tiles = gl.maximum(tiles, 1)
    most = (longest + schedule.split_tiles - 1) // schedule.split_tiles
    start = schedule.start_of(low)
    rest = number - start
    head = rest % batch.num_heads
    rest = rest // batch.num_heads
    tile = tiles - 1 - rest % tiles
    split = rest // tiles
    token = tile * TOKENS
    q_start = gl.load(batch.cu_seqlens_q + low)
    seq_len = gl.load(batch.lengths + low)
    position = seq_len - (gl.load(batch.cu_seqlens_q + low + 1) - q_start) + token
    begin, _, _, end = key_tiles(
        position, seq_len, batch.window, TOKENS, TILE_N, CAUSAL, HAS_WINDOW
    )
    count = gl.minimum((end - begin + schedule.split_tiles - 1) // schedule.split_tiles, most)
    slot = start + (tile * batch.num_heads + head) * most
    return low, token, head, (split, count, slot, schedule.split_tiles)


@gluon.jit
def cut_range(begin, full_begin, full_end, end, place):
    """Restrict the result of ``key_tiles`` to one split."""
    split, count, _, split_tiles = place
    first = begin + split * split_tiles
    end = gl.where(split == count - 1, end, first + split_tiles)
    full_end = gl.maximum(gl.minimum(full_end, end - 1), first)
    full_begin = gl.minimum(gl.maximum(full_begin, first), full_end)
    return first, full_begin, full_end, end

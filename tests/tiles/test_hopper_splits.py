"""How Hopper's prefill splits keys and merges: the kernel's own functions, run on the host.

Neither the schedule nor the merge multiplies matrices or copies tiles, so NumPy versions of the few
functions of Gluon's language that they call are enough to run them as Python.
"""

import itertools
import random
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed: no GPU kernels")

import triton
from triton.experimental.gluon import language as gluon

from pagetile.tiles.hopper import finish, merge, schedule, splits
from pagetile.tiles.hopper.dividing import LEAST_KEYS, SLOTS, divides_keys, pack_of, tokens_of
from pagetile.tiles.hopper.layouts import num_parts, part_size
from pagetile.tiles.hopper.tiling import TILINGS, tiling_of, width_of

WARPS, PROGRAMS, TILE_N = 4, 132, 128


class Numbers(np.ndarray):
    """A tensor as a NumPy array."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype):
        return self.astype(dtype)


class Pointer:
    def __init__(self, memory, at=0):
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset):
        return Pointer(self.memory, self.at + offset)


class Shared:
    def __init__(self, memory):
        self.memory = memory

    def index(self, i):
        return Shared(self.memory[i])

    def store(self, numbers):
        self.memory[...] = numbers

    def load(self, layout):
        return self.memory

    def _reinterpret(self, dtype, shape, layout):
        return Shared(self.memory.reshape(shape))


def _load(pointer, mask=True, other=None, **_):
    if mask is True and not isinstance(pointer.at, np.ndarray):
        return int(pointer.memory[pointer.at])
    at = np.where(mask, pointer.at, 0)
    found = np.where(mask, pointer.memory[at], other or 0)
    return int(found) if found.ndim == 0 else found.view(Numbers)


def _store(pointer, numbers, mask=True):
    at, numbers, mask = np.broadcast_arrays(pointer.at, numbers, mask)
    pointer.memory[at[mask]] = numbers[mask]


def _count(pointer, number, **_):
    before = int(pointer.memory[pointer.at])
    pointer.memory[pointer.at] += number
    return before


def _where(condition, a, b):
    # Called a million times, nearly always with numbers; a generator would take most of that time.
    if not (
        isinstance(condition, np.ndarray) or isinstance(a, np.ndarray) or isinstance(b, np.ndarray)
    ):
        return a if condition else b
    chosen = np.where(condition, a, b)
    return chosen.item() if chosen.ndim == 0 else chosen.view(Numbers)


def _reduction(ufunc):
    """A reduction; a result without dimensions is a number, which is faster than an array."""
    return lambda x, axis: ufunc.reduce(x, axis)[()]


LANGUAGE = SimpleNamespace(
    constexpr=gluon.constexpr,
    int1=bool,
    int32=np.int32,
    int64=np.int64,
    float32=np.float32,
    BlockedLayout=lambda *_: None,
    SliceLayout=lambda *_: None,
    SwizzledSharedLayout=lambda *_: None,
    cdiv=lambda a, b: -(-a // b),
    num_warps=lambda: WARPS,
    num_programs=lambda _: PROGRAMS,
    arange=lambda start, end, _: np.arange(start, end).view(Numbers),
    full=lambda shape, value, dtype, _: np.full(shape, value, dtype).view(Numbers),
    load=_load,
    store=_store,
    atomic_add=_count,
    static_range=range,
    exp2=np.exp2,
    log2=np.log2,
    convert_layout=lambda x, *_, **__: x,
    where=_where,
    minimum=np.minimum,
    maximum=np.maximum,
    max=_reduction(np.maximum),
    min=_reduction(np.minimum),
    sum=_reduction(np.add),
    associative_scan=lambda x, axis, _: np.cumsum(x, axis).view(Numbers),
    allocate_shared_memory=lambda dtype, shape, _: Shared(np.full(shape, -1, dtype)),
)


def on_host(*modules):
    """The functions of some modules as plain Python functions."""
    names = {}
    for name, value in itertools.chain(*(vars(module).items() for module in modules)):
        names.setdefault(name, value)
        if isinstance(value, gluon.constexpr):
            names[name] = value.value
        elif isinstance(value, triton.JITFunction):
            names[name] = FunctionType(value.fn.__code__, names, name)
    names["gl"] = names["tl"] = LANGUAGE
    names["barrier"] = lambda: None
    names["SplitSchedule"] = HostSchedule
    names["LastWave"] = HostWave
    return SimpleNamespace(**names)


class HostSchedule:
    def __init__(self, starts, num_splits, split_tiles, *_):
        self.starts, self.num_splits, self.split_tiles = starts, int(num_splits), int(split_tiles)

    def start_of(self, seq):
        return int(self.starts.index(seq).load(None)[0])


class HostWave:
    def __init__(self, *numbers):
        self.num_whole, self.num_cut, self.num_parts, self.num_splits = map(int, numbers[:4])


HOST = on_host(schedule, splits, finish, merge)


def draw_tiles(batch, tokens=128, *, is_uniform=False):
    """(sequence, token, head) of each tile, in the order in which programs draw them."""
    config = SimpleNamespace(UNIFORM=is_uniform, DRAWS=True, BLOCK_SIZE=16)
    seqs = HOST.measure_seqs(batch, tokens, config)
    count = HOST.count_tiles(batch, seqs, config)
    found = (HOST.find_tile(batch, number, seqs, tokens, config) for number in range(count))
    return [tuple(map(int, tile)) for tile in found]


def make_batch(query_lens, seq_lens, num_heads, *, short=0, window=1 << 30):
    starts = np.array([0, *itertools.accumulate(query_lens)])
    return SimpleNamespace(
        cu_seqlens_q=Pointer(starts), lengths=Pointer(np.array(seq_lens)), num_seqs=len(seq_lens),
        num_heads=num_heads, short=short, window=window,
    )  # fmt: skip


def list_tiles(batch, tokens=128):
    """(sequence, token, head) of each tile."""
    query_lens = np.diff(batch.cu_seqlens_q.memory).tolist()
    return {
        (seq, token, head)
        for seq, query_len in enumerate(query_lens)
        for token in (range(0, query_len, tokens) if query_len > batch.short else ())
        for head in range(batch.num_heads)
    }


def list_splits(batch, tokens=128, causal=True, has_window=False):
    """The schedule, and for each (seq, token, head) its splits: index, whole range, own range."""
    sizes = tokens, TILE_N
    made = HOST.make_split_schedule(batch, None, None, None, *sizes, 128, causal, has_window)
    found = {}
    for number in range(made.num_splits):
        seq, token, head, place = HOST.find_split(batch, made, number, *sizes, causal, has_window)
        start, end = batch.cu_seqlens_q.memory[seq : seq + 2]
        seq_len = batch.lengths.memory[seq]
        assert end - start > batch.short, "short sequences are another launch's"
        assert 0 <= token < end - start
        if place[0] < place[1]:
            whole = HOST.key_tiles(
                seq_len - (end - start) + token, seq_len, batch.window, *sizes, causal, has_window
            )
            cut = HOST.cut_range(*whole, place)
            found.setdefault((seq, token, head), []).append((place, whole, cut))
    return made, found


def draw_batches(count):
    rng = random.Random("splits")
    for _ in range(count):
        num_seqs = rng.choice([1, 2, 5, 40, 300])
        long = rng.sample(range(num_seqs), rng.randint(0, min(num_seqs, 3)))
        query_lens = [rng.choice([0, 1, 1, 1, 5]) for _ in range(num_seqs)]
        for seq in long:
            query_lens[seq] = rng.choice([17, 64, 200, 513])
        seq_lens = [max(0, n + rng.choice([-3, 0, 100, 5000, 27000])) for n in query_lens]
        short, heads = rng.choice([0, 5, 8]), rng.choice([1, 3, 8])
        window = rng.choice([None, None, 100, 3000, 20000])
        yield (
            make_batch(query_lens, seq_lens, heads, short=short, window=window or 1 << 30),
            {
                "tokens": rng.choice([64, 128]),
                "causal": rng.random() < 0.8,
                "has_window": window is not None,
            },
        )


def test_every_key_of_every_tile_is_in_one_split():
    divided = 0
    for batch, kind in draw_batches(150):
        made, found = list_splits(batch, **kind)
        assert set(found) == list_tiles(batch, kind["tokens"])
        slots = []
        for pieces in found.values():
            pieces.sort(key=lambda piece: piece[0][0])
            (_, count, slot, length), (begin, full_begin, full_end, end), _ = pieces[0]
            places = [(i, count, slot, length) for i in range(count)]
            assert [place for place, _, _ in pieces] == places
            edges = [edge for _, _, cut in pieces for edge in (cut[0], cut[3])]
            assert (edges[0], edges[-1]) == (begin, end)
            assert edges[1:-1:2] == edges[2:-1:2], "each begins where the one before ends"
            for _, _, (first, first_full, end_full, last) in pieces:
                assert first <= first_full <= end_full < last, "the rightmost is masked"
                assert first_full == end_full or full_begin <= first_full <= end_full <= full_end
                # Tiles without a mask stay without one, but for the rightmost of each split.
                none = set(range(full_begin, full_end)) & set(range(first, last - 1))
                assert none == set(range(first_full, end_full))
            if count > 1:
                divided += 1
                slots += range(slot, slot + count)
                lengths = [last - first for _, _, (first, _, _, last) in pieces]
                assert set(lengths[:-1]) == {made.split_tiles}
                assert made.split_tiles * TILE_N >= LEAST_KEYS
        assert len(set(slots)) == len(slots)
        assert max(slots, default=0) < SLOTS
    assert divided > 1000


@pytest.mark.parametrize(
    ("query_len", "seq_len", "num_heads", "most"),
    [
        # 16 query heads, in tiles of one or, of 64 tokens, two
        (64, 27_000, 8, range(12, 17)),
        (128, 27_128, 16, range(8, 9)),
        (256, 27_256, 16, range(4, 5)),
        (512, 27_512, 16, range(2, 3)),
        (1024, 28_024, 16, range(1, 2)),  # 128 tiles for 132 multiprocessors
        (2048, 18_432, 32, range(1, 2)),
        (128, 1_500, 8, range(1, 2)),  # less than two splits' keys
        (1024, 101_024, 1, range(12, 17)),
    ],
)
def test_splits_occupy_all_multiprocessors_once(query_len, seq_len, num_heads, most):
    tokens = 64 if query_len == 64 else 128
    _, found = list_splits(make_batch([query_len], [seq_len], num_heads), tokens)
    counts = {len(pieces) for pieces in found.values()}
    assert max(counts) in most
    if max(counts) > 1:
        assert 0.75 * PROGRAMS <= sum(map(len, found.values())) <= PROGRAMS


def test_decoding_sequences_beside_a_chunk_change_nothing():
    alone, _ = list_splits(make_batch([512], [27_512], 16))
    query_lens, seq_lens = [1] * 200, [3000] * 200
    query_lens.insert(77, 512), seq_lens.insert(77, 27_512)
    mixed, found = list_splits(make_batch(query_lens, seq_lens, 16, short=8))
    assert (mixed.num_splits, mixed.split_tiles) == (alone.num_splits, alone.split_tiles)
    assert {seq for seq, _, _ in found} == {77}


def draw_small_batches(count):
    rng = random.Random("draws")
    for _ in range(count):
        num_seqs = rng.choice([1, 2, 4, 32])
        query_lens = [rng.choice([0, 1, 8, 100, 1024, 1500]) for _ in range(num_seqs)]
        seq_lens = [n + rng.choice([0, 0, 777, 6000]) for n in query_lens]
        short = rng.choice([0, 8])
        # A tile takes as long to find as 300 operations of NumPy do: no more than thousands.
        heads = rng.choice([1, 3, 8, 64] if num_seqs <= 4 else [1, 3, 8])
        yield make_batch(query_lens, seq_lens, heads, short=short)


@pytest.mark.parametrize("tokens", [64, 128, 192])
def test_every_tile_is_drawn_once_and_long_sequences_first(tokens):
    for batch in draw_small_batches(40):
        drawn = draw_tiles(batch, tokens)
        expected = list_tiles(batch, tokens)
        assert len(drawn) == len(expected)
        assert set(drawn) == expected
        lengths = [int(batch.lengths.memory[seq]) for seq, _, _ in drawn]
        assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(("num_seqs", "length", "heads"), [(4, 5725, 64), (1, 1354, 64), (3, 1, 5)])
def test_sections_share_keys_and_end_with_short_tiles(num_seqs, length, heads):
    batch = make_batch([length] * num_seqs, [length] * num_seqs, heads)
    seq_tiles = -(-length // 128)
    batch.seq_tiles, batch.num_tiles = seq_tiles, num_seqs * heads * seq_tiles
    drawn = draw_tiles(batch, is_uniform=True)
    assert len(set(drawn)) == len(drawn) == batch.num_tiles
    at_once = 3 if batch.num_tiles <= 6 * PROGRAMS else 2
    section = -(-at_once * PROGRAMS // seq_tiles)
    for start in range(0, len(drawn), PROGRAMS):
        pairs = {(seq, head) for seq, _, head in drawn[start : start + PROGRAMS]}
        assert len(pairs) <= 2 * section, "tiles at work at a time read few heads' keys"
    last = [token for _, token, _ in drawn[-min(section, num_seqs * heads) * seq_tiles :]]
    assert last == sorted(last, reverse=True)


def cut_last_wave(batch, causal=True):
    """The schedule, and for each drawn (seq, token, head) its program indices."""
    config = SimpleNamespace(
        UNIFORM=False, DRAWS=True, BLOCK_SIZE=16, CAUSAL=causal, HAS_WINDOW=False
    )
    made = HOST.make_last_wave(batch, None, None, None, 128, TILE_N, 128, config)
    seqs = HOST.measure_seqs(batch, 128, config)
    found = {}
    for number in range(made.num_splits):
        *tile, place = HOST.find_in_waves(batch, made, number, seqs, 128, TILE_N, config)
        found.setdefault(tuple(map(int, tile)), []).append(tuple(map(int, place)))
    return made, found


def test_a_last_wave_is_divided_into_whole_ranges():
    for batch in draw_small_batches(40):
        _, found = cut_last_wave(batch)
        assert set(found) == list_tiles(batch)
        slots = []
        for (seq, token, _), places in found.items():
            places.sort()
            _, count, slot, _ = places[0]
            expected = [(i, count, slot) for i in range(count)]
            assert [place[:3] for place in places[:count]] == expected
            start, end = batch.cu_seqlens_q.memory[seq : seq + 2]
            seq_len = batch.lengths.memory[seq]
            whole = HOST.key_tiles(
                seq_len - (end - start) + token, seq_len, batch.window, 128, TILE_N, CAUSAL=True,
                HAS_WINDOW=False,
            )  # fmt: skip
            cuts = [HOST.cut_range(*whole, place) for place in places[:count]]
            edges = [edge for cut in cuts for edge in (cut[0], cut[3])]
            assert (edges[0], edges[-1]) == (whole[0], whole[3])
            assert edges[1:-1:2] == edges[2:-1:2]
            assert all(cut[0] < cut[3] for cut in cuts)
            assert all(place[0] >= place[1] for place in places[count:]), "the kernel skips these"
            slots += range(slot, slot + count) if count > 1 else ()
        assert len(set(slots)) == len(slots)
        assert max(slots, default=0) < SLOTS


@pytest.mark.parametrize(
    ("query_len", "seq_len", "heads", "num_cut", "cost"),
    [
        (3075, 22_409, 8, 68, 0.90),  # 200 tiles of 165 on 132 multiprocessors: two waves
        (2676, 16_642, 28, 60, 0.92),  # 588 tiles: four and a half
        (1951, 13_771, 64, 100, 0.995),  # 1024 tiles: nearly eight
        (4096, 20_000, 33, 0, 1.01),  # 1056 tiles: eight
    ],
)
def test_dividing_the_last_wave_takes_less_than_one_more(query_len, seq_len, heads, num_cut, cost):
    made, found = cut_last_wave(make_batch([query_len], [seq_len], heads))
    assert sum(len(places) > 1 for places in found.values()) in (num_cut, num_cut + PROGRAMS)
    waves = -(-len(found) // PROGRAMS)
    mean = (seq_len - query_len / 2) / TILE_N
    ends = [0.0] * PROGRAMS  # when each program has finished what it has drawn
    for number in range(made.num_splits):
        is_whole = number < made.num_whole
        next_one = ends.index(min(ends))
        ends[next_one] += 2.0 + (mean if is_whole else mean / made.num_parts)
    merging = 3.0 + 0.75 * made.num_parts if made.num_parts > 1 else 0.0
    assert max(ends) + merging <= cost * waves * (mean + 2.0)


def test_a_batch_without_long_sequences_has_no_splits():
    made, found = list_splits(make_batch([1, 0, 8], [5000, 0, 9000], 4, short=8))
    assert made.num_splits == 0
    assert not found


def test_tiles_of_which_some_have_fewer_keys_have_fewer_splits():
    """A long prompt of few heads without a prefix."""
    _, found = list_splits(make_batch([8192], [8192], 1))
    counts = {token: len(pieces) for (_, token, _), pieces in found.items()}
    assert counts[0] == 1 < counts[8192 - 128]
    assert sorted(counts.values()) == [counts[token] for token in sorted(counts)]


@pytest.mark.parametrize("size", [40, 96, 128, 144, 256])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("pack", [1, 4, 7])
def test_splits_are_merged_as_if_they_had_been_one(size, has_sinks, pack):
    rng, rows, heads, num_tokens = np.random.default_rng(size), 64, 14, 45
    for count, warpgroup in itertools.product((1, 2, 3, 5), (0, 1)):
        config = SimpleNamespace(
            PACK=pack, WARPGROUPS=2, V_SIZE=size, HAS_SINKS=has_sinks, STAGED=False
        )
        weights = np.exp2(rng.normal(size=(count, rows, 50)).astype(np.float32))
        pivots = rng.normal(size=(count, rows)).astype(np.float32)
        weights[0, 3:9] = 0.0  # rows that see no key of the first split, and of none
        pivots[0, 3:9] = -np.inf
        weights[:, 20] = 0.0
        pivots[:, 20] = -np.inf
        values = rng.normal(size=(count, 50, size)).astype(np.float32)
        accs, sums = weights @ values, weights.sum(2)
        sinks = rng.normal(size=heads).astype(np.float32)
        width = width_of(size)
        scratch = SimpleNamespace(
            accs=Pointer(np.full(20 * 2 * rows * width, np.nan, np.float32)),
            sums=Pointer(np.full(20 * 2 * 2 * rows, np.nan, np.float32)),
            arrivals=Pointer(np.zeros(20 * 2, np.int32)),
        )
        out = np.full((200, heads, size), np.nan, np.float32)
        lse = np.full((200, heads), np.nan, np.float32)
        head, first = 1, 100
        for split in rng.permutation(count):
            columns, start = [], 0
            for i in range(num_parts(size)):  # zeros beyond the head, as in the kernel's tiles
                here = np.zeros((rows, part_size(size, i)), np.float32)
                there = accs[split, :, start : start + here.shape[1]]
                here[:, : there.shape[1]] = there
                columns.append(here.view(Numbers))
                start += here.shape[1]
            with np.errstate(divide="ignore", invalid="ignore"):
                HOST.finish_split(
                    Pointer(out.reshape(-1)), (), Pointer(lse.reshape(-1)), Pointer(sinks), heads,
                    heads * size, size, first, num_tokens, head, tuple(columns),
                    pivots[split].view(Numbers), sums[split].view(Numbers), (int(split), count, 7),
                    scratch, width, config, warpgroup,
                )  # fmt: skip
        assert not scratch.arrivals.memory.any()
        row = np.arange(rows)
        token, at_head = warpgroup * (rows // pack) + row // pack, head * pack + row % pack
        scale = np.exp2(pivots.astype(np.float64))[..., None]
        total = (sums[..., None] * scale).sum(0)[:, 0]
        if has_sinks:
            total += np.exp(sinks[at_head].astype(np.float64))
        expected = (accs * scale).sum(0) / np.where(total > 0, total, 1.0)[:, None]
        with np.errstate(divide="ignore"):
            logs = np.log(total)
        for r in range(rows):
            place = first + token[r], at_head[r]
            if token[r] < num_tokens and r < rows // pack * pack:
                np.testing.assert_allclose(out[place], expected[r], rtol=1e-4, atol=1e-5)
                np.testing.assert_allclose(lse[place], logs[r], rtol=1e-5, atol=1e-5)
                out[place], lse[place] = np.nan, np.nan
        assert np.isnan(out).all(), "nothing else is written"
        assert np.isnan(lse).all()


FEW = {
    "num_seqs": 1, "num_tokens": 512, "max_query_len": 512, "max_seq_len": 27_512,
    "num_heads": 16, "group": 2, "short": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "may"),
    [
        ({}, True),
        ({"num_seqs": 201, "num_tokens": 712, "short": 8}, True),
        ({"num_seqs": 2049, "num_tokens": 2560, "short": 8}, False),  # no room for so many
        # Its longest sequence is likely a decoding one.
        ({"num_seqs": 201, "num_tokens": 712, "short": 8, "max_seq_len": 8192}, False),
        ({"max_seq_len": 8192}, True),
        ({"num_tokens": 8192, "max_query_len": 8192, "max_seq_len": 8192}, False),
        ({"num_seqs": 32, "num_tokens": 32 * 512, "max_seq_len": 27_512}, False),
        ({"num_tokens": 1600, "max_query_len": 1600}, True),  # 200 tiles: one and a half waves
        ({"num_tokens": 2048, "max_query_len": 2048}, False),  # 256: nearly two
        ({"num_tokens": 1600, "max_query_len": 1600, "max_seq_len": 8_000}, False),
        ({"num_seqs": 9, "num_tokens": 16_000, "short": 8}, False),
        ({"max_seq_len": 1_500}, False),
        ({"num_tokens": 1024, "max_query_len": 1024, "max_seq_len": 1024, "num_heads": 4}, False),
    ],
    ids=str,
)
def test_the_host_leaves_batches_that_fill_the_gpu_as_they_are(change, may):
    assert divides_keys(tiling_of(128, 128), 132, **(FEW | change)) is may


def test_heads_of_a_group_lie_side_by_side():
    wide = TILINGS[1]
    assert [pack_of(64, n, wide) for n in (2, 4, 5, 16, 17, 4096)] == [64, 32, 16, 8, 8, 8]
    assert [pack_of(group, 4096, wide) for group in (1, 2, 4, 8, 24)] == [1, 2, 4, 8, 8]
    assert [pack_of(group, 600, wide) for group in (3, 5, 6, 7, 12, 14)] == [3, 5, 3, 7, 4, 7]
    assert [pack_of(group, 4096, wide) for group in (3, 5, 6, 7, 11, 12)] == [3, 1, 2, 7, 1, 4]
    assert [pack_of(14, n, wide) for n in (8, 9)] == [14, 7]
    assert [tokens_of(TILINGS[0], pack) for pack in (1, 3, 5, 7, 64)] == [192, 63, 36, 27, 3]
    assert [pack_of(71, n, wide) for n in (1, 100)] == [1, 1]


@pytest.mark.parametrize("group", range(1, 80))
def test_packed_heads_divide_their_group_and_fit_a_warpgroup(group):
    for tiling, num_tokens in itertools.product(TILINGS, (1, 2, 9, 50, 300, 5000)):
        pack = pack_of(group, num_tokens, tiling)
        assert group % pack == 0
        assert pack <= 8 or num_tokens <= tokens_of(tiling, pack)
        assert 0 < tokens_of(tiling, pack) <= tiling.warpgroups * 64 // pack


def test_a_group_of_seven_fills_the_programs_with_splits():
    few = {"num_seqs": 1, "num_heads": 7, "group": 7, "short": 0, "max_seq_len": 9938}
    for num_tokens, may in ((1187, True), (3546, True), (3582, False)):  # 66, 197, 199 tiles
        few |= {"num_tokens": num_tokens, "max_query_len": num_tokens}
        assert divides_keys(tiling_of(128, 128), 132, **few) is may

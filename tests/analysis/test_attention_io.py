from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagetile.analysis.attention_io import (
    AttentionShape,
    compulsory,
    longest_resident,
    standard,
    tile_bytes,
    tiled,
)
from pagetile.analysis.tile_walk import FULL, MASKED, SKIPPED, TileWalk
from pagetile.analysis.traffic import Stream, Traffic, format_count
from pagetile.errors import ShapeError

walks = st.builds(
    TileWalk,
    query_len=st.integers(1, 40),
    key_len=st.integers(1, 40),
    tile_m=st.integers(1, 17),
    tile_n=st.integers(1, 17),
    causal=st.booleans(),
    sliding_window=st.none() | st.integers(1, 45),
)


def visible_scores(walk: TileWalk) -> np.ndarray:
    """One boolean for each score, from the definition."""
    positions = np.arange(walk.key_len - walk.query_len, walk.key_len)[:, None]
    keys = np.arange(walk.key_len)
    visible = np.ones((walk.query_len, walk.key_len), bool)
    if walk.causal:
        visible &= keys <= positions
    if walk.sliding_window is not None:
        visible &= keys > positions - walk.sliding_window
    return visible


def spans(size: int, tile: int) -> list[slice]:
    return [slice(start, min(start + tile, size)) for start in range(0, size, tile)]


# --- the walk -------------------------------------------------------------------------------


@settings(deadline=None, max_examples=400)
@given(walks)
def test_a_walk_against_every_score(walk):
    visible = visible_scores(walk)
    rows, keys = spans(walk.query_len, walk.tile_m), spans(walk.key_len, walk.tile_n)
    assert (walk.num_query_tiles, walk.num_kv_tiles) == (len(rows), len(keys))
    for i, j in itertools.product(range(len(rows)), range(len(keys))):
        tile = visible[rows[i], keys[j]]
        if not tile.any():
            expected = SKIPPED
        else:
            expected = FULL if tile.all() and tile.shape[1] == walk.tile_n else MASKED
        assert walk.kind(i, j) == expected
    for row in range(walk.query_len):
        assert list(walk.visible(row)) == list(np.flatnonzero(visible[row]))
    assert walk.num_visible == visible.sum()
    assert walk.counts.total() == len(rows) * len(keys)
    assert walk.counts[SKIPPED] == len(rows) * len(keys) - len(list(walk.walk()))


@settings(deadline=None, max_examples=200)
@given(walks)
def test_rows_read_against_a_simulated_walk(walk):
    visible = visible_scores(walk)
    rows, keys = spans(walk.query_len, walk.tile_m), spans(walk.key_len, walk.tile_n)
    visits = [(i, j) for i in rows for j in keys if visible[i, j].any()]
    assert walk.num_key_rows == sum(j.stop - j.start for _, j in visits)
    assert walk.num_query_rows == sum(i.stop - i.start for i, _ in visits)
    assert walk.num_computed == len(visits) * walk.tile_m * walk.tile_n


def test_the_pictures_in_the_docstring():
    def draw(**options):
        walk = TileWalk(50, 50, 10, 10, causal=True, **options)
        signs = {FULL: "f", MASKED: "m", SKIPPED: "."}
        return ["".join(signs[walk.kind(i, j)] for j in range(5)) for i in range(5)]

    assert draw() == ["m....", "fm...", "ffm..", "fffm.", "ffffm"]
    assert draw(sliding_window=20) == ["m....", "fm...", "mfm..", ".mfm.", "..mfm"]


@pytest.mark.parametrize("name", ["query_len", "key_len", "tile_m", "tile_n", "sliding_window"])
def test_sizes_below_one_are_refused(name):
    sizes = {"query_len": 4, "key_len": 4, "tile_m": 2, "tile_n": 2, name: 0}
    with pytest.raises(ShapeError, match=f"{name} is 0"):
        TileWalk(**sizes)


# --- traffic, against loops that load and store ---------------------------------------------


class Counter:
    """Memory that counts what is read from it and written to it."""

    def __init__(self) -> None:
        self.elements = self.bytes = 0

    def move(self, array: np.ndarray) -> None:
        self.elements += array.size
        self.bytes += array.nbytes


def arrays(shape: AttentionShape) -> dict[str, np.ndarray]:
    half, rows, keys = np.float16, shape.query_len, shape.key_len
    return {
        "q": np.zeros((rows, shape.head_size), half),
        "k": np.zeros((keys, shape.head_size), half),
        "v": np.zeros((keys, shape.v_head_size), half),
        "out": np.zeros((rows, shape.v_head_size), half),
        "m": np.zeros(rows, np.float32),
        "l": np.zeros(rows, np.float32),
        "lse": np.zeros(rows, np.float32),
    }


shapes = st.builds(
    AttentionShape,
    query_len=st.integers(1, 40),
    head_size=st.integers(1, 9),
    key_len=st.integers(1, 40),
    v_head_size=st.integers(1, 9),
    causal=st.booleans(),
    sliding_window=st.none() | st.integers(1, 45),
)


@settings(deadline=None, max_examples=200)
@given(shapes, st.integers(1, 17), st.integers(1, 17))
def test_queries_outside_against_a_loop(shape, tile_m, tile_n):
    memory, of = Counter(), arrays(shape)
    visible = visible_scores(shape.walk(tile_m, tile_n))
    for rows in spans(shape.query_len, tile_m):
        memory.move(of["q"][rows])
        for keys in spans(shape.key_len, tile_n):
            if visible[rows, keys].any():
                memory.move(of["k"][keys])
                memory.move(of["v"][keys])
        memory.move(of["out"][rows])
        memory.move(of["lse"][rows])
    counted = tiled(shape, tile_m, tile_n)
    assert (counted.elements, counted.bytes) == (memory.elements, memory.bytes)


@settings(deadline=None, max_examples=200)
@given(shapes, st.integers(1, 17), st.integers(1, 17))
def test_keys_outside_against_a_loop(shape, tile_m, tile_n):
    memory, of = Counter(), arrays(shape)
    visible = visible_scores(shape.walk(tile_m, tile_n))
    for keys in spans(shape.key_len, tile_n):
        visited = [r for r in spans(shape.query_len, tile_m) if visible[r, keys].any()]
        if visited:
            memory.move(of["k"][keys])
            memory.move(of["v"][keys])
        for rows in visited:
            memory.move(of["q"][rows])
            for _ in ("read", "write"):
                for name in ("out", "m", "l"):
                    memory.move(of[name][rows])
    counted = tiled(shape, tile_m, tile_n, outer="kv")
    assert (counted.elements, counted.bytes) == (memory.elements, memory.bytes)


@settings(deadline=None, max_examples=50)
@given(shapes)
def test_three_kernels_against_a_loop(shape):
    memory, of = Counter(), arrays(shape)
    scores = np.zeros((shape.query_len, shape.key_len), of["q"].dtype)
    for array in (of["q"], of["k"], scores, scores, scores, scores, of["v"], of["out"]):
        memory.move(array)
    counted = standard(shape)
    assert (counted.elements, counted.bytes) == (memory.elements, memory.bytes)


def test_heads_and_batch_multiply():
    one, many = AttentionShape(37, 8), AttentionShape(37, 8, num_heads=6, batch=5)
    for count in (
        compulsory,
        standard,
        lambda s: tiled(s, 16, 8),
        lambda s: tiled(s, 16, 8, outer="kv"),
    ):
        assert count(many).bytes == 30 * count(one).bytes
    grouped = AttentionShape(37, 8, num_heads=6, num_kv_heads=2, batch=5)
    assert compulsory(many).bytes - compulsory(grouped).bytes == 5 * (6 - 2) * 37 * 2 * 8 * 2
    assert tiled(grouped, 16, 8) == tiled(many, 16, 8)


# --- figures from elsewhere -----------------------------------------------------------------


def test_check_values():
    shape = AttentionShape(1024, 64)
    assert tiled(shape, 64, 64).elements == 2_229_248
    assert tiled(shape, 128, 64).elements == 1_180_672
    assert tiled(shape, 64, 200, outer="kv").elements == 1_335_296
    assert standard(shape).elements == 4_456_448
    window = tiled(AttentionShape(343, 16), 64, 64)
    assert window.without("lse").bytes == 153_664
    assert window.without("lse").bytes > 123_616  # the notebook's, whose tiles lose their remainder


def test_causal_counts_the_documents_formula():
    n, rows, keys = 1000, 48, 80
    expected = sum(min(n, keys * -(-min((i + 1) * rows, n) // keys)) for i in range(-(-n // rows)))
    assert TileWalk(n, n, rows, keys, causal=True).num_key_rows == expected


@pytest.mark.parametrize(("tile_m", "head_size"), [(64, 128), (128, 64), (128, 128)])
def test_the_gain_over_standard_tends_to_twice_the_tile_by_the_head_size(tile_m, head_size):
    shape = AttentionShape(1 << 16, head_size)
    gain = standard(shape).elements / tiled(shape, tile_m, 64).elements
    assert gain == pytest.approx(2 * tile_m / head_size, rel=0.01)


def test_the_notebooks_own_table_shows_no_gain():
    """Head size 128, tiles of 64: what it calls linear moves as much as the square does."""
    gains = []
    for n in (256, 512, 1024, 2048, 4096, 8192):
        shape = AttentionShape(n, 128)
        gains.append(standard(shape).bytes / tiled(shape, 64, 64).without("lse").bytes)
    assert [round(gain, 2) for gain in gains] == [1.2, 1.11, 1.06, 1.03, 1.02, 1.01]


def test_the_counts_of_bytes_that_stay_on_chip():
    shape = AttentionShape(1, 64)
    assert tile_bytes(shape, 64, 64) == tile_bytes(AttentionShape(8192, 64), 64, 64) == 74_240
    assert tile_bytes(AttentionShape(1, 128), 64, 64) > tile_bytes(shape, 64, 64)
    assert longest_resident(shape, 232_448) == 908
    for tokens, head_size in ((343, 8), (343, 16), (392, 32), (576, 32), (196, 64)):
        assert longest_resident(AttentionShape(1, head_size), 232_448) >= tokens


# --- streams --------------------------------------------------------------------------------


def test_streams_add_up():
    traffic = Traffic((Stream("q", 3, 2), Stream("out", 5, 4, is_write=True)))
    assert (traffic.elements, traffic.bytes) == (8, 26)
    assert str(traffic) == "read q: 3 x 2 bytes\nwrite out: 5 x 4 bytes"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (1e6, "1 MB"), (4.456e9, "4.46 GB")],
)
def test_counts_have_decimal_prefixes(value, text):
    assert format_count(value) == text


def test_bad_shapes_are_refused():
    with pytest.raises(ShapeError, match="head_size is 0"):
        AttentionShape(4, 0)
    with pytest.raises(ShapeError, match="num_heads=3 is not a multiple of num_kv_heads=2"):
        AttentionShape(4, 8, num_heads=3, num_kv_heads=2)
    with pytest.raises(ShapeError, match="outer is 'x'"):
        tiled(AttentionShape(4, 8), 2, 2, outer="x")

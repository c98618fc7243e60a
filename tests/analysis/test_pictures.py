from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch

from pagetile.analysis.io_curves import io_curves
from pagetile.analysis.pictures import draw_io, draw_tiles, draw_windows, save
from pagetile.analysis.tile_walk import TileWalk
from pagetile.analysis.window_grid import WindowGrid
from pagetile.errors import RequestError, ShapeError

pytest.importorskip("matplotlib", reason="pictures need the extra 'plots'")


def texts(figure, tmp_path) -> list[str]:
    """Every word in the picture, as a reader of the SVG meets it."""
    save(figure, tmp_path / "picture.svg")
    root = ET.fromstring((tmp_path / "picture.svg").read_text())
    return ["".join(node.itertext()).strip() for node in root.iter() if node.tag.endswith("}text")]


# --- tiles ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "walk",
    [
        TileWalk(300, 300, 64, 64, causal=True),
        TileWalk(100, 520, 32, 64, causal=True, sliding_window=200),
        TileWalk(5, 3, 2, 2, causal=True),  # the first queries see no key
        TileWalk(1, 1, 64, 64),
        TileWalk(70, 70, 1, 1, causal=True),
    ],
)
def test_every_tile_has_the_colour_of_its_kind(walk, tmp_path):
    figure = draw_tiles(walk)
    [mesh] = [c for c in figure.axes[0].collections if hasattr(c, "get_coordinates")]
    kinds = np.asarray(mesh.get_array()).reshape(walk.num_query_tiles, walk.num_kv_tiles)
    order = ["skipped", "full", "masked"]
    for row, column in np.ndindex(kinds.shape):
        assert order[int(kinds[row, column])] == walk.kind(row, column)
    words = texts(figure, tmp_path)
    for kind, count in walk.counts.items():
        assert (f"{kind}: {count:,}" in words) == (count > 0)
    is_ragged = walk.key_len % walk.tile_n or walk.query_len % walk.tile_m
    assert ("past the end" in words) == bool(is_ragged)


def test_the_visits_of_one_query_tile_are_numbered(tmp_path):
    figure = draw_tiles(TileWalk(300, 300, 64, 64, causal=True), query_tile=3)
    assert [(text.get_text(), text.get_position()) for text in figure.axes[0].texts] == [
        (str(step), (64 * (step - 0.5), 64 * 3.5)) for step in (1, 2, 3, 4)
    ]
    assert "walk of query tile 3" in texts(figure, tmp_path)


def test_edges_follow_what_rows_see():
    walk = TileWalk(40, 60, 16, 16, causal=True, sliding_window=9)
    starts, stops = draw_tiles(walk).axes[0].lines
    seen = [walk.visible(row) for row in range(40)]
    assert list(starts.get_xdata())[:-1] == [keys.start for keys in seen]
    assert list(stops.get_xdata())[:-1] == [keys.stop for keys in seen]


def test_tiles_that_cannot_be_drawn_are_refused():
    with pytest.raises(ShapeError, match="query tile 5: expected 0 to 4"):
        draw_tiles(TileWalk(300, 300, 64, 64), query_tile=5)
    with pytest.raises(ShapeError, match="1563 x 1563 tiles are too many"):
        draw_tiles(TileWalk(100_000, 100_000, 64, 64))


# --- bytes ----------------------------------------------------------------------------------


def test_curves_are_what_was_counted_and_crossovers_are_marked(tmp_path):
    curves = io_curves(head_size=128, tiles_m=[48, 64, 128], longest=4096)
    figure = draw_io(curves)
    lines = {line.get_label().split(":")[0]: line for line in figure.axes[0].lines}
    for curve in (curves.standard, *curves.tiled):
        assert tuple(lines[curve.name].get_ydata()) == curve.bytes
        assert tuple(lines[curve.name].get_xdata()) == curves.lengths
    words = texts(figure, tmp_path)
    assert "tiles of 48 rows: over standard from 145" in words
    assert "K and V fit on chip: up to 454 keys" in words


def test_labels_cross_no_curve_and_no_label():
    """Where tiles of all sizes lose from the first length on, as many labels as there can be."""
    figure = draw_io(io_curves(head_size=192, v_head_size=128, group=8, tiles_m=[16, 32, 48, 64]))
    figure.draw_without_rendering()
    axes, [legend] = figure.axes[0], figure.legends
    assert not axes.texts
    assert len(legend.texts) == 7
    plot, box = axes.get_tightbbox(), legend.get_window_extent()
    assert box.y1 <= plot.y0
    assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile_m", [8, 15, 31, 32, 48])
def test_a_crossover_against_a_scan_of_every_length(tile_m, causal):
    shortest, longest = 30, 700
    curves = io_curves(
        head_size=64, tiles_m=[tile_m], tile_n=24, shortest=shortest, longest=longest, causal=causal
    )
    [curve] = curves.tiled
    worse = [curve.count(n) > curves.standard.count(n) for n in range(shortest, longest + 1)]
    expected = None
    for n in range(longest, shortest - 1, -1):
        if not worse[n - shortest]:
            break
        expected = n
    assert curve.worse_from == expected


@pytest.mark.parametrize(("shortest", "longest"), [(2, 3), (64, 300), (500, 600), (64, 2**16)])
def test_any_range_of_lengths_can_be_drawn(shortest, longest, tmp_path):
    curves = io_curves(head_size=128, tiles_m=[16], shortest=shortest, longest=longest)
    notes = [word for word in texts(draw_io(curves), tmp_path) if word.endswith("up to 454 keys")]
    assert len(notes) == (shortest < 454)


def test_ranges_that_cannot_be_drawn_are_refused():
    with pytest.raises(RequestError, match="lengths from 64 to 64"):
        io_curves(head_size=64, tiles_m=[64], shortest=64, longest=64)
    with pytest.raises(RequestError, match="tiles of \\[0\\] rows"):
        io_curves(head_size=64, tiles_m=[0])


# --- windows --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "window", "shift", "masked"),
    [
        ((48, 48, 48), (7, 7, 7), (3, 3, 3), 127),
        ((64, 64, 64), (7, 7, 7), (3, 3, 3), 271),
        ((56, 56), (7, 7), (3, 3), 15),
        ((14, 14), (7, 7), (3, 0), 2),
        ((6, 6, 6), (7, 7, 7), (3, 3, 3), 0),
        ((14, 6), (7, 7), (3, 3), 1),
    ],
)
def test_masked_windows_are_those_with_several_regions(size, window, shift, masked):
    grid = WindowGrid.of(size, window, shift)
    several = (grid.regions != grid.regions[:, :1]).any(dim=1)
    assert grid.num_masked == int(several.sum()) == masked


@pytest.mark.parametrize("size", [(14, 14), (26, 20), (9, 12, 10)])
def test_a_region_is_one_piece_of_the_map_before_the_roll(size):
    """Tokens of one window are in one region just if they lie within a window of each other."""
    window, shift = (4,) * len(size), (2,) * len(size)
    grid = WindowGrid.of(size, window, shift)
    where = torch.stack(
        torch.meshgrid(*(torch.arange(n) for n in grid.padded), indexing="ij")
    )  # [axes, *padded]
    rolled = where.roll([-s for s in shift], dims=list(range(1, len(size) + 1)))
    ids = grid.region_map()
    for corner in np.ndindex(grid.windows):
        cut = tuple(slice(c * w, (c + 1) * w) for c, w in zip(corner, window, strict=True))
        places = rolled[(slice(None), *cut)].flatten(1)
        region = ids[cut].flatten()
        near = ((places[:, :, None] - places[:, None, :]).abs() < 4).all(dim=0)
        assert torch.equal(near, region[:, None] == region[None, :])


def test_the_drawn_mask_is_the_last_windows(tmp_path):
    grid = WindowGrid.of((26, 26), (7, 7), (3, 3))
    figure = draw_windows(grid)
    [image] = figure.axes[2].images
    last = grid.regions[-1]
    assert np.array_equal(image.get_array(), (last[:, None] != last[None, :]).numpy())
    words = texts(figure, tmp_path)
    assert "mask of window 15" in words
    assert "padding" in words
    assert sum(word.startswith("region ") for word in words) == 9


def test_three_axes_are_drawn_in_slices(tmp_path):
    figure = draw_windows(WindowGrid.of((14, 14, 14), (7, 7, 7), (3, 3, 3)))
    assert len(figure.axes) == 8
    words = texts(figure, tmp_path)
    for title in (
        "after: planes 0 to 6, regions 0 to 8",
        "after: planes 11 to 13, regions 18 to 26",
    ):
        assert title in words
    for title in ("before: planes 3 to 9", "before: planes 10 to 13", "before: planes 0 to 2"):
        assert title in words
    numbers = [{text.get_text() for text in axes.texts} for axes in figure.axes[:3]]
    assert numbers == [{"0", "1", "2", "3"}, *[{"4", "5", "6", "7"}] * 2]


@pytest.mark.parametrize(
    ("size", "shift"), [((26, 20), (3, 2)), ((14, 21), (3, 0)), ((8, 8), (0, 0))]
)
def test_every_piece_of_a_window_has_its_number(size, shift):
    grid = WindowGrid.of(size, (7, 7), shift)
    rows, columns = (torch.arange(n) for n in grid.padded)
    of_place = rows[:, None] // 7 * grid.windows[1] + columns[None, :] // 7
    before, after, _ = draw_windows(grid).axes
    for axes, numbers in ((after, of_place), (before, of_place.roll(grid.shift, dims=(0, 1)))):
        found = [(text.get_text(), text.get_position()) for text in axes.texts]
        assert all(int(numbers[int(y), int(x)]) == int(number) for number, (x, y) in found)
        bands = [len(grid_cuts(numbers, axis)) for axis in (0, 1)]
        assert len(found) == bands[0] * bands[1]


def grid_cuts(numbers, axis):
    """Where the windows of a numbered map begin along an axis."""
    lines = numbers.movedim(axis, 0)
    return [0, *((lines[1:] != lines[:-1]).any(dim=1).nonzero().flatten() + 1).tolist()]


def test_grids_that_cannot_be_drawn_are_refused():
    with pytest.raises(ShapeError, match="grid of 1 axes: expected 2 or 3"):
        draw_windows(WindowGrid.of((14,), (7,), (3,)))
    with pytest.raises(ShapeError, match="too large to draw"):
        draw_windows(WindowGrid.of((7000, 7), (7, 7), (3, 3)))
    with pytest.raises(ShapeError, match="differ in their number of axes"):
        WindowGrid.of((14, 14), (7,), (3,))
    with pytest.raises(ShapeError, match="shifts from 0 to less than the window"):
        WindowGrid.of((14, 14), (7, 7), (7, 0))


# --- files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.png", "a.svg", "a.PNG"])
def test_the_same_picture_is_the_same_file(name, tmp_path):
    files = [tmp_path / "one", tmp_path / "two"]
    for folder in files:
        folder.mkdir()
        save(draw_tiles(TileWalk(100, 100, 32, 32, causal=True)), folder / name)
    first, second = ((folder / name).read_bytes() for folder in files)
    assert first == second
    assert first.startswith(b"\x89PNG" if name.lower().endswith("png") else b"<?xml")


def test_our_style_does_not_change_matplotlibs_defaults():
    from matplotlib import rcParams

    before = dict(rcParams)
    draw_tiles(TileWalk(10, 10, 4, 4))
    assert dict(rcParams) == before


@pytest.mark.parametrize(
    ("name", "message"), [("a.pdf", "ends in .png or .svg"), ("no/a.png", "there is no folder")]
)
def test_paths_that_nothing_can_be_written_to(name, message, tmp_path):
    with pytest.raises(RequestError, match=message):
        save(draw_tiles(TileWalk(10, 10, 4, 4)), tmp_path / name)

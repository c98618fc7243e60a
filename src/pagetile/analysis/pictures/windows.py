"""Draw the windows and regions of a map, before and after its cyclic shift."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from ...errors import ShapeError
from ..window_grid import WindowGrid
from .style import COLOURS, GREY, INK, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

MAX_SIDE = 512
"""Most tokens along an axis that can be told apart."""

MAX_LINED = 32  # tokens along an axis with a line between any two
MAX_NUMBERED = 36  # windows of a panel that are all numbered

# Colours of regions: ids in base 3 along the last two axes.
FILLS = ("#DCEBF5", "#56B4E9", "#0072B2", "#FBE3B5", "#E69F00", "#B36B00", "#CDEBDD", "#009E73",
         "#005C43")  # fmt: skip
PADDING = "xxxx"
ENTRY_WIDTH, MAX_ENTRIES = 1.4, 13  # of the legend: inches of an entry, and most entries


@styled
def draw_windows(grid: WindowGrid) -> Figure:
    """Draw the map before and after the roll, and the mask of its last window.

    Every piece of a window carries the window's number, so that a window which wraps around the
    border is recognised by equal numbers. A map of three axes is drawn as slices along the first,
    one for each band of regions.

    Raises:
        ShapeError: The map has not two or three axes, or is too large to draw.
        ModuleNotFoundError: matplotlib is not installed.
    """
    if len(grid.size) not in (2, 3):
        raise ShapeError(f"a grid of {len(grid.size)} axes: expected 2 or 3")
    if max(grid.padded) > MAX_SIDE:
        raise ShapeError(
            f"grid {list(grid.padded)} is too large to draw: at most {MAX_SIDE} a side"
        )
    if len(grid.size) == 2:
        return _draw_plane(grid)
    return _draw_slices(grid)


def _wide_figure(width: float, rows: int = 1) -> Figure:
    """A figure for rows of panels, with room for the legend below."""
    legend = -(-MAX_ENTRIES // int(width / ENTRY_WIDTH))
    return new_figure(width, 3.6 * rows + 0.25 * legend)


def _draw_plane(grid: WindowGrid) -> Figure:
    figure = _wide_figure(10.0)
    before, after, mask = figure.subplots(1, 3)
    rolled = grid.region_map()
    _draw_map(before, grid, rolled.roll(grid.shift, dims=(0, 1)), is_rolled=False)
    before.set_title("before the roll: windows wrap", loc="left")
    _draw_map(after, grid, rolled, is_rolled=True)
    after.set_title("after the roll: windows are whole", loc="left")
    _draw_mask(mask, grid)
    _add_legend(figure, grid, {region: f"region {region}" for region in _ids(rolled)})
    return figure


def _draw_slices(grid: WindowGrid) -> Figure:
    """Three axes: the planes of the map that differ, before the roll above and after it below."""
    rolled = grid.region_map()
    starts = [
        index for index in range(len(rolled))
        if index == 0 or not rolled[index].equal(rolled[index - 1])
    ]  # fmt: skip
    ends = [*starts[1:], len(rolled)]
    plane = WindowGrid(grid.size[1:], grid.window[1:], grid.shift[1:])
    figure = _wide_figure(3.2 * (len(starts) + 1) + 0.4, rows=2)
    panels = figure.subplots(2, len(starts) + 1)
    for column, (start, end) in enumerate(zip(starts, ends, strict=True)):
        before, after = panels[:, column]
        # The ids of two slices differ only by the band of the first axis.
        regions = rolled[start] % 9
        first = start // grid.window[0] * plane.num_windows
        back = regions.roll(plane.shift, dims=(0, 1))
        _draw_map(before, plane, back, is_rolled=False, first_window=first)
        _draw_map(after, plane, regions, is_rolled=True, first_window=first)
        step = grid.shift[0]
        original = (start + step) % len(rolled), (end - 1 + step) % len(rolled)
        before.set_title(f"before: {_planes(*original)}", loc="left")
        low, high = int(rolled[start].min()), int(rolled[start].max())
        title = f"after: {_planes(start, end - 1)}, regions {low} to {high}"
        after.set_title(title, loc="left")
    _draw_mask(panels[1, -1], grid)
    panels[0, -1].set_axis_off()
    note = "Numbers are those of the windows in the first layer of each slice."
    panels[0, -1].text(0, 0.5, "\n".join(textwrap.wrap(note, 26)), va="center", color=GREY)
    ids = _ids(rolled)
    labels = {fill: [str(other) for other in ids if other % 9 == fill] for fill in _ids(rolled % 9)}
    _add_legend(figure, plane, {fill: ", ".join(same) for fill, same in labels.items()})
    return figure


def _planes(first: int, last: int) -> str:
    return f"planes {first} to {last}" if last != first else f"plane {first}"


def _ids(regions: Tensor) -> list[int]:
    return sorted(set(regions.flatten().tolist()))


def _draw_map(
    axes: Any, grid: WindowGrid, regions: Tensor, *, is_rolled: bool, first_window: int = 0
) -> None:
    """Regions, padding, edges and numbers of the windows of a map of two axes."""
    from matplotlib.colors import ListedColormap

    height, width = grid.padded
    rows, columns = _cuts(regions), _cuts(regions.T)
    axes.pcolormesh(
        columns, rows, regions[rows[:-1]][:, columns[:-1]].numpy(),
        cmap=ListedColormap(list(FILLS)), vmin=-0.5, vmax=8.5,
    )  # fmt: skip
    if max(height, width) <= MAX_LINED:
        axes.hlines(range(1, height), 0, width, color="white", linewidth=0.4)
        axes.vlines(range(1, width), 0, height, color="white", linewidth=0.4)
    _draw_padding(axes, grid, is_rolled=is_rolled)
    for axis, line in ((0, axes.axhline), (1, axes.axvline)):
        offset = 0 if is_rolled else grid.shift[axis]
        extent = grid.window[axis]
        for edge in range(offset, grid.padded[axis] + 1, extent):
            line(edge, color=INK, linewidth=1.6)
    _number_windows(axes, grid, is_rolled=is_rolled, first_window=first_window)
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    axes.set_xticks([0, grid.window[1], width])
    axes.set_yticks([0, grid.window[0], height])
    if grid.shift[0] or grid.shift[1]:
        axes.set_xlabel("token, after the roll" if is_rolled else "token, before the roll")


def _number_windows(axes: Any, grid: WindowGrid, *, is_rolled: bool, first_window: int) -> None:
    """Write a window's number on each of its pieces; a window that wraps has several.

    Of many windows, only the first and those that wrap are numbered.
    """
    rows, columns = (_pieces(grid, axis, is_rolled=is_rolled) for axis in (0, 1))
    has_few = grid.num_windows <= MAX_NUMBERED
    last_row, last_column = (count - 1 for count in grid.windows)
    part = 0.27 if is_rolled and not has_few else 0.5  # beside the padding
    box = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.75}
    if not has_few:
        box["boxstyle"] = "square,pad=0"
    for row, top, bottom in rows:
        for column, left, right in columns:
            wraps = row == last_row or column == last_column
            if not (has_few or wraps or row == column == 0):
                continue
            number = first_window + row * grid.windows[1] + column
            axes.text(
                left + part * (right - left), top + part * (bottom - top), str(number),
                ha="center", va="center",
                fontsize=9.0 if has_few else 5.5, color=INK, bbox=box,
            )  # fmt: skip


def _pieces(grid: WindowGrid, axis: int, *, is_rolled: bool) -> list[tuple[int, int, int]]:
    """(window, start, end) of each piece of the windows along an axis."""
    length, extent = grid.padded[axis], grid.window[axis]
    offset = 0 if is_rolled else grid.shift[axis]
    count = length // extent
    pieces = [(count - 1, 0, offset)] if offset else []
    for window in range(count):
        start = offset + window * extent
        pieces.append((window, start, min(start + extent, length)))
    return pieces


def _cuts(regions: Tensor) -> list[int]:
    """The rows where the regions change, and both ends."""
    changes = (regions[1:] != regions[:-1]).any(dim=1).nonzero().flatten() + 1
    return [0, *changes.tolist(), len(regions)]


def _draw_padding(axes: Any, grid: WindowGrid, *, is_rolled: bool) -> None:
    """Hatch the padding, which is at the end of the map and moves with the roll."""
    from matplotlib.patches import Rectangle

    (rows, columns), (height, width) = grid.size, grid.padded
    down, right = grid.shift if is_rolled else (0, 0)
    for top in range(rows, height):
        y = (top - down) % height
        axes.add_patch(Rectangle((0, y), width, 1, hatch=PADDING, fill=False, linewidth=0))
    for left in range(columns, width):
        x = (left - right) % width
        axes.add_patch(Rectangle((x, 0), 1, height, hatch=PADDING, fill=False, linewidth=0))


def _draw_mask(axes: Any, grid: WindowGrid) -> None:
    """The mask of the last window, which has the most regions."""
    from matplotlib.colors import ListedColormap

    last = grid.regions[-1]
    is_masked = (last[:, None] != last[None, :]).numpy()
    colours = ListedColormap([COLOURS[4], "#FFFFFF"])
    axes.imshow(is_masked, cmap=colours, vmin=0, vmax=1, interpolation="none")
    axes.set_title(f"mask of window {grid.num_windows - 1}", loc="left")
    axes.set(xlabel="key", xticks=[0, len(last) - 1], yticks=[0, len(last) - 1])
    axes.set_ylabel("query", labelpad=-8)


def _add_legend(figure: Figure, grid: WindowGrid, labels: dict[int, str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(facecolor=FILLS[fill], edgecolor=GREY, label=label) for fill, label in labels.items()
    ]
    handles.append(Line2D([], [], color=INK, linewidth=1.6, label="edge of a window"))
    if grid.padded != grid.size:
        label = "padding"
        handles.append(Patch(facecolor="white", edgecolor=INK, hatch=PADDING, label=label))
    handles.append(Patch(facecolor=COLOURS[4], edgecolor=GREY, label="same region"))
    handles.append(Patch(facecolor="white", edgecolor=GREY, label="mask: -100"))
    columns = int(figure.get_figwidth() / ENTRY_WIDTH)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)

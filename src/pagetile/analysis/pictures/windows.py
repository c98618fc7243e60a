"""The regions of a map whose windows are shifted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import ShapeError
from ..window_grid import WindowGrid
from .style import COLOURS, GREY, INK, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

__all__ = ["MAX_SIDE", "draw_windows"]

MAX_SIDE = 512
"""Tokens along an axis: more could not be told apart."""

MAX_LINED = 32  # tokens along an axis, to draw a line between any two

# Region ids count bands in base 3 along the last two axes; hatches repeat what the colours say.
FILLS = ("#DCEBF5", "#56B4E9", "#0072B2", "#FBE3B5", "#E69F00", "#B36B00", "#CDEBDD", "#009E73",
         "#005C43")  # fmt: skip
PADDING = "xxxx"
ENTRY_WIDTH, MAX_ENTRIES = 1.4, 13  # of the legend: inches of one, and how many there can be


@styled
def draw_windows(grid: WindowGrid) -> Figure:
    """The map with its shifted windows, the rolled map with its regions, and one window's mask.

    A map of three axes is drawn as slices along the first: one for each band of regions.

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


def _wide_figure(width: float) -> Figure:
    """A row of panels and, below, as many rows of legend as it may take."""
    rows = -(-MAX_ENTRIES // int(width / ENTRY_WIDTH))
    return new_figure(width, 3.6 + 0.25 * rows)


def _draw_plane(grid: WindowGrid) -> Figure:
    figure = _wide_figure(10.0)
    before, after, mask = figure.subplots(1, 3)
    rolled = grid.region_map()
    _draw_map(before, grid, rolled.roll(grid.shift, dims=(0, 1)), is_rolled=False)
    before.set_title("where windows lie", loc="left")
    _draw_map(after, grid, rolled, is_rolled=True)
    after.set_title("rolled: regions of each window", loc="left")
    _draw_mask(mask, grid)
    _add_legend(figure, grid, {region: f"region {region}" for region in _ids(rolled)})
    return figure


def _draw_slices(grid: WindowGrid) -> Figure:
    """Three axes: the planes of the rolled map that differ."""
    rolled = grid.region_map()
    starts = [
        index for index in range(len(rolled))
        if index == 0 or not rolled[index].equal(rolled[index - 1])
    ]  # fmt: skip
    ends = [*starts[1:], len(rolled)]
    plane = WindowGrid(grid.size[1:], grid.window[1:], grid.shift[1:])
    figure = _wide_figure(3.2 * (len(starts) + 1) + 0.4)
    *panels, mask = figure.subplots(1, len(starts) + 1)
    for axes, start, end in zip(panels, starts, ends, strict=True):
        # Ids of a slice differ from another's by the band of the first axis alone.
        _draw_map(axes, plane, rolled[start] % 9, is_rolled=True)
        band = f"planes {start} to {end - 1}" if end - start > 1 else f"plane {start}"
        low, high = int(rolled[start].min()), int(rolled[start].max())
        axes.set_title(f"{band}: regions {low} to {high}", loc="left")
    _draw_mask(mask, grid)
    ids = _ids(rolled)
    labels = {fill: [str(other) for other in ids if other % 9 == fill] for fill in _ids(rolled % 9)}
    _add_legend(figure, plane, {fill: ", ".join(same) for fill, same in labels.items()})
    return figure


def _ids(regions: Tensor) -> list[int]:
    return sorted(set(regions.flatten().tolist()))


def _draw_map(axes: Any, grid: WindowGrid, regions: Tensor, *, is_rolled: bool) -> None:
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
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    axes.set_xticks([0, grid.window[1], width])
    axes.set_yticks([0, grid.window[0], height])
    if grid.shift[0] or grid.shift[1]:
        axes.set_xlabel("token, after the roll" if is_rolled else "token, before the roll")


def _cuts(regions: Tensor) -> list[int]:
    """The rows where something changes, and both ends."""
    changes = (regions[1:] != regions[:-1]).any(dim=1).nonzero().flatten() + 1
    return [0, *changes.tolist(), len(regions)]


def _draw_padding(axes: Any, grid: WindowGrid, *, is_rolled: bool) -> None:
    """Padding lies at the end of the map, and moves with the roll."""
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
    """Who may see whom in the last window, where most regions meet."""
    from matplotlib.colors import ListedColormap

    last = grid.regions[-1]
    hidden = (last[:, None] != last[None, :]).numpy()
    colours = ListedColormap([COLOURS[4], "#FFFFFF"])
    axes.imshow(hidden, cmap=colours, vmin=0, vmax=1, interpolation="none")
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
    handles.append(Patch(facecolor=COLOURS[4], edgecolor=GREY, label="sees each other"))
    handles.append(Patch(facecolor="white", edgecolor=GREY, label="-100 added"))
    columns = int(figure.get_figwidth() / ENTRY_WIDTH)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)

"""The tile walk: which K/V tiles each query tile visits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import ShapeError
from ..tile_walk import FULL, MASKED, SKIPPED, TileWalk
from .style import COLOURS, GREY, INK, new_figure, styled, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_TILES = 256
"""Along one side: more could not be told apart."""

KINDS = {SKIPPED: "#FFFFFF", FULL: COLOURS[4], MASKED: COLOURS[1]}
MAX_NUMBERED = 24


@styled
def draw_tiles(walk: TileWalk, query_tile: int | None = None) -> Figure:
    """All tiles by kind, what rows see, and the walk of one query tile with its visits numbered.

    Args:
        walk: The tiles.
        query_tile: Whose walk to show; by default the one in the middle.

    Raises:
        ShapeError: There is no such query tile, or there are more than ``MAX_TILES`` on a side.
        ModuleNotFoundError: matplotlib is not installed.
    """
    rows, columns = walk.num_query_tiles, walk.num_kv_tiles
    if max(rows, columns) > MAX_TILES:
        raise ShapeError(
            f"{rows} x {columns} tiles are too many to tell apart, {MAX_TILES} on a side are not: "
            "take longer tiles or a shorter sequence"
        )
    if query_tile is None:
        query_tile = rows // 2
    if not 0 <= query_tile < rows:
        raise ShapeError(f"query tile {query_tile}: expected 0 to {rows - 1}")
    height, width = rows * walk.tile_m, columns * walk.tile_n
    figure = new_figure(6.4, min(9.0, max(3.0, 1.9 + 5.2 * height / width)))
    axes = figure.add_subplot()
    _draw_kinds(axes, walk)
    _draw_beyond(axes, walk)
    _draw_edges(axes, walk)
    _draw_walk(axes, walk, query_tile)
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal", xlabel="key", ylabel="query")
    axes.xaxis.set_label_position("bottom")
    axes.set_xticks(_ticks(walk.tile_n, walk.key_len))
    axes.set_yticks(_ticks(walk.tile_m, walk.query_len))
    tidy(axes, title=_title(walk))
    _add_legend(figure, walk, query_tile)
    return figure


def _draw_kinds(axes: Any, walk: TileWalk) -> None:
    from matplotlib.colors import ListedColormap

    order = list(KINDS)
    cells = [
        [order.index(walk.kind(row, column)) for column in range(walk.num_kv_tiles)]
        for row in range(walk.num_query_tiles)
    ]
    axes.pcolormesh(
        [walk.tile_n * column for column in range(walk.num_kv_tiles + 1)],
        [walk.tile_m * row for row in range(walk.num_query_tiles + 1)],
        cells,
        cmap=ListedColormap(list(KINDS.values())),
        vmin=-0.5,
        vmax=len(KINDS) - 0.5,
        edgecolors="none" if _are_many(walk) else "#B8B8B8",
        linewidth=0.5,
    )


def _are_many(walk: TileWalk) -> bool:
    """Whether lines would cover the tiles that they are drawn around."""
    return max(walk.num_query_tiles, walk.num_kv_tiles) > 64


def _draw_beyond(axes: Any, walk: TileWalk) -> None:
    """What ragged tiles cover past the last query and key: computed, and thrown away."""
    from matplotlib.patches import Rectangle

    height, width = walk.num_query_tiles * walk.tile_m, walk.num_kv_tiles * walk.tile_n
    for x, y, w, h in (
        (walk.key_len, 0, width - walk.key_len, height),
        (0, walk.query_len, walk.key_len, height - walk.query_len),
    ):
        if w and h:
            axes.add_patch(
                Rectangle(
                    (x, y), w, h, facecolor="#FFFFFFA0", edgecolor=GREY, hatch="////", linewidth=0
                )
            )


def _draw_edges(axes: Any, walk: TileWalk) -> None:
    """Where each row's visible keys begin and end."""
    seen = [walk.visible(row) for row in range(walk.query_len)]
    edges = range(walk.query_len + 1)
    width = 0.3 if _are_many(walk) else 1.1  # masked tiles lie below
    bounds = [[keys.start for keys in seen]] if walk.sliding_window is not None else []
    if walk.causal:
        bounds.append([keys.stop for keys in seen])
    for bound in bounds:
        axes.step([*bound, bound[-1]], edges, where="pre", color=INK, linewidth=width)


def _draw_walk(axes: Any, walk: TileWalk, query_tile: int) -> None:
    from matplotlib.patches import Rectangle

    visits = walk.visits(query_tile)
    top, middle = query_tile * walk.tile_m, (query_tile + 0.5) * walk.tile_m
    if not visits:
        return
    axes.add_patch(
        Rectangle(
            (visits.start * walk.tile_n, top), len(visits) * walk.tile_n, walk.tile_m,
            fill=False, edgecolor=COLOURS[0], linewidth=2.4, zorder=4,
        )
    )  # fmt: skip
    if max(walk.num_kv_tiles, walk.num_query_tiles) <= MAX_NUMBERED:
        for step, kv_tile in enumerate(visits, start=1):
            axes.text(
                (kv_tile + 0.5) * walk.tile_n, middle, str(step),
                ha="center", va="center", weight="bold", color=INK, zorder=5,
                bbox={"boxstyle": "circle,pad=0.25", "facecolor": "white", "linewidth": 0},
            )  # fmt: skip


def _ticks(tile: int, length: int) -> list[int]:
    """Some tile edges, evenly spaced, and the length."""
    count = -(-length // tile)
    step = tile * max(1, -(-count // 8))
    inner = [edge for edge in range(0, length, step) if length - edge > step // 2]
    return [*inner, length]


def _title(walk: TileWalk) -> str:
    kind = "causal" if walk.causal else "every key visible"
    if walk.sliding_window is not None:
        kind = f"{'causal, ' * walk.causal}window of {walk.sliding_window:,} keys"
    return (
        f"{walk.query_len:,} queries, {walk.key_len:,} keys, tiles of "
        f"{walk.tile_m} x {walk.tile_n}\n{kind}"
    )


def _add_legend(figure: Figure, walk: TileWalk, query_tile: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    counts = walk.counts
    handles: list[Any] = [
        Patch(facecolor=colour, edgecolor=GREY, label=f"{kind}: {counts[kind]:,}")
        for kind, colour in KINDS.items()
        if counts[kind]
    ]
    if walk.key_len % walk.tile_n or walk.query_len % walk.tile_m:
        label = "past the end"
        handles.append(Patch(facecolor="white", edgecolor=GREY, hatch="////", label=label))
    if walk.causal or walk.sliding_window is not None:
        handles.append(Line2D([], [], color=INK, label="edge of what rows see"))
    label = f"walk of query tile {query_tile}"
    handles.append(Line2D([], [], color=COLOURS[0], linewidth=2.4, label=label))
    figure.legend(handles=handles, loc="outside lower center", ncols=3)

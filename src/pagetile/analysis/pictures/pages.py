"""Paged attention in pictures: block tables over a pool, and one pool's life as an animation."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import RequestError
from ..page_map import PageMap
from ..page_story import MAX_MODEL_LEN, PageStep
from .style import COLOURS, GREY, INK, LIGHT, new_figure, styled, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PER_ROW = 8
CACHED = "#F4F4F4"


@styled
def draw_pages(pages: PageMap, copy: tuple[int, int] | None = None) -> Figure:
    """Draw each sequence's block table, the pool, and the slots that are wasted.

    Args:
        pages: The snapshot.
        copy: A block copy to draw as an arrow.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = new_figure(7.6, 5.2)
    grid = figure.add_gridspec(2, 2, width_ratios=[1.1, 1], height_ratios=[1.25, 1])
    _draw_tables(figure.add_subplot(grid[0, 0]), pages)
    _draw_pool(figure.add_subplot(grid[0, 1]), pages, copy)
    _draw_waste(figure.add_subplot(grid[1, :]), pages)
    return figure


def _colour(pages: PageMap, block: int) -> str:
    """The colour of the first sequence that holds a block."""
    for position, sequence in enumerate(pages.sequences):
        if block in sequence.blocks:
            return COLOURS[position % len(COLOURS)]
    return CACHED if block in pages.cached else "#FFFFFF"


def _cell(axes: Any, x: float, y: float, pages: PageMap, block: int, label: str) -> None:
    from matplotlib.patches import Rectangle

    holders = pages.num_holders.get(block, 0)
    axes.add_patch(
        Rectangle(
            (x + 0.04, y + 0.06), 0.92, 0.88, facecolor=_colour(pages, block) + "59" if holders
            else _colour(pages, block), edgecolor=INK if holders else GREY,
            linewidth=1.8 if holders > 1 else 0.7, hatch="" if holders or block not in pages.cached
            else "....",
        )
    )  # fmt: skip
    axes.text(x + 0.5, y + 0.5, label, ha="center", va="center", fontsize=8.5)


def _blank(axes: Any, title: str, width: float, height: float) -> None:
    tidy(axes, title=title)
    axes.set(xlim=(-0.1, width), ylim=(height, -0.1), xticks=[], yticks=[])
    axes.spines[["left", "bottom"]].set_visible(False)


def _draw_tables(axes: Any, pages: PageMap) -> None:
    longest = max(len(sequence.blocks) for sequence in pages.sequences)
    _blank(axes, "Block tables: token t is in block t // 4", longest + 1.2, len(pages.sequences))
    for row, sequence in enumerate(pages.sequences):
        axes.text(0.1, row + 0.5, sequence.name, va="center", weight="bold")
        for column, block in enumerate(sequence.blocks):
            shared = pages.num_holders[block] > 1
            _cell(axes, column + 0.9, row, pages, block, f"{block}{' *' if shared else ''}")


def _draw_pool(axes: Any, pages: PageMap, copy: tuple[int, int] | None) -> None:
    rows = -(-pages.num_blocks // PER_ROW)
    _blank(axes, "The pool (bold: shared, dotted: cached)", PER_ROW + 0.1, max(rows, 3))
    for block in range(pages.num_blocks):
        _cell(axes, block % PER_ROW, block // PER_ROW, pages, block, str(block))
    if copy is not None:
        (x0, y0), (x1, y1) = ((block % PER_ROW + 0.5, block // PER_ROW + 0.9) for block in copy)
        axes.annotate(
            "", (x1, y1), (x0, y0),
            arrowprops={"arrowstyle": "->", "connectionstyle": "arc3,rad=0.6", "color": INK},
        )  # fmt: skip
        axes.text(0.1, rows + 0.35, f"arrow: copy on write, {copy[0]} to {copy[1]}", fontsize=8.5)


def _draw_waste(axes: Any, pages: PageMap) -> None:
    """Slots of each sequence: filled and empty, reserved contiguously and in pages."""
    tidy(axes, title=f"Slots: reserved for {MAX_MODEL_LEN} tokens each, and in pages")
    labels = []
    for row, sequence in enumerate(pages.sequences):
        held = len(sequence.blocks) * pages.block_size
        for offset, slots, kind in ((0.0, MAX_MODEL_LEN, "reserved"), (0.4, held, "in pages")):
            y = row + offset
            axes.barh(y, slots, height=0.32, color=LIGHT, edgecolor=GREY, linewidth=0.5)
            axes.barh(y, sequence.num_tokens, height=0.32, color=COLOURS[row % len(COLOURS)])
            empty = slots - sequence.num_tokens
            axes.text(slots + 0.3, y, f"{empty} empty", va="center", fontsize=8)
            labels.append((y, f"{sequence.name}, {kind}"))
    axes.set_yticks([y for y, _ in labels], [label for _, label in labels])
    axes.set(xlim=(0, MAX_MODEL_LEN + 5), ylim=(len(pages.sequences), -0.4), xlabel="tokens")


SECONDS = 4
CELL, LEFT, TOP = 46, 24, 84


def animate_pages(steps: Sequence[PageStep], path: Path) -> None:
    """Write an SVG that plays the steps, four seconds each, in a loop.

    The picture needs no script: each step is a group that CSS shows in its turn. Readers who ask
    their system for less motion see the last step only.

    Raises:
        RequestError: The name does not end in ``.svg``.
        OSError: The file cannot be written.
    """
    if path.suffix.lower() != ".svg":
        raise RequestError(f"{path}: an animation is an SVG, expected a name that ends in .svg")
    pages = steps[0].pages
    width = 2 * LEFT + PER_ROW * CELL + 250
    height = TOP + -(-pages.num_blocks // PER_ROW) * CELL + 92
    share = 100 / len(steps)
    groups = "".join(
        f'<g class="step" style="animation-delay:{number * SECONDS}s">{_frame(step, number)}</g>'
        for number, step in enumerate(steps)
    )
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="DejaVu Sans, Verdana, Arial, sans-serif" font-size="13" fill="{INK}">'
        f"<style>.step{{opacity:0;animation:turn {len(steps) * SECONDS}s infinite}}"
        f"@keyframes turn{{0%,{share - 0.5:.2f}%{{opacity:1}}{share:.2f}%,100%{{opacity:0}}}}"
        "@media (prefers-reduced-motion:reduce){.step{animation:none}"
        ".step:last-of-type{opacity:1}}</style>"
        f'<rect width="{width}" height="{height}" fill="#FFFFFF"/>{groups}</svg>\n',
        encoding="utf-8",
    )


def _frame(step: PageStep, number: int) -> str:
    pages = step.pages
    text = [
        f'<text x="{LEFT}" y="{30 + 19 * at}" font-size="14">{html.escape(line)}</text>'
        for at, line in enumerate(textwrap.wrap(step.caption, 79, break_on_hyphens=False))
    ]
    cells = [_svg_cell(step, block) for block in range(pages.num_blocks)]
    rows = [
        f'<text x="{LEFT + PER_ROW * CELL + 24}" y="{TOP + 18 + 30 * row}">'
        f'<tspan fill="{COLOURS[ord(sequence.name) % len(COLOURS)]}">■</tspan> '
        f"{sequence.name}: {' '.join(map(str, sequence.blocks[:6]))}"
        f"{' …' if len(sequence.blocks) > 6 else ''} ({sequence.num_tokens} tokens)</text>"
        for row, sequence in enumerate(pages.sequences)
    ]
    bottom = TOP + -(-pages.num_blocks // PER_ROW) * CELL + 30
    legend = (
        f'<text x="{LEFT}" y="{bottom}" fill="{GREY}">number: holders of the block · '
        "thick: shared · dashed: cached · underlined: written now</text>"
        f'<text x="{LEFT}" y="{bottom + 26}" fill="{GREY}">step {number + 1} · '
        f"{pages.num_held} held, {pages.num_shared} shared, {len(pages.cached)} cached, "
        f"{pages.num_free} free</text>"
    )
    return "".join([*text, *cells, *rows, legend])


def _svg_cell(step: PageStep, block: int) -> str:
    pages = step.pages
    holders = pages.num_holders.get(block, 0)
    names = [sequence.name for sequence in pages.sequences if block in sequence.blocks]
    fill = COLOURS[ord(names[0]) % len(COLOURS)] + "59" if names else "#FFFFFF"
    x, y = LEFT + block % PER_ROW * CELL, TOP + block // PER_ROW * CELL
    dash = ' stroke-dasharray="4 3"' if block in pages.cached else ""
    parts = [
        f'<rect x="{x + 2}" y="{y + 2}" width="{CELL - 4}" height="{CELL - 4}" rx="4" '
        f'fill="{fill}" stroke="{INK if holders else GREY}" '
        f'stroke-width="{2.6 if holders > 1 else 1}"{dash}/>',
        f'<text x="{x + CELL / 2}" y="{y + 21}" text-anchor="middle">{block}</text>',
    ]
    if holders:
        parts.append(
            f'<text x="{x + CELL / 2}" y="{y + 37}" text-anchor="middle" font-size="10">'
            f"{holders}</text>"
        )
    if block in step.written:
        parts.append(
            f'<rect x="{x + 8}" y="{y + CELL - 8}" width="{CELL - 16}" height="3" fill="{INK}"/>'
        )
    return "".join(parts)

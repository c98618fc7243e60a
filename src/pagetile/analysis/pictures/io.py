"""Bytes of attention against its length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..io_curves import Curve, IoCurves
from ..traffic import format_count
from .style import COLOURS, GREY, INK, LIGHT, new_figure, styled, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_io"]

MARKERS = "osD^v*P"


@styled
def draw_io(curves: IoCurves) -> Figure:
    """Standard, tiled and compulsory bytes over the length, crossovers marked.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure = new_figure(6.8, 5.0)
    axes = figure.add_subplot()
    axes.set(xscale="log", yscale="log")
    _shade_resident(axes, curves)
    lengths = curves.lengths
    axes.plot(lengths, curves.standard.bytes, color=INK, linewidth=2, label="standard")
    for position, curve in enumerate(curves.tiled):
        _plot_tiled(axes, lengths, curve, position)
    axes.plot(
        lengths, curves.compulsory.bytes, color=GREY, linewidth=1.6, linestyle=(0, (4, 2)),
        label="compulsory: every tensor once",
    )  # fmt: skip
    _mark_crossovers(axes, curves)
    axes.set(xlim=(lengths[0], lengths[-1]), xlabel="queries and keys", ylabel="bytes of one head")
    ticks = [2**power for power in range(24) if lengths[0] <= 2**power <= lengths[-1]]
    axes.set_xticks(ticks, [_short(tick) for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(base=10))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    axes.grid(color=LIGHT, linewidth=0.6)
    axes.set_axisbelow(True)
    tidy(axes, title=curves.title)
    axes.legend(loc="upper left")
    return figure


def _plot_tiled(axes: Any, lengths: Sequence[int], curve: Curve, position: int) -> None:
    colour = COLOURS[position % len(COLOURS)]
    axes.plot(
        lengths, curve.bytes, color=colour, linewidth=1.6, marker=MARKERS[position % len(MARKERS)],
        markersize=4, markevery=(position * 3, 12), label=curve.name,
    )  # fmt: skip


def _shade_resident(axes: Any, curves: IoCurves) -> None:
    """Lengths at which a head's K and V fit on the chip, so that nothing is read twice."""
    shortest, longest = curves.lengths[0], curves.lengths[-1]
    if curves.longest_resident <= shortest:
        return
    edge = min(curves.longest_resident, longest)
    axes.axvspan(shortest, edge, color="#F3F3F3", zorder=0)
    if edge < longest:
        axes.axvline(edge, color=GREY, linewidth=0.8, linestyle=":")
    is_left = edge**2 < shortest * longest
    axes.annotate(
        f"K and V of a head fit on chip\nup to {curves.longest_resident:,} keys",
        (edge, 0.02), xycoords=("data", "axes fraction"), xytext=(4 if is_left else -4, 0),
        textcoords="offset points", va="bottom", ha="left" if is_left else "right", color=GREY,
    )  # fmt: skip


def _mark_crossovers(axes: Any, curves: IoCurves) -> None:
    for position, curve in enumerate(curves.tiled):
        if curve.worse_from is None:
            continue
        height = curves.standard.at(curve.worse_from)
        axes.plot(
            [curve.worse_from], [height], marker="o", markersize=11, fillstyle="none",
            color=COLOURS[position % len(COLOURS)], markeredgewidth=1.8, zorder=6,
        )  # fmt: skip
        axes.annotate(
            f"more than standard\n{curves.where_worse(curve)}", (curve.worse_from, height),
            xytext=(12, -16 - 4 * position), textcoords="offset points", va="top",
            arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.8},
        )  # fmt: skip


def _short(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 else str(length)

"""Bytes of attention against its length."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from ..io_curves import Curve, IoCurves
from ..traffic import format_count
from .style import COLOURS, GREY, INK, LIGHT, new_figure, styled, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = "osD^v*P"


@styled
def draw_io(curves: IoCurves) -> Figure:
    """Standard, tiled and compulsory bytes over the length, crossovers marked.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure = new_figure(6.8, 5.4)
    axes = figure.add_subplot()
    axes.set(xscale="log", yscale="log")
    lengths = curves.lengths
    axes.plot(lengths, curves.standard.bytes, color=INK, linewidth=2, label="standard")
    for position, curve in enumerate(curves.tiled):
        _plot_tiled(axes, curves, curve, position)
    axes.plot(
        lengths, curves.compulsory.bytes, color=GREY, linewidth=1.6, linestyle=(0, (4, 2)),
        label="compulsory: every tensor once",
    )  # fmt: skip
    _shade_resident(axes, curves)
    axes.set(xlim=(lengths[0], lengths[-1]), xlabel="queries and keys", ylabel="bytes of one head")
    ticks = [2**power for power in range(24) if lengths[0] <= 2**power <= lengths[-1]]
    axes.set_xticks(ticks, [_short(tick) for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(base=10))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    axes.grid(color=LIGHT, linewidth=0.6)
    axes.set_axisbelow(True)
    tidy(axes, title="\n".join(textwrap.wrap(curves.title, 64)))
    figure.legend(loc="outside lower center", ncols=2)  # outside, where no curve passes
    return figure


def _plot_tiled(axes: Any, curves: IoCurves, curve: Curve, position: int) -> None:
    """A tile's bytes, with a ring where they come to exceed standard attention's for good."""
    colour, label = COLOURS[position % len(COLOURS)], curve.name
    if curve.worse_from is not None:
        label += f": over standard {curves.where_worse(curve)}"
        axes.plot(
            [curve.worse_from], [curves.standard.count(curve.worse_from)], marker="o",
            markersize=11, fillstyle="none", color=colour, markeredgewidth=1.8, zorder=6,
            clip_on=False,
        )  # fmt: skip
    axes.plot(
        curves.lengths, curve.bytes, color=colour, linewidth=1.6,
        marker=MARKERS[position % len(MARKERS)], markersize=4, markevery=(position * 3, 12),
        label=label,
    )  # fmt: skip


def _shade_resident(axes: Any, curves: IoCurves) -> None:
    """Lengths at which a head's K and V fit on the chip, so that nothing is read twice."""
    shortest, longest = curves.lengths[0], curves.lengths[-1]
    if curves.longest_resident > shortest:
        axes.axvspan(
            shortest, min(curves.longest_resident, longest), color="#F3F3F3", zorder=0,
            label=f"K and V fit on chip: up to {curves.longest_resident:,} keys",
        )  # fmt: skip


def _short(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 else str(length)

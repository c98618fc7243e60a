"""What all pictures share: colours that colour-blind readers tell apart, and how they are saved."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from ...errors import RequestError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

P = ParamSpec("P")

# Okabe and Ito's colours, in an order in which neighbours differ in lightness as well.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442")
INK, GREY, LIGHT = "#222222", "#767676", "#E4E4E4"

SUFFIXES = (".png", ".svg")
SETTINGS: Any = {
    "font.size": 9.5,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "axes.titlesize": 10.5,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "pagetile",  # the same picture is the same file
}


def check_path(path: Path) -> Path:
    """A path that a picture can be written to.

    Raises:
        RequestError: It does not end in ``.png`` or ``.svg``, or its folder does not exist.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise RequestError(f"{path}: expected a name that ends in .png or .svg")
    if not path.parent.is_dir():
        raise RequestError(f"{path}: there is no folder {path.parent}")
    return path


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Let a function draw in our style."""

    @wraps(draw)
    def draw_styled(*args: P.args, **options: P.kwargs) -> Figure:
        from matplotlib import rc_context

        with rc_context(SETTINGS):
            return draw(*args, **options)

    return draw_styled


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def tidy(axes: Any, *, title: str) -> None:
    """No frame above and on the right, and a title on the left."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left")


def save(figure: Figure, path: Path) -> None:
    """Write a figure, PNG or SVG by the path's ending; equal figures give equal files.

    Raises:
        RequestError: ``check_path`` refuses the path.
        OSError: The file cannot be written.
    """
    from matplotlib import rc_context

    is_svg = check_path(path).suffix.lower() == ".svg"
    with rc_context(SETTINGS):
        figure.savefig(path, dpi=160, metadata={"Date": None} if is_svg else None)

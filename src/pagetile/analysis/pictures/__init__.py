"""Pictures of pages, tile walks, bytes and windows, by matplotlib: the extra ``plots``."""

from .io import draw_io
from .pages import animate_pages, draw_pages
from .style import check_path, save
from .tiles import draw_tiles
from .windows import draw_windows

__all__ = [
    "animate_pages",
    "check_path",
    "draw_io",
    "draw_pages",
    "draw_tiles",
    "draw_windows",
    "save",
]

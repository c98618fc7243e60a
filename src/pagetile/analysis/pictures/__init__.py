"""Pictures of tile walks, bytes and windows, by matplotlib: the extra ``plots``."""

from .io import draw_io
from .style import check_path, save
from .tiles import draw_tiles
from .windows import draw_windows

__all__ = ["check_path", "draw_io", "draw_tiles", "draw_windows", "save"]

"""Attention inside the windows of a Swin transformer."""

from .api import explain_window_attention, window_attention
from .geometry import regions_from_mask, rel_offsets, shift_regions
from .problem import Problem
from .shifted import shifted_window_attention

__all__ = [
    "Problem",
    "explain_window_attention",
    "regions_from_mask",
    "rel_offsets",
    "shift_regions",
    "shifted_window_attention",
    "window_attention",
]

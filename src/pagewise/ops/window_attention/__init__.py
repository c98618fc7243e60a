"""Attention inside the windows of a Swin transformer."""

from .api import explain_window_attention, window_attention
from .geometry import regions_from_mask, rel_offsets, shift_regions
from .problem import Problem

__all__ = [
    "Problem",
    "explain_window_attention",
    "regions_from_mask",
    "rel_offsets",
    "shift_regions",
    "window_attention",
]

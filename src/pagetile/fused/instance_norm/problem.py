"""The problem of an instance norm: what chooses its implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Problem(NamedTuple):
    """A call as host integers and element types."""

    channels: int
    """Channels of all images."""
    size: int
    """Elements of a channel."""
    dtype: torch.dtype
    eps: float
    negative_slope: float
    residual: str = "none"
    """``none``; ``plain``: added as it is; ``norm``: normalised and added."""
    residual_dtype: torch.dtype = torch.float32
    residual_eps: float = 0.0

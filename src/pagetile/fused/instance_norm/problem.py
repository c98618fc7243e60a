"""What decides which implementation runs."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Problem"]


class Problem(NamedTuple):
    """A call, as host numbers."""

    channels: int
    """Of all images."""
    size: int
    """Numbers of a channel."""
    dtype: torch.dtype
    eps: float
    negative_slope: float
    residual: str = "none"
    """``none``; ``plain``: added as it is; ``norm``: normalised and added."""
    residual_dtype: torch.dtype = torch.float32
    residual_eps: float = 0.0

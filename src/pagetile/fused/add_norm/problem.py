"""What decides which implementation runs."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Problem(NamedTuple):
    """A call, as host numbers."""

    size: int
    """Numbers of a row."""
    num_rows: int
    is_contiguous: bool
    dtype: torch.dtype
    norm_dtypes: tuple[torch.dtype, ...]
    needs_gradient: bool

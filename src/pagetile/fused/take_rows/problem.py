"""What decides which implementation runs."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Problem(NamedTuple):
    """A call, as host numbers."""

    size: int
    """Numbers of a row."""
    num_rows: int
    """Rows that are taken."""
    dtype: torch.dtype
    is_contiguous: bool
    needs_gradient: bool

"""What decides which implementation runs."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Problem(NamedTuple):
    """A call, as host numbers."""

    size: int
    """Numbers of a row of the result."""
    num_rows: int
    dtype: torch.dtype
    is_regular: bool
    """Whether one stride leads from row to row, and a row's numbers are neighbours."""
    needs_gradient: bool

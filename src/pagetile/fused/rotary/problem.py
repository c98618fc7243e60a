"""What decides which implementation runs."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Problem(NamedTuple):
    """A call, as host numbers."""

    size: int
    """Numbers of a head."""
    num_rows: int
    """Heads of all tokens, of queries or of keys: the more of both."""
    dtype: torch.dtype
    is_regular: bool
    """Whether the numbers of every head, and of every token's angles, are neighbours."""
    needs_gradient: bool

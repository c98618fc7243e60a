"""The problem of a linear layer of few rows: what chooses its implementation and plan."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Problem(NamedTuple):
    """A call, as host numbers."""

    num_rows: int
    """Rows of ``x``."""
    size: int
    """Elements of a row of ``x``, and of the weight."""
    num_columns: int
    """Elements of a row of the result; a gated weight has twice as many rows."""
    dtype: torch.dtype
    is_gated: bool = False
    has_norm: bool = False
    is_regular: bool = True
    """Whether every tensor is of one type, the weight has no gaps, and rows are contiguous."""
    needs_gradient: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight."""
        return (1 + self.is_gated) * self.num_columns * self.size * self.dtype.itemsize

"""The problem of a fused cache write: what chooses its implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..rms_norm import Norm
from ..rows import RowsProblem


class Heads(NamedTuple):
    """How a row of the merged projection is divided, and what is done to its heads."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    q_norm: Norm | None = None
    """Norm of each head of the queries; ``None``: no norm."""
    k_norm: Norm | None = None
    is_shared: bool = False
    """As for ``rotate``: whether both elements of a pair share an angle."""

    @property
    def width(self) -> int:
        """Elements of a row: queries, keys, values."""
        return self.num_heads * self.head_size + self.num_kv_heads * (
            self.head_size + self.v_head_size
        )


class Problem(NamedTuple):
    """A call, as host numbers."""

    rows: RowsProblem
    """The heads of all tokens."""
    cache_dtype: torch.dtype

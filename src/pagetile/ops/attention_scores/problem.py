"""The problem of a call, in host integers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Problem:
    """A call as an implementation sees it."""

    batch: int
    num_heads: int
    q_len: int
    k_len: int
    head_size: int
    dtype: torch.dtype
    needs_gradient: bool

"""The problem of a call, in host values."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Problem:
    """A call as an implementation sees it."""

    dtype: torch.dtype
    needs_gradient: bool

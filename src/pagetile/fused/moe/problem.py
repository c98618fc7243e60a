"""The problem of a call of the experts: what chooses its implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Problem(NamedTuple):
    """A call, as host numbers."""

    num_tokens: int
    top_k: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    is_contiguous: bool
    """Whether the rows of ``x``, ``experts`` and ``weights`` lie without gaps."""
    needs_gradient: bool


class Expert(NamedTuple):
    """The weights of all experts: ``down(activation(gate(x), up(x)))``."""

    gate: Tensor
    """``[num_experts, inner_size, hidden_size]``, by any strides."""
    up: Tensor
    """Like ``gate``, with its strides."""
    down: Tensor
    """``[num_experts, hidden_size, inner_size]``, by any strides."""
    gate_bias: Tensor | None = None
    """``[num_experts, inner_size]``, by any strides; all three biases or none."""
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    """``[num_experts, hidden_size]``, by any strides."""

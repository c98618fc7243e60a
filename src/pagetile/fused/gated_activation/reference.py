"""The gated activation by torch's own operations."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def apply(gate: Tensor, activation: str) -> Tensor:
    """The activation by its name."""
    if activation == "silu":
        return functional.silu(gate)
    if activation == "relu":
        return functional.relu(gate)
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def run(gate_up: Tensor, activation: str) -> Tensor:
    """``[..., size]``."""
    gate, up = gate_up.chunk(2, -1)
    return apply(gate, activation) * up

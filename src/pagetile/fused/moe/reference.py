"""The experts in eager torch: the definition of correct. It does not synchronise either."""

from __future__ import annotations

import torch
from torch import Tensor

from .problem import Expert


def run(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    expert: Expert,
    activation: str,
    alpha: float,
    limit: float,
) -> Tensor:
    """One token and one of its experts after another; float64 stays float64."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    top_k = experts.shape[1]
    chosen = experts.reshape(-1)
    out = torch.zeros(x.shape, dtype=dtype, device=x.device)
    for pair in range(chosen.numel()):
        at = chosen[pair : pair + 1]  # a tensor: a number would wait for the device
        row = x[pair // top_k].to(dtype)
        gate = _project(row, expert.gate, expert.gate_bias, at)
        up = _project(row, expert.up, expert.up_bias, at)
        inner = activate(gate, up, activation, alpha, limit).to(x.dtype).to(dtype)
        made = _project(inner, expert.down, expert.down_bias, at)
        out[pair // top_k] += made * weights[pair // top_k, pair % top_k].to(dtype)
    return out.to(x.dtype)


def activate(gate: Tensor, up: Tensor, activation: str, alpha: float, limit: float) -> Tensor:
    """The activation of a gated expert."""
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def _project(row: Tensor, weight: Tensor, bias: Tensor | None, at: Tensor) -> Tensor:
    made = weight.index_select(0, at)[0].to(row.dtype) @ row
    return made if bias is None else made + bias.index_select(0, at)[0].to(row.dtype)

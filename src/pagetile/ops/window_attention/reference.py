"""Reference of window attention and its gradient, in eager torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...tiles.state import AttentionOutput
from .problem import LEAST_SCORE, MAX_LOGIT_SCALE, Gradients, Operands, Problem


def forward(problem: Problem, x: Operands) -> AttentionOutput:
    """Return the output and log-sum-exp. Tests compare its autograd with ``backward``."""
    scores, _, _ = _scores(x)
    lse = torch.logsumexp(scores, dim=-1)
    out = _weights(scores, lse) @ x.v.to(scores.dtype)
    return AttentionOutput(out.to(x.q.dtype), lse)


def backward(
    problem: Problem, x: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Gradients:
    """Return the gradient of ``forward``, from the inputs, the results and their gradients.

    ::

        dV = Pᵀ dO      dS = P ∘ (dO Vᵀ - δ),  δ = Σ dO ∘ O - dlse
        dQ = scale · dS K      dK = scale · dSᵀ Q      dB = Σ over windows of dS
    """
    scores, q, k = _scores(x)
    weights = _weights(scores, lse)
    dout = dout.to(scores.dtype)
    delta = (dout * out).sum(dim=-1)
    if dlse is not None:
        delta = delta - dlse
    dscores = weights * (dout @ x.v.to(scores.dtype).mT - delta[..., None])
    dq, dk = dscores @ k * _scale(x), dscores.mT @ q * _scale(x)
    dlogit_scale = None
    if x.logit_scale is not None:
        clamped = x.logit_scale > MAX_LOGIT_SCALE
        dlogit_scale = (dq * q).sum(dim=(0, 2, 3)).masked_fill(clamped, 0.0).to(x.logit_scale.dtype)
        dq = saturate(_normalise_gradient(dq, x.q.to(dq.dtype), x.qk_norm_eps), x.q.dtype)
        dk = saturate(_normalise_gradient(dk, x.k.to(dk.dtype), x.qk_norm_eps), x.k.dtype)
    return Gradients(
        q=dq.to(x.q.dtype),
        k=dk.to(x.k.dtype),
        v=(weights.mT @ dout).to(x.v.dtype),
        bias_table=None if x.bias_table is None else _table_gradient(x, dscores.sum(dim=0)),
        bias=None if x.bias is None else _by_image(dscores, x.bias).sum(dim=0).to(x.bias.dtype),
        logit_scale=dlogit_scale,
    )


def _scores(x: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Scores ``[num_windows, num_heads, num_tokens, num_tokens]``, and q and k as multiplied."""
    dtype = torch.promote_types(x.q.dtype, torch.float32)
    q, k = x.q.to(dtype), x.k.to(dtype)
    if x.logit_scale is not None:
        q, k = (t / t.norm(dim=-1, keepdim=True).clamp(min=x.qk_norm_eps) for t in (q, k))
    scores = q @ k.mT * _scale(x)
    if x.bias_table is not None:
        scores = scores + x.bias_table.to(dtype)[table_index(x)].movedim(-1, 0)
    if x.bias is not None:
        scores = (_by_image(scores, x.bias) + x.bias.to(dtype)).flatten(0, 1)
    if x.regions is not None:
        is_masked = x.regions[:, None, :, None] != x.regions[:, None, None, :]
        added = torch.zeros_like(is_masked, dtype=dtype).masked_fill(is_masked, x.mask_value)
        scores = (_by_image(scores, x.regions) + added).flatten(0, 1)
    if x.mask is not None:
        added = x.mask[:, None]
        if x.mask.dtype == torch.bool:
            added = torch.zeros_like(added, dtype=dtype).masked_fill(~added, x.mask_value)
        scores = (_by_image(scores, x.mask) + added.to(dtype)).flatten(0, 1)
    return scores.masked_fill(scores < LEAST_SCORE, -torch.inf), q, k


def _scale(x: Operands) -> Tensor | float:
    """The factor of q·k: a number, or one for each head."""
    if x.logit_scale is None:
        return x.softmax_scale
    dtype = torch.promote_types(x.q.dtype, torch.float32)
    scale = x.logit_scale.to(dtype).clamp(max=MAX_LOGIT_SCALE).exp()
    return scale[:, None, None] * x.softmax_scale


def table_index(x: Operands) -> Tensor:
    """Rows of the table for each pair of tokens, ``[num_tokens, num_tokens]``."""
    assert x.bias_table is not None
    assert x.rel_offsets is not None
    offsets, centre = x.rel_offsets.long(), (x.bias_table.shape[0] - 1) // 2
    return offsets[:, None] - offsets[None, :] + centre


def _by_image(scores: Tensor, other: Tensor) -> Tensor:
    """View windows as ``[images, len(other), ...]``, to broadcast ``other`` over images."""
    return scores.view(-1, other.shape[0], *scores.shape[1:])


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """The softmax of the scores, and 0 in rows without a visible key.

    It is not exp(scores - lse): next to scores of -1e9, ``lse`` has lost the logarithm of the sum.
    """
    is_hidden = (lse == -torch.inf)[..., None]  # NaN without the first of these two fills
    return scores.masked_fill(is_hidden, 0.0).softmax(dim=-1).masked_fill(is_hidden, 0.0)


def _normalise_gradient(gradient: Tensor, rows: Tensor, eps: float) -> Tensor:
    """Turn the gradient of ``rows / max(|rows|, eps)`` into that of ``rows``."""
    norm = rows.norm(dim=-1, keepdim=True)
    unit = torch.where(norm >= eps, rows / norm.clamp(min=eps), 0.0)
    along = (gradient * unit).sum(dim=-1, keepdim=True)
    result: Tensor = (gradient - along * unit) / norm.clamp(min=eps)
    return result


def saturate(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a gradient of normalised rows to their type, clamped to the range of float16.

    A row of zeros (padding) has a gradient of up to 1 / eps, which is later multiplied by 0; inf
    would give NaN.
    """
    if dtype == torch.float16:
        gradient = gradient.clamp(-65504, 65504)
    return gradient.to(dtype)


def _table_gradient(x: Operands, dbias: Tensor) -> Tensor:
    """Sum ``[num_heads, num_tokens, num_tokens]`` over the pairs that share a row."""
    assert x.bias_table is not None
    sums = dbias.new_zeros(x.bias_table.shape)
    for rows, gradient in zip(table_index(x), dbias.unbind(1), strict=True):
        sums[rows] += (
            gradient.T
        )  # no row occurs twice for a token, so sums have one order on every device
    return sums.to(x.bias_table.dtype)

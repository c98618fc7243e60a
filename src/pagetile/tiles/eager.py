"""Attention of one sequence in eager torch, on which the operations' references are built.

::

    s[h, q, k] = cap(q · k · scale) + slope[h] · (k - position(q)),  -inf where k is not visible
    out = softmax(s) v,   lse = log Σ exp(s)
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    visible: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``out`` and ``lse`` of one sequence, whose last query stands at the last key.

    Args:
        q: ``[query_len, num_heads, head_size]``, in the type to compute in.
        k: ``[seq_len, num_kv_heads, head_size]``.
        v: ``[seq_len, num_kv_heads, v_head_size]``.
        softmax_scale: As for ``paged_attention``.
        causal: As for ``paged_attention``.
        sliding_window: As for ``paged_attention``.
        logits_soft_cap: As for ``paged_attention``.
        alibi_slopes: As for ``paged_attention``.
        sinks: As for ``paged_attention``.
        visible: bool ``[num_heads or 1, query_len, seq_len]``: False where a mask hides a key.

    Returns:
        ``[query_len, num_heads, v_head_size]`` and ``[query_len, num_heads]``, in that type.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
    if logits_soft_cap is not None:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    scores = mask_scores(scores, causal, sliding_window, alibi_slopes, visible)
    weights, lse = softmax(scores, sinks)
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T


def mask_scores(
    scores: Tensor,
    causal: bool,
    sliding_window: int | None,
    alibi_slopes: Tensor | None,
    visible: Tensor | None = None,
) -> Tensor:
    """Add the slopes to ``scores`` ``[num_heads, query_len, seq_len]``, -inf where not visible."""
    query_len, seq_len = scores.shape[1:]
    keys = torch.arange(seq_len, device=scores.device)
    positions = torch.arange(seq_len - query_len, seq_len, device=scores.device)
    distance = keys - positions[:, None]
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.to(scores.dtype)[:, None, None] * distance
    if causal:
        scores = scores.masked_fill(distance > 0, -torch.inf)
    if sliding_window is not None:
        scores = scores.masked_fill(distance <= -sliding_window, -torch.inf)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores


def softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the softmax of masked scores, and ``lse`` ``[num_heads, query_len]``.

    A row without a visible key gets 0 and -inf.
    """
    seq_len = scores.shape[-1]
    if sinks is not None:
        # A sink is one more column of the softmax, without a value.
        column = sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], dim=-1)
    if not scores.shape[-1]:
        return scores, scores.new_full(scores.shape[:2], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    pivot = lse.masked_fill(lse == -torch.inf, 0.0)  # no visible key: -inf - -inf is not a number
    return torch.exp(scores - pivot[..., None])[..., :seq_len], lse

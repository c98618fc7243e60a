"""Reference of attention and its gradients, in eager torch.

::

    P = softmax(S),  out = P V              dV = Pᵀ dout
    S = cap(scale · Q Kᵀ) + bias            dS = P ∘ (dout Vᵀ - Σ dout ∘ out + dlse) ∘ cap'
                                            dQ = scale · dS K,  dK = scale · dSᵀ Q
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...tiles.eager import attend, mask_scores, softmax
from ...tiles.state import AttentionOutput
from .problem import Lengths, Options, Problem, sequences


def run(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, options: Options
) -> AttentionOutput:
    """Compute one sequence after another, in float32, or float64 for float64 tensors."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:-1], problem.v_head_size)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    for rows, keys in sequences(lengths, problem.num_seqs):
        wide = q[rows].to(dtype), k[keys].to(dtype), v[keys].to(dtype)
        out[rows], lse[rows] = attend(
            *wide,
            softmax_scale=options.softmax_scale,
            causal=options.causal,
            sliding_window=options.sliding_window,
            logits_soft_cap=options.logits_soft_cap,
            alibi_slopes=options.alibi_slopes,
            sinks=options.sinks,
            visible=_visible(problem, rows, options),
        )
    return AttentionOutput(out, lse)


def run_backward(
    problem: Problem,
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lengths: Lengths,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``q``, ``k`` and ``v``; ``out`` and ``lse`` are recomputed."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    # Keys of no sequence, between or after those of others, have the gradient 0.
    d_q, d_k, d_v = (t.new_zeros(t.shape) for t in (q, k, v))
    for rows, keys in sequences(lengths, problem.num_seqs):
        wide = q[rows].to(dtype), k[keys].to(dtype), v[keys].to(dtype), d_out[rows].to(dtype)
        d_row = 0.0 if d_lse is None else d_lse[rows].to(dtype).T[..., None]
        visible = _visible(problem, rows, options)
        d_q[rows], d_k[keys], d_v[keys] = _differentiate(*wide, d_row, visible, options)
    return d_q, d_k, d_v


def _visible(problem: Problem, rows: int | slice, options: Options) -> Tensor | None:
    """Return one sequence's block mask, ``[num_heads or 1, query_len, seq_len]``."""
    if options.block_mask is None or isinstance(rows, slice):
        return None
    visible = options.block_mask.expand(problem.max_query_len, problem.max_seq_len)
    return visible[rows if len(visible) > 1 else 0]


def _differentiate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    d_lse: Tensor | float,
    visible: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence, shaped as for ``attend``; ``d_lse`` ``[num_heads, query_len, 1]``."""
    num_kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * options.softmax_scale
    slope: Tensor | float = 1.0
    if options.logits_soft_cap is not None:
        tanh = torch.tanh(scores / options.logits_soft_cap)
        scores, slope = options.logits_soft_cap * tanh, 1 - tanh**2
    scores = mask_scores(
        scores, options.causal, options.sliding_window, options.alibi_slopes, visible
    )
    weights, _ = softmax(scores, options.sinks)
    d_weights = torch.einsum("qhd,khd->hqk", d_out, v)
    mean = (weights * d_weights).sum(dim=-1, keepdim=True)
    d_scores = weights * (d_weights - mean + d_lse) * slope * options.softmax_scale
    d_q = torch.einsum("hqk,khd->qhd", d_scores, k)
    d_k = torch.einsum("hqk,qhd->khd", d_scores, q)
    d_v = torch.einsum("hqk,qhd->khd", weights, d_out)
    d_k, d_v = (d.view(len(d), num_kv_heads, group, d.shape[-1]).sum(dim=2) for d in (d_k, d_v))
    return d_q, d_k, d_v

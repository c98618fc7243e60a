"""The correctness gate of the attention cases: float64, and a tolerance that comes from data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from pagewise import paged_attention
from torch import Tensor

from .case import Check
from .peers import peers
from .workload import Dense, Inputs, Workload

__all__ = ["verify"]


@torch.inference_mode()
def verify(workload: Workload) -> list[Check]:
    """Compare ours and every peer with float64, on the workload with one key less a sequence.

    One less, so that the last block of each sequence has a slot that holds NaN. An error may be
    twice that of eager torch in the workload's own type, and one rounding of the result.
    """
    workload = replace(workload, seq_lens=tuple(max(1, n - 1) for n in workload.seq_lens))
    inputs = Inputs.of(workload)
    exact = _rows([_attend(d, torch.float64, workload) for d in inputs.dense])
    eager = _rows([_attend(d, workload.dtype, workload) for d in inputs.dense])
    band = torch.finfo(workload.dtype).eps * exact.abs().max().item()
    allowed = 2 * (eager - exact).abs().max().item() + band

    calls: dict[str, Callable[[], Tensor]] = {
        name: lambda peer=peer: _rows(peer()) for name, peer in peers(workload, inputs).items()
    }
    calls["pagewise"] = lambda: _ours(inputs)
    return [_check(f"{name}, {workload}", calls[name](), exact, allowed) for name in sorted(calls)]


def _check(what: str, result: Tensor, exact: Tensor, allowed: float) -> Check:
    error = (result - exact).abs().max().item()
    passed = math.isfinite(error) and error <= allowed
    return Check(what, passed, f"error {error:.1e}, allowed {allowed:.1e}")


def _ours(inputs: Inputs) -> Tensor:
    # Where nothing is written NaN stays.
    out = torch.full_like(inputs.q, torch.nan)
    return paged_attention(inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch, out=out).out


def _rows(results: list[Tensor]) -> Tensor:
    """Dense results as ours: ``[num_tokens, num_heads, head_size]``."""
    return torch.cat([result.transpose(1, 2).flatten(0, 1) for result in results])


def _attend(dense: Dense, dtype: torch.dtype, workload: Workload) -> Tensor:
    """Plain torch in one type throughout, a head at a time to bound the memory."""
    out = torch.empty(dense.q.shape, dtype=dtype)
    for seq in range(len(out)):
        for head in range(workload.num_heads):
            kv_head = head // workload.group
            q, k, v = (
                x[seq, h].to(dtype)
                for x, h in ((dense.q, head), (dense.k, kv_head), (dense.v, kv_head))
            )
            scores = q @ k.T * workload.head_size**-0.5
            if workload.prefill:
                hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
                scores.masked_fill_(hidden, -torch.inf)
            out[seq, head] = scores.softmax(-1) @ v
    return out

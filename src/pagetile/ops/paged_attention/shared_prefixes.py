"""Sequences that share their first blocks: the prefix is read once for all rows of a group.

::

    group of 3 sequences      ┌────────── prefix ──────────┐┌ own ┐
    pass 1: all rows  ×       ████████████│████████████████          (in splits, not causal)
    pass 2: each sequence ×                                  ▒▒▒▒▒   (its own keys)
    merge:  out = Σ exp(lse_i - lse) out_i

Both passes are calls of ``paged_attention`` on a batch derived on the device, so lengths stay data
and a captured call serves other lengths. A pass has positions of its own. That moves ALiBi's
biases of a row by a constant: its ``out`` stays, and its ``lse`` is corrected. Sinks belong to the
second pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from ...device import DeviceInfo
from ...tiles.state import AttentionOutput
from .batch import PagedBatch, SharedPrefixes
from .plan import GpuPlan, make_plan
from .problem import Arguments, Problem

__all__ = ["GPU_BYTES", "pays", "run"]

GPU_BYTES = 512 << 20
_CPU_BYTES = 1 << 20
"""Bytes of keys and values that sharing must save, to pay for the second pass, the merge and what
lays both out. A GPU also finds part of what is shared in its L2 cache: measured on an H200, 252 MiB
did not pay (49 and 55 µs) and 984 did (129 and 71)."""

_TILE_ROWS = 128
_MOST_SPLITS = 8
_SPLIT_KEYS = 1024


def pays(problem: Problem, shared: SharedPrefixes, device: DeviceInfo) -> bool:
    """Return whether sharing is expected to be faster, from upper bounds on the host."""
    sizes = problem.head_size + problem.v_head_size
    bytes_per_key = problem.num_kv_heads * sizes * problem.kv_dtype.itemsize
    saved = (problem.num_seqs - shared.num_groups) * _most_keys(problem, shared) * bytes_per_key
    return saved >= (GPU_BYTES if device.kind == "cuda" else _CPU_BYTES)


def _most_keys(problem: Problem, shared: SharedPrefixes) -> int:
    bound = shared.max_prefix_len
    return problem.max_seq_len if bound is None else min(bound, problem.max_seq_len)


def _most_tokens(problem: Problem, shared: SharedPrefixes) -> int:
    bound = shared.max_group_tokens
    return problem.num_tokens if bound is None else min(bound, problem.num_tokens)


def _choose_splits(problem: Problem, shared: SharedPrefixes, device: DeviceInfo) -> int:
    """Return how often a prefix is split, so that tiles of rows occupy all multiprocessors."""
    rows = _most_tokens(problem, shared) * problem.group
    if device.kind != "cuda" or rows <= _TILE_ROWS // 2:  # decode kernels split by themselves
        return 1
    prefixes = dataclasses.replace(
        problem,
        num_seqs=shared.num_groups,
        max_query_len=_most_tokens(problem, shared),
        max_seq_len=_most_keys(problem, shared),
    )
    plan = make_plan(prefixes, device)
    if isinstance(plan, GpuPlan) and plan.divides_keys:  # and so does Hopper's prefill
        return 1
    tiles = shared.num_groups * -(-rows // _TILE_ROWS) * problem.num_kv_heads
    most = min(_MOST_SPLITS, _most_keys(problem, shared) // _SPLIT_KEYS)
    return max(1, min(most, device.num_workers // max(1, tiles)))


def run(
    problem: Problem, attend: Callable[[Arguments], AttentionOutput], call: Arguments
) -> AttentionOutput:
    """Compute a call in two passes.

    Args:
        problem: Of the call.
        attend: Computes a call of a batch without shared prefixes.
        call: Without ``visible_blocks`` and ``sliding_window``.
    """
    batch, shared = call.batch, call.batch.shared_prefixes
    assert shared is not None
    splits = _choose_splits(problem, shared, DeviceInfo.of(call.q.device))
    prefixes, own, starts = _derive(problem, batch, shared, splits)
    q = call.q if splits == 1 else call.q.repeat(splits, 1, 1)
    first = attend(call._replace(q=q, batch=prefixes, causal=False, sinks=None, out=None))
    second = attend(call._replace(batch=own, out=None))
    outs = first.out.view(splits, *second.out.shape)
    lses = first.lse.view(splits, *second.lse.shape)
    if call.alibi_slopes is not None:
        moved = _find_moves(batch, prefixes, starts, splits, problem.num_tokens)
        lses = lses + moved[:, :, None] * call.alibi_slopes.float()
    out = torch.empty_like(second.out) if call.out is None else call.out
    return AttentionOutput(out, _merge(out, outs, lses, second))


def _derive(
    problem: Problem, batch: PagedBatch, shared: SharedPrefixes, splits: int
) -> tuple[PagedBatch, PagedBatch, Tensor]:
    """Return the batches of both passes, and the first key of each split of a prefix."""
    tables, seq_lens, starts, cu_seqlens_q = _lay_out(problem, batch, shared, splits)
    num_prefixes = splits * shared.num_groups
    most = -(-_most_keys(problem, shared) // problem.block_size)
    prefixes = PagedBatch(
        tables[:num_prefixes], seq_lens[:num_prefixes], cu_seqlens_q,
        _most_tokens(problem, shared), -(-most // splits) * problem.block_size,
    )  # fmt: skip
    own = PagedBatch(
        tables[num_prefixes:], seq_lens[num_prefixes:], batch.cu_seqlens_q,
        batch.max_query_len, batch.max_seq_len,
    )  # fmt: skip
    return prefixes, own, starts


def _lay_out(
    problem: Problem, batch: PagedBatch, shared: SharedPrefixes, splits: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tables, lengths, first keys and query starts as ``triton_prefixes.Layout`` does."""
    tables, groups, lens = batch.block_tables, shared.cu_group_seqs, shared.prefix_lens
    if tables.is_cuda:
        from .triton_prefixes import lay_out

        metadata = (batch.seq_lens, batch.cu_seqlens_q, groups, lens)
        return lay_out(
            tables, *(tensor.contiguous() for tensor in metadata),
            splits=splits, num_tokens=problem.num_tokens, block_size=problem.block_size,
        )  # fmt: skip
    num_groups, width, block_size = shared.num_groups, tables.shape[1], problem.block_size
    # Splits of a prefix are whole blocks: split-major, as the repeated queries are.
    blocks = (lens // block_size + splits - 1) // splits
    starts = torch.arange(splits, dtype=torch.int32)[:, None] * (blocks * block_size)
    prefix_lens = torch.minimum(lens - starts, blocks * block_size).clamp_min(0).view(-1)
    first_tokens = batch.cu_seqlens_q[groups.long()]
    offsets = torch.arange(splits, dtype=torch.int32) * problem.num_tokens
    cu_seqlens_q = (offsets[:, None] + first_tokens[:-1]).view(-1)
    cu_seqlens_q = torch.cat([cu_seqlens_q, offsets[-1:] + first_tokens[-1:]])
    seqs = torch.arange(problem.num_seqs, dtype=torch.int32)
    group = torch.searchsorted(groups[1:], seqs, right=True).clamp_max(max(0, num_groups - 1))
    firsts = groups[:-1].clamp_max(max(0, problem.num_seqs - 1))  # of an empty group: any
    sources = torch.cat([firsts.long().repeat(splits), seqs.long()])
    skipped = torch.cat([starts.view(-1), lens[group]]) // block_size
    at = torch.arange(width) + skipped[:, None]
    moved = tables[sources].gather(1, at.clamp_max(max(0, width - 1)))
    seq_lens = torch.cat([prefix_lens, batch.seq_lens - lens[group]])
    return moved, seq_lens, starts, cu_seqlens_q


def _find_moves(
    batch: PagedBatch, prefixes: PagedBatch, starts: Tensor, splits: int, num_tokens: int
) -> Tensor:
    """Return how far the first pass moved each row relative to keys, ``[splits, num_tokens]``."""

    def positions(ends: Tensor, lens: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        seq = torch.searchsorted(ends[1:], tokens, right=True)
        return lens[seq] + tokens - ends[1:][seq], seq

    tokens = torch.arange(splits * num_tokens, dtype=torch.int32, device=starts.device)
    there, split = positions(prefixes.cu_seqlens_q, prefixes.seq_lens, tokens)
    here, _ = positions(batch.cu_seqlens_q, batch.seq_lens, tokens[:num_tokens])
    moved = (there + starts.view(-1)[split]).view(splits, num_tokens) - here
    return moved.float()


def _merge(out: Tensor, outs: Tensor, lses: Tensor, second: AttentionOutput) -> Tensor:
    """Write the merged states to ``out``; return their log-sum-exp.

    ``outs`` ``[splits, num_tokens, num_heads, v_head_size]`` and ``lses`` are of the first pass.
    """
    if out.is_cuda:
        from .triton_merge import merge

        merged: Tensor = merge(out, outs, lses, second.out, second.lse)
        return merged
    all_lses = torch.cat([lses, second.lse[None]])
    lse = torch.logsumexp(all_lses, 0)
    pivot = lse.masked_fill(lse == -torch.inf, 0.0)  # -inf - -inf would be NaN
    dtype = torch.promote_types(out.dtype, torch.float32)
    weights = torch.exp(all_lses - pivot)[..., None].to(dtype)
    states = torch.cat([outs, second.out[None]])
    out.copy_((states * weights).sum(0))
    return lse

"""Sequences that share their first blocks: the prefix is read once for all rows of a group.

::

    group of 3 sequences      ┌────────── prefix ──────────┐┌ own ┐
    pass 1: all rows  ×       ████████████│████████████████          (in splits, not causal)
    pass 2: each sequence ×                                  ▒▒▒▒▒   (its own keys)
    merge:  out = Σ exp(lse_i - lse) out_i

The second pass is a call of ``paged_attention`` on a batch derived on the device, so a captured
call serves other lengths. So is the first pass on a CPU, and on Hopper for hundreds of rows, for
which the prefill kernel is faster. Otherwise, and where ``impl`` names the decode kernel,
``triton_prefixes`` computes it. In the first pass rows have other positions, which adds a constant
to a row's ALiBi biases: its ``out`` stays, and its ``lse`` is corrected. Sinks belong to the second
pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from ...device import DeviceInfo
from ...tiles.state import AttentionOutput
from .batch import PagedBatch, SharedPrefixes
from .plan import refuse_hopper_prefill
from .plan.prefixes import make_prefix_plan
from .problem import Arguments, Problem, form_of

GPU_BYTES = 256 << 20
_CPU_BYTES = 1 << 20
"""Fewest bytes of keys and values that sharing must save, to outweigh the second pass, the merge
and the layout. A GPU also finds part of a shared prefix in its L2 cache: on an H200, saving 127 MiB
beside 500 of other keys was slower (128 and 142 µs), and saving 469 faster (61 and 29)."""

_MOST_ROWS = 512
"""Up to this many rows (new tokens × group) Hopper's prefill kernel, whose splits have 1024 keys
and more, would leave too many multiprocessors idle."""


def saves_time(problem: Problem, shared: SharedPrefixes, device: DeviceInfo) -> bool:
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


def run(
    problem: Problem, attend: Callable[[Arguments], AttentionOutput], call: Arguments, impl: str
) -> AttentionOutput:
    """Compute a call in two passes.

    Args:
        problem: The call's problem.
        attend: Computes a call of a batch without shared prefixes.
        call: A call without ``visible_blocks`` and ``sliding_window``.
        impl: As for ``paged_attention``.
    """
    batch, shared = call.batch, call.batch.shared_prefixes
    assert shared is not None
    prefixes, own = shared.passes or lay_out(batch, problem.block_size)
    if _has_kernel(problem, shared, DeviceInfo.of(call.q.device), impl):
        outs, lses = _launch_kernel(problem, shared, call)
    else:
        prefixes = dataclasses.replace(prefixes, max_query_len=_most_tokens(problem, shared))
        first = attend(call._replace(batch=prefixes, causal=False, sinks=None, out=None))
        outs, lses = first.out[None], first.lse[None]
        if call.alibi_slopes is not None:
            moved = _find_moves(batch, prefixes, problem.num_tokens)
            lses = lses + moved[:, None] * call.alibi_slopes.float()
    second = attend(call._replace(batch=own, out=None))
    out = torch.empty_like(second.out) if call.out is None else call.out
    return AttentionOutput(out, _merge(out, outs, lses, second))


def _has_kernel(problem: Problem, shared: SharedPrefixes, device: DeviceInfo, impl: str) -> bool:
    """Return whether ``triton_prefixes`` computes the first pass."""
    if device.kind != "cuda":
        return False
    if impl == "hopper":  # hopper_decode takes up to 64 rows, and a group may have more
        return True
    tokens = _most_tokens(problem, shared)
    if device.capability != (9, 0) or tokens * problem.group <= _MOST_ROWS:
        return True
    return refuse_hopper_prefill(dataclasses.replace(problem, max_query_len=tokens)) is not None


def _launch_kernel(
    problem: Problem, shared: SharedPrefixes, call: Arguments
) -> tuple[Tensor, Tensor]:
    """Return a state of each split of the prefixes: outputs and log-sum-exps."""
    from .triton import prepare_prefixes

    rows = _most_tokens(problem, shared) * problem.group
    plan = make_prefix_plan(problem, DeviceInfo.of(call.q.device), rows)
    launch = prepare_prefixes(
        problem, form_of(call), plan, _most_keys(problem, shared),
        is_settled=shared.passes is not None,
    )  # fmt: skip
    return launch(call)


def lay_out(batch: PagedBatch, block_size: int) -> tuple[PagedBatch, PagedBatch]:
    """Return the batches of both passes: of the prefixes, and of each sequence's own keys.

    A model's layers can share the result (``SharedPrefixes.passes``); otherwise every call computes
    it.

    Args:
        batch: A batch with shared prefixes.
        block_size: Tokens of a block.
    """
    shared = batch.shared_prefixes
    assert shared is not None
    tables, seq_lens, cu_seqlens_q = _lay_out(batch, shared, block_size)
    most = batch.max_seq_len
    if shared.max_prefix_len is not None:
        most = min(most, shared.max_prefix_len)
    prefixes = PagedBatch(
        tables[: shared.num_groups], seq_lens[: shared.num_groups], cu_seqlens_q,
        batch.max_query_len, most,
    )  # fmt: skip
    own = dataclasses.replace(
        batch, block_tables=tables[shared.num_groups :], seq_lens=seq_lens[shared.num_groups :],
        shared_prefixes=None,
    )  # fmt: skip
    return prefixes, own


def _lay_out(
    batch: PagedBatch, shared: SharedPrefixes, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tables, lengths and query starts as ``triton_prefixes.PassTables`` does."""
    tables, groups, lens = batch.block_tables, shared.cu_group_seqs, shared.prefix_lens
    if tables.is_cuda:
        from .triton_prefixes import lay_out

        metadata = (batch.seq_lens, batch.cu_seqlens_q, groups, lens)
        return lay_out(tables, *(x.contiguous() for x in metadata), block_size=block_size)
    width, num_seqs = tables.shape[1], batch.num_seqs
    seqs = torch.arange(num_seqs, dtype=torch.int32, device=tables.device)
    group = torch.searchsorted(groups[1:], seqs, right=True)
    group = group.clamp_max(max(0, shared.num_groups - 1))
    firsts = groups[:-1].clamp_max(max(0, num_seqs - 1))  # for an empty group any is right
    sources = torch.cat([firsts.long(), seqs.long()])
    skipped = torch.cat([0 * lens, lens[group]]) // block_size
    at = torch.arange(width, device=tables.device) + skipped[:, None]
    moved = tables[sources].gather(1, at.clamp_max(max(0, width - 1)))
    seq_lens = torch.cat([lens, batch.seq_lens - lens[group]])
    return moved, seq_lens, batch.cu_seqlens_q[groups.long()]


def _find_moves(batch: PagedBatch, prefixes: PagedBatch, num_tokens: int) -> Tensor:
    """Return by how much the first pass shifts each row's position, ``[num_tokens]``."""
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=batch.seq_lens.device)

    def positions(passes: PagedBatch) -> Tensor:
        ends = passes.cu_seqlens_q[1:]
        seq = torch.searchsorted(ends, tokens, right=True)
        return passes.seq_lens[seq] + tokens - ends[seq]

    return (positions(prefixes) - positions(batch)).float()


def _merge(out: Tensor, outs: Tensor, lses: Tensor, second: AttentionOutput) -> Tensor:
    """Write the merged states to ``out``; return their log-sum-exp.

    ``outs`` ``[splits, num_tokens, num_heads, v_head_size]`` and ``lses`` are of the first pass;
    where ``lses`` is -inf, ``outs`` is not read.
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
    states = states.masked_fill((all_lses == -torch.inf)[..., None], 0.0)  # may hold anything
    out.copy_((states * weights).sum(0))
    return lse

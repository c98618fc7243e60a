"""Attention problems with their inputs: the same numbers in pages and, for the peers, dense."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from pagetile import PagedBatch
from pagetile.testing import PagedCase, PagedInputs, make_inputs


def describe(case: PagedCase) -> str:
    """A problem in words.

    Examples:
        >>> describe(PagedCase(query_lens=(1, 1), seq_lens=(30, 30)))
        'decode: 2 x 30, 4/2 heads of 64, blocks of 16, float32'
    """
    kind = "decode" if set(case.query_lens) == {1} else "prefill"
    lengths = "/".join(map(str, case.seq_lens))
    if len(set(case.seq_lens)) == 1:
        lengths = f"{len(case.seq_lens)} x {case.seq_lens[0]}"
    heads = f"{case.num_heads}/{case.num_kv_heads} heads of {case.head_size}"
    dtype = str(case.dtype).removeprefix("torch.")
    return f"{kind}: {lengths}, {heads}, blocks of {case.block_size}, {dtype}"


def shorten(case: PagedCase, longest: int) -> PagedCase:
    """The same problem with no sequence over ``longest``."""
    query_lens, seq_lens = (
        tuple(min(length, longest) for length in lengths)
        for lengths in (case.query_lens, case.seq_lens)
    )
    return dataclasses.replace(case, query_lens=query_lens, seq_lens=seq_lens)


def make_workload(case: PagedCase) -> PagedInputs:
    """Poisoned inputs of exactly this problem, without empty sequences or spare lengths."""
    inputs = make_inputs(case)
    batch = inputs.batch
    kept = batch.seq_lens > 0
    rows = torch.repeat_interleave(kept, batch.cu_seqlens_q.diff())
    starts = torch.tensor([0, *case.query_lens]).cumsum(0, dtype=torch.int32)
    exact = PagedBatch(
        batch.block_tables[kept],
        batch.seq_lens[kept],
        starts,
        max_query_len=max(case.query_lens),
        max_seq_len=max(case.seq_lens),
    )
    return inputs.replace(q=inputs.q[rows], out=inputs.out[rows], batch=exact)


@dataclass(frozen=True)
class Dense:
    """Sequences of one length in torch's form: ``[num_seqs, heads, length, head_size]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    block_tables: Tensor
    """int64 ``[num_seqs, blocks]``: the same sequences in the pages."""


def lay_out(inputs: PagedInputs) -> list[Dense]:
    """All sequences as one batch if their lengths are equal, otherwise one by one."""
    case = inputs.case
    together = len(set(case.seq_lens)) == 1
    starts = range(0, len(case.seq_lens), len(case.seq_lens) if together else 1)
    queries = inputs.q.split(list(case.query_lens))  # type: ignore[no-untyped-call]
    result = []
    for start in starts:
        seqs = slice(start, None if together else start + 1)
        num_blocks = -(-case.seq_lens[start] // case.block_size)
        tables = inputs.batch.block_tables[seqs, :num_blocks].long()
        k, v = (
            cache[tables].flatten(1, 2)[:, : case.seq_lens[start]].transpose(1, 2).contiguous()
            for cache in (inputs.k_cache, inputs.v_cache)
        )
        q = torch.stack(queries[seqs]).transpose(1, 2).contiguous()
        result.append(Dense(q, k, v, tables))
    return result

"""What one forward of a model works on."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from torch import Tensor

from ..ops.paged_attention import PagedBatch

__all__ = ["ForwardBatch"]


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """New tokens of several sequences, where they stand, and where their keys and values go."""

    token_ids: Tensor
    """int64 ``[num_tokens]``: all sequences' new tokens, one sequence after another."""
    positions: Tensor
    """int64 ``[num_tokens]``: each token's position in its own sequence."""
    batch: PagedBatch
    """Lengths and block tables of the sequences, in the order of ``token_ids``."""
    slot_mapping: Tensor
    """int64 ``[num_tokens]``: ``block * block_size + offset``; -1 writes nothing."""
    logits_rows: Tensor
    """int64 ``[n]``: rows of ``token_ids`` whose logits are wanted."""
    num_decodes: int = 0
    """How many of the first sequences have one new token each and are attended to apart."""

    @functools.cached_property
    def parts(self) -> tuple[tuple[slice, PagedBatch], ...]:
        """What is attended to by a call of its own: rows of the queries, and their sequences."""
        n, batch = self.num_decodes, self.batch
        if not 0 < n < batch.num_seqs:
            return ((slice(None), batch),)
        starts = batch.cu_seqlens_q
        decodes = replace(
            batch,
            block_tables=batch.block_tables[:n],
            seq_lens=batch.seq_lens[:n],
            cu_seqlens_q=starts[: n + 1],
            max_query_len=1,
        )
        others = replace(
            batch,
            block_tables=batch.block_tables[n:],
            seq_lens=batch.seq_lens[n:],
            cu_seqlens_q=starts[n:] - n,
        )
        return (slice(n), decodes), (slice(n, None), others)

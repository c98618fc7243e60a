"""The nouns of paged attention: a batch, the options of a call, and the problem they pose."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

__all__ = ["Options", "PagedBatch", "Problem"]


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """New tokens of several sequences, and where each sequence's keys lie in the cache.

    Three sequences with 3, 1 and 2 new tokens, 3, 6 and 4 keys in all, blocks of 4 slots::

        cu_seqlens_q = [0, 3, 4, 6]        q = a0 a1 a2 b5 c2 c3
        seq_lens     = [3, 6, 4]
        block_tables = [[7, ·], [2, 5], [0, ·]]     · is never read

    Example:
        >>> batch = PagedBatch(
        ...     block_tables=torch.tensor([[7, 0], [2, 5], [0, 0]], dtype=torch.int32),
        ...     seq_lens=torch.tensor([3, 6, 4], dtype=torch.int32),
        ...     cu_seqlens_q=torch.tensor([0, 3, 4, 6], dtype=torch.int32),
        ...     max_query_len=3,
        ...     max_seq_len=6,
        ... )
        >>> batch.num_seqs
        3
    """

    block_tables: torch.Tensor
    """int32 ``[num_seqs, max_blocks_per_seq]``; entries past a sequence's end are never read."""
    seq_lens: torch.Tensor
    """int32 ``[num_seqs]``: all keys of a sequence, the new tokens included."""
    cu_seqlens_q: torch.Tensor
    """int32 ``[num_seqs + 1]``: where each sequence's new tokens start in ``q``."""
    max_query_len: int
    """At least the most new tokens of a sequence. A host integer: planning never waits."""
    max_seq_len: int
    """At least the most keys of a sequence."""

    @staticmethod
    def decode(block_tables: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int) -> PagedBatch:
        """A batch with one new token a sequence."""
        starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device)
        return PagedBatch(block_tables, seq_lens, starts, 1, max_seq_len)

    @property
    def num_seqs(self) -> int:
        """How many sequences the batch has."""
        return self.seq_lens.shape[0]


@dataclass(frozen=True, eq=False)
class Options:
    """What may vary from call to call, with defaults filled in."""

    softmax_scale: float
    causal: bool = True
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    """As implementations get it: float32 ``[num_kv_heads]``, with stride 0 for one number, or
    ``[num_blocks, block_size, num_kv_heads]``."""
    v_scale: torch.Tensor | None = None


@dataclass(frozen=True)
class Problem:
    """A call as a plan sees it: host integers and element types only, so planning is pure."""

    num_seqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    block_size: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    scale_kind: str = "none"
    """What has a scale of its own: ``"head"``, ``"token"`` (a token's KV head), or ``"none"``."""
    is_aligned: bool = True
    """Whether every token's head begins at a multiple of 16 bytes in both caches."""
    is_plain: bool = True
    """Whether scores are neither capped nor biased, and there are no sinks."""

    def __hash__(self) -> int:
        """Computed once: a call looks several things up by its problem."""
        known = self.__dict__.get("_hash")
        if known is None:
            known = hash(tuple(getattr(self, field.name) for field in fields(self)))
            self.__dict__["_hash"] = known
        return int(known)

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

"""Data types of attention: starts of sequences, options of a call, and its problem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .block_mask import BlockMask


@dataclass(frozen=True, eq=False)
class Lengths:
    """Where each sequence of a ragged batch starts; all None when the batch is dense."""

    cu_seqlens_q: Tensor | None = None
    """int32 ``[num_seqs + 1]``: where each sequence's queries start in ``q``."""
    cu_seqlens_k: Tensor | None = None
    """int32 ``[num_seqs + 1]``: where each sequence's keys start in ``k`` and ``v``."""
    max_query_len: int | None = None
    """Upper bound of a sequence's queries; ``None``: all queries."""
    max_seq_len: int | None = None
    """Upper bound of a sequence's keys; ``None``: all keys."""


@dataclass(frozen=True, eq=False)
class Options:
    """The options of a call, with defaults filled in."""

    softmax_scale: float
    causal: bool = False
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    block_mask: BlockMask | None = None


@dataclass(frozen=True)
class Problem:
    """Sizes and element types of a call: all that a plan depends on."""

    num_seqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    dtype: torch.dtype
    is_ragged: bool
    has_alibi: bool = False
    logits_soft_cap: float | None = None
    block_q: int = 0
    """Queries of a block of the block mask; 0: there is none."""
    block_k: int = 0
    """Keys of a block of the block mask."""
    num_masks: int = 0
    """Sequences × heads that have a block mask of their own; all others share these."""

    @property
    def has_score_mods(self) -> bool:
        """Whether scores are capped or biased."""
        return self.logits_soft_cap is not None or self.has_alibi

    @property
    def is_block_sparse(self) -> bool:
        """Whether there is a block mask."""
        return self.block_q > 0

    @property
    def kv_dtype(self) -> torch.dtype:
        """Element type of keys and values, which is that of the queries."""
        return self.dtype

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


def in_a_row(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors as ragged ones, and their sequences' starts.

    A dense tensor whose sequences are not contiguous in memory is copied.
    """
    if lengths.cu_seqlens_q is not None and lengths.cu_seqlens_k is not None:
        return q, k, v, lengths.cu_seqlens_q.contiguous(), lengths.cu_seqlens_k.contiguous()
    starts = _starts(q)
    key_starts = starts if k.shape[1] == q.shape[1] else _starts(k)
    return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), starts, key_starts


def _starts(dense: Tensor) -> Tensor:
    """Return the starts of a dense tensor's sequences, in one launch."""
    batch, length = dense.shape[:2]
    if not length:
        return torch.zeros(batch + 1, dtype=torch.int32, device=dense.device)
    return torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=dense.device)


def strides_of(rows: Tensor) -> tuple[int, ...]:
    """Return strides of sequence, token and head; of a ragged tensor's sequences 0."""
    return (0,) * (4 - rows.dim()) + rows.stride()[:-1]


def sequences(lengths: Lengths, num_seqs: int) -> Iterator[tuple[int | slice, int | slice]]:
    """Yield indices of each sequence's queries, and of its keys and values; waits for a GPU."""
    if lengths.cu_seqlens_q is None or lengths.cu_seqlens_k is None:
        yield from ((seq, seq) for seq in range(num_seqs))
        return
    starts, key_starts = lengths.cu_seqlens_q.tolist(), lengths.cu_seqlens_k.tolist()
    for seq in range(num_seqs):
        yield slice(*starts[seq : seq + 2]), slice(*key_starts[seq : seq + 2])

"""The nouns of paged attention: a batch, the options of a call, and the problem they pose."""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch

from ...errors import DTypeError, ShapeError
from ...shapes import Form, check_tensors, form

__all__ = ["CallForm", "Options", "PagedBatch", "Problem"]

_MOST_CALLS = 64


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
        """A batch with one new token a sequence.

        Raises:
            DTypeError: An argument is no tensor.
        """
        check_tensors(block_tables=block_tables, seq_lens=seq_lens)
        starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device)
        return PagedBatch(block_tables, seq_lens, starts, 1, max_seq_len)

    @staticmethod
    def of(
        blocks: Sequence[Sequence[int]],
        seq_lens: Sequence[int],
        query_lens: Sequence[int] | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> PagedBatch:
        """A batch from lists on the host, as ``BlockTable`` keeps them.

        Args:
            blocks: Each sequence's blocks, in the order of its tokens: ``BlockTable.blocks``.
            seq_lens: All keys of each sequence, the new tokens included.
            query_lens: New tokens of each sequence; ``None``: one each.
            device: Where the tensors go.

        Tables are filled up with -1, which no call takes for a block: where a table is too short
        for its sequence it is named, on a GPU under ``PAGETILE_DEBUG=1``.

        Raises:
            ShapeError: The lists differ in length, or a sequence has more new tokens than keys.
            DTypeError: They are not of whole numbers of 32 bits.

        Example:
            >>> batch = PagedBatch.of([[7], [2, 5], [0]], [3, 6, 4], [3, 1, 2])
            >>> batch.block_tables.tolist(), batch.cu_seqlens_q.tolist(), batch.max_seq_len
            ([[7, -1], [2, 5], [0, -1]], [0, 3, 4, 6], 6)
        """
        lengths = _integers("seq_lens", seq_lens)
        counts = (
            array("i", [1]) * len(lengths)
            if query_lens is None
            else _integers("query_lens", query_lens)
        )
        if not isinstance(blocks, Iterable):
            raise DTypeError(f"blocks is {type(blocks).__name__}, expected a list of lists")
        rows = [_integers(f"blocks[{seq}]", ids) for seq, ids in enumerate(blocks)]
        if not len(rows) == len(lengths) == len(counts):
            raise ShapeError(
                f"blocks are of {len(rows)} sequences, seq_lens of {len(lengths)} and "
                f"query_lens of {len(counts)}: expected as many of each"
            )
        for seq, (seq_len, count) in enumerate(zip(lengths, counts, strict=True)):
            if not 0 <= count <= seq_len:
                raise ShapeError(
                    f"sequence {seq} has {count} new tokens and {seq_len} keys: seq_lens counts "
                    "all keys, the new tokens' own included"
                )
        tables = np.full((len(rows), max(map(len, rows), default=0)), -1, np.int32)
        for table, row in zip(tables, rows, strict=True):
            table[: len(row)] = row
        starts = np.array([0, *itertools.accumulate(counts)], np.int32)
        return PagedBatch(
            torch.from_numpy(tables).to(device),
            torch.from_numpy(np.array(lengths, np.int32)).to(device),
            torch.from_numpy(starts).to(device),
            max_query_len=max(counts, default=0),
            max_seq_len=max(lengths, default=0),
        )

    @functools.cached_property
    def forms(self) -> tuple[Any, Any, Any]:
        """Of its tensors (``shapes.form``), asked for once: an engine's layers share a batch."""
        return form(self.block_tables), form(self.seq_lens), form(self.cu_seqlens_q)

    @functools.cached_property
    def calls(self) -> dict[Any, Any]:
        """What was settled for calls with it, by what they had beside tensors of any form."""
        return {}

    def remember(self, key: Any, call: Any) -> None:
        """Settle it for the next call with this key."""
        if len(self.calls) >= _MOST_CALLS:  # of somebody who tries one scale after another
            self.calls.clear()
        self.calls[key] = call

    def __getstate__(self) -> dict[str, Any]:
        """Tensors and bounds: what was found out about them is asked anew of a copy."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def num_seqs(self) -> int:
        """How many sequences the batch has."""
        return self.seq_lens.shape[0]


def _integers(name: str, numbers: Any) -> array[int]:
    try:
        if isinstance(numbers, (bytes, bytearray)):  # which an array takes for its own memory
            raise TypeError("bytes are no numbers")
        return array("i", numbers)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise DTypeError(
            f"{name} is {type(numbers).__name__}, expected a list of whole numbers of 32 bits "
            f"({error})"
        ) from None


class Options(NamedTuple):
    """What may vary from call to call, with defaults filled in: numbers, then tensors."""

    softmax_scale: float
    causal: bool = True
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


class CallForm(NamedTuple):
    """All of a call but the tensors' elements; whoever has checked one call of a form has all."""

    q: Form
    k_cache: Form
    v_cache: Form
    alibi_slopes: Form | None
    sinks: Form | None
    k_scale: Form | None
    v_scale: Form | None
    out: Form | None
    block_tables: Form
    seq_lens: Form
    cu_seqlens_q: Form
    max_query_len: int
    max_seq_len: int
    softmax_scale: float
    causal: bool
    sliding_window: int | None
    logits_soft_cap: float | None
    has_aligned_caches: bool
    """Whether both begin at multiples of 16 bytes."""
    is_aligned: bool
    """Whether q and out do, too."""


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
    logits_soft_cap: float | None = None

    def __hash__(self) -> int:
        """Computed once: a call looks several things up by its problem."""
        known = self.__dict__.get("_hash")
        if known is None:
            known = hash(tuple(getattr(self, field.name) for field in fields(self)))
            self.__dict__["_hash"] = known
        return int(known)

    @property
    def out_sizes(self) -> tuple[int, int, int]:
        """Of the result."""
        return self.num_tokens, self.num_heads, self.v_head_size

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rows(self) -> int:
        """Queries of a sequence that share a KV head, at most: new tokens × group."""
        return self.max_query_len * self.group

    @property
    def width(self) -> int:
        """The wider of a key and a value."""
        return max(self.head_size, self.v_head_size)

"""A batch of paged attention: new tokens of several sequences, and where their keys lie."""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from ...errors import DTypeError, ShapeError
from ...shapes import Form, check_tensors, form

_MAX_CACHED_CALLS = 64


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """Groups of adjacent sequences that share their first blocks.

    Four sequences, of which the first three share two blocks of 16 tokens:

        cu_group_seqs = [0, 3, 4]        prefix_lens = [32, 0]
        block_tables  = [[7, 2, 5], [7, 2, 8], [7, 2, 0], [4, ·, ·]]

    ``impl`` is for each sequence's own keys. On GPUs the prefixes have another kernel, or, with
    many rows, the prefill kernel.

    Examples:
        >>> from dataclasses import replace
        >>> from pagetile import paged_attention
        >>> alone = PagedBatch.of([[7, 2, 5], [7, 2, 8], [7, 2, 0], [4]], [40, 33, 41, 9])
        >>> groups = torch.tensor([0, 3, 4], dtype=torch.int32)
        >>> prefixes = SharedPrefixes(groups, torch.tensor([32, 0], dtype=torch.int32))
        >>> together = replace(alone, shared_prefixes=prefixes)
        >>> q, (k_cache, v_cache) = torch.randn(4, 8, 64), torch.randn(2, 9, 16, 2, 64)
        >>> outs = [paged_attention(q, k_cache, v_cache, each).out for each in (alone, together)]
        >>> torch.allclose(*outs, atol=1e-5)
        True
    """

    cu_group_seqs: torch.Tensor
    """int32 ``[num_groups + 1]``: where each group's sequences start; from 0 to ``num_seqs``. A
    group may be empty, so that one captured call serves other numbers of groups."""
    prefix_lens: torch.Tensor
    """int32 ``[num_groups]``: tokens that a group shares, whole blocks without new tokens; 0 for
    an empty group."""
    max_group_tokens: int | None = None
    """Upper bound of a group's new tokens, a host integer; ``None``: all of the batch."""
    max_prefix_len: int | None = None
    """Upper bound of ``prefix_lens``, a host integer; ``None``: ``max_seq_len``. It decides whether
    sharing is used."""
    passes: tuple[PagedBatch, PagedBatch] | None = None
    """The result of ``shared_prefixes.lay_out`` for this batch, shared by a model's layers;
    ``None``: every call computes it. Lengths, tables and groups must not change in between, also
    not by the kernel before a call, which may still run when they are read."""

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return self.prefix_lens.shape[0]


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """New tokens of several sequences, and where each sequence's keys lie in the cache.

    Three sequences with 3, 1 and 2 new tokens, 3, 6 and 4 keys in all, blocks of 4 slots:

        cu_seqlens_q = [0, 3, 4, 6]        q = a0 a1 a2 b5 c2 c3
        seq_lens     = [3, 6, 4]
        block_tables = [[7, ·], [2, 5], [0, ·]]     · is never read

    Examples:
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
    """Upper bound of a sequence's new tokens, a host integer, so that planning never waits."""
    max_seq_len: int
    """Upper bound of a sequence's keys, a host integer."""
    shared_prefixes: SharedPrefixes | None = None
    """Prefixes to read once for all sequences of a group."""
    allows_early_reads: bool = False
    """Whether a call may read tables, lengths and old keys while the previous kernels still run.
    These may then write only queries and the new tokens' keys, values and scales. Hopper's decode
    uses it. Decision 31 says when that is safe."""

    @staticmethod
    def decode(block_tables: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int) -> PagedBatch:
        """A batch with one new token a sequence.

        Raises:
            DTypeError: An argument is not a tensor.
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
            device: Device of the tensors.

        Tables are padded with -1, so a table that is too short for its sequence raises an error in
        a call (on a GPU under ``PAGETILE_DEBUG=1``).

        Raises:
            ShapeError: The lists differ in length, a length is negative, or a sequence has more new
                tokens than keys.
            DTypeError: They are not lists of 32-bit integers.

        Examples:
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
            raise DTypeError(
                f"blocks is {type(blocks).__name__}, expected a list of block tables, one for each "
                "sequence: [table.blocks for table in tables]"
            )
        rows = [
            _integers(f"blocks[{seq}]", ids, ": pass table.blocks for each sequence")
            for seq, ids in enumerate(blocks)
        ]
        if not len(rows) == len(lengths) == len(counts):
            raise ShapeError(
                f"blocks are of {len(rows)} sequences, seq_lens of {len(lengths)} and "
                f"query_lens of {len(counts)}: expected as many of each"
            )
        for seq, (seq_len, count) in enumerate(zip(lengths, counts, strict=True)):
            if seq_len < 0 or count < 0:
                name, value = ("seq_lens", seq_len) if seq_len < 0 else ("query_lens", count)
                raise ShapeError(f"{name}[{seq}] is {value}, expected 0 or more tokens")
            if count > seq_len:
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
    def forms(self) -> tuple[Form, Form, Form]:
        """Forms of the tensors (``shapes.Form``); the layers of a model share a batch."""
        tensors = self.block_tables, self.seq_lens, self.cu_seqlens_q
        block_tables, seq_lens, cu_seqlens_q = (Form._make(form(tensor)) for tensor in tensors)
        return block_tables, seq_lens, cu_seqlens_q

    @functools.cached_property
    def shared_form(self) -> tuple[Form, Form, int | None, int | None] | None:
        """Form of the shared prefixes, if there are any."""
        shared = self.shared_prefixes
        if shared is None:
            return None
        groups, lens = (Form._make(form(x)) for x in (shared.cu_group_seqs, shared.prefix_lens))
        return groups, lens, shared.max_group_tokens, shared.max_prefix_len

    @functools.cached_property
    def calls(self) -> dict[Any, Any]:
        """Cache of dispatched calls with this batch, by everything but ``q`` and the caches."""
        return {}

    def remember(self, key: Any, call: Any) -> None:
        """Use ``call`` for the next call with this key."""
        if len(self.calls) >= _MAX_CACHED_CALLS:  # for example, a new softmax_scale at every call
            self.calls.clear()
        self.calls[key] = call

    def __getstate__(self) -> dict[str, Any]:
        """Copy tensors and bounds only, without the cached calls."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def num_seqs(self) -> int:
        """Number of sequences in the batch."""
        return self.seq_lens.shape[0]


def _integers(name: str, numbers: Any, hint: str = "") -> array[int]:
    try:
        if isinstance(numbers, (bytes, bytearray)):  # an array would take them as raw memory
            raise TypeError("bytes are not numbers")
        return array("i", numbers)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        given = repr(numbers) if isinstance(numbers, (list, tuple, str, int, float)) else ""
        if not given or len(given) > 60:
            given = f"of type {type(numbers).__name__}"
        raise DTypeError(
            f"{name} is {given}, expected a list of 32-bit integers ({error}){hint}"
        ) from None

"""The Triton kernel that lays out a decode step, and the static memory of such steps.

::

    begin   one program a sequence   row ─► last token, position, slot, length, block table

What the step's rows draw from its logits is in ``triton_draw.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..models.forward_batch import ForwardBatch
from ..ops.paged_attention import PagedBatch, SharedPrefixes
from ..ops.paged_attention.shared_prefixes import lay_out
from ..tiles.triton.early import publish
from ..tiles.triton.launch import INTERPRETED
from .prefix_groups import MAX_GROUPS
from .triton_draw import draw

if TYPE_CHECKING:
    from .sampler import Sampler


@triton.jit
def begin_kernel(
    # outputs
    token_ids,  # int64 [size]
    positions,  # int64 [size]
    slots,  # int64 [size]
    seq_lens,  # int32 [size]
    batch_tables,  # int32 [size, width]
    # rows
    tables,  # int32 [num_rows, width]: the last block is written
    last_tokens,  # int64 [num_rows]
    lengths,  # int32 [num_rows]
    # inputs
    inbox,  # int32 [2 * size]: rows, then each one's last block
    # scalars
    size,
    width,
    BLOCK_SIZE: tl.constexpr,
    TILE_W: tl.constexpr,
    PUBLISH: tl.constexpr,
):
    """See the module docstring. Grid: ``size``; a row of -1 is padding.

    Attention may read lengths and tables before the kernel that precedes it on the stream has
    ended (``SharedPrefixes.passes``, ``PagedBatch.allows_early_reads``), hence ``publish``.
    """
    i = tl.program_id(0)
    row = tl.load(inbox + i).to(tl.int64)
    if row < 0:
        tl.store(token_ids + i, 0)
        tl.store(positions + i, 0)
        tl.store(slots + i, -1)
        tl.store(seq_lens + i, 0)
        if PUBLISH:
            publish()
        return
    length = tl.load(lengths + row)
    block = tl.load(inbox + size + i)
    position = length - 1
    last = position // BLOCK_SIZE
    tl.store(token_ids + i, tl.load(last_tokens + row))
    tl.store(positions + i, position.to(tl.int64))
    tl.store(slots + i, block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE)
    tl.store(seq_lens + i, length)
    tl.store(tables + row * width + last, block)
    for start in range(0, last + 1, TILE_W):
        at = start + tl.arange(0, TILE_W)
        blocks = tl.load(tables + row * width + at, mask=at < last, other=0)
        blocks = tl.where(at == last, block, blocks)
        tl.store(batch_tables + i.to(tl.int64) * width + at, blocks, mask=at <= last)
    if PUBLISH:
        publish()


class DecodeBuffers:
    """The static memory of decode steps, which graphs read and write.

    Attributes:
        inbox: int32 ``[2 * num_rows + 2 * MAX_GROUPS + 1]``: a step's rows and last blocks, and
            what its groups share, as the host sends them.
    """

    def __init__(self, tables: Tensor, sampler: Sampler, block_size: int) -> None:
        num_rows, self._width = tables.shape
        self._rows_tables, self._sampler, self._block_size = tables, sampler, block_size
        numbers = torch.arange(num_rows + 1, device=tables.device)
        shape = (2 * num_rows + 2 * MAX_GROUPS + 1,)
        self.inbox = torch.full(shape, -1, dtype=torch.int32, device=tables.device)
        self._token_ids, self._positions, self._slots = (numbers[1:] * 0 for _ in range(3))
        self._starts, self._numbers = numbers.int(), numbers[:num_rows].clone()
        self._seq_lens, self._tables = torch.zeros_like(self.inbox[:num_rows]), tables.clone()
        self._logits: Tensor | None = None

    def clear(self, size: int) -> None:
        """Hold ``size`` rows of no sequence."""
        self.inbox.fill_(-1)
        shared = self._shared_prefixes(size)
        shared.cu_group_seqs.fill_(size)
        shared.cu_group_seqs[:1].zero_()
        shared.prefix_lens.zero_()

    def _shared_prefixes(self, size: int) -> SharedPrefixes:
        lens = 2 * size + MAX_GROUPS + 1
        return SharedPrefixes(self.inbox[2 * size : lens], self.inbox[lens : lens + MAX_GROUPS])

    def __call__(self, size: int, max_seq_len: int, *, shares: bool = False) -> ForwardBatch:
        """Lay out the decode step of the rows in the inbox.

        Args:
            size: How many.
            max_seq_len: The most tokens of one.
            shares: Whether prefixes in the inbox are read once for all sequences of a group.
        """
        outputs = self._token_ids, self._positions, self._slots, self._seq_lens, self._tables
        begin_kernel[(size,)](
            *outputs, self._rows_tables, self._sampler.last_tokens, self._sampler.lengths,
            self.inbox, size, self._width, BLOCK_SIZE=self._block_size, TILE_W=128,
            PUBLISH=not INTERPRETED, num_warps=1,
        )  # fmt: skip
        batch = PagedBatch(
            self._tables[:size],
            self._seq_lens[:size],
            self._starts[: size + 1],
            1,
            max_seq_len,
            allows_early_reads=not shares,
        )
        if shares:
            shared = self._shared_prefixes(size)
            passes = lay_out(replace(batch, shared_prefixes=shared), self._block_size)
            batch = replace(batch, shared_prefixes=replace(shared, passes=passes))
        return ForwardBatch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            batch=batch,
            slot_mapping=self._slots[:size],
            logits_rows=self._numbers[:size],
        )

    def rows(self, size: int) -> Tensor:
        """The rows of the step in the inbox, int32 ``[size]``."""
        return self.inbox[:size]

    def draw(self, logits: Tensor, rows: Tensor, *, leaves_out: bool = False) -> Tensor:
        """See ``triton_draw.draw``."""
        return draw(logits, rows, self._sampler, leaves_out=leaves_out)

    def keep(self, logits: Tensor) -> Tensor:
        """A copy of logits where the next graph does not overwrite them."""
        if self._logits is None:
            shape = (len(self._seq_lens), logits.shape[1])
            self._logits = torch.empty(shape, dtype=logits.dtype, device=logits.device)
        kept: Tensor = self._logits[: len(logits)]
        return kept.copy_(logits)

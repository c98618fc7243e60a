"""The batches of both passes over shared prefixes, laid out on a GPU by one launch.

A program writes one row: a split of a group's prefix, or a sequence's own keys::

    prefixes   row = split * num_groups + group     blocks of the prefix that the split reads
    own        row = sequence                       blocks after the prefix
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...tiles.triton.launch import Launcher

__all__ = ["Layout", "lay_out"]

_TILE = 256


class Layout(NamedTuple):
    """Lengths and block tables of both passes; int32."""

    tables: Tensor
    """``[splits * num_groups + num_seqs, width]``: of the prefixes' splits, then of the rest."""
    seq_lens: Tensor
    """``[splits * num_groups + num_seqs]``"""
    starts: Tensor
    """``[splits, num_groups]``: the first key of each split of a prefix."""
    cu_seqlens_q: Tensor
    """``[splits * num_groups + 1]``: of the prefixes' splits."""


@triton.jit
def _lay_out_kernel(
    # outputs: see Layout
    tables, seq_lens, starts, prefix_starts_q,
    # inputs
    cu_group_seqs, prefix_lens,  # int32 [num_groups + 1], [num_groups]
    batch_tables, batch_lens, cu_seqlens_q,
    # scalars
    num_groups, splits, num_tokens, block_size, width, table_stride,
    GROUPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """See the module."""
    row = tl.program_id(0)
    num_prefixes = splits * num_groups
    if row < num_prefixes:
        split, group = row // num_groups, row % num_groups
        seq = tl.load(cu_group_seqs + group)
        length = tl.load(prefix_lens + group)
        blocks = tl.cdiv(length // block_size, splits)
        start = split * blocks * block_size
        num_keys = tl.maximum(tl.minimum(length - start, blocks * block_size), 0)
        tl.store(starts + row, start)
        tl.store(prefix_starts_q + row, split * num_tokens + tl.load(cu_seqlens_q + seq))
        if row == num_prefixes - 1:
            last = tl.load(cu_group_seqs + num_groups)
            end = split * num_tokens + tl.load(cu_seqlens_q + last)
            tl.store(prefix_starts_q + num_prefixes, end)
    else:
        seq = row - num_prefixes
        number = tl.arange(0, GROUPS)
        ends = tl.load(cu_group_seqs + 1 + number, mask=number < num_groups, other=2147483647)
        group = tl.minimum(tl.sum((ends <= seq).to(tl.int32), 0), num_groups - 1)
        start = tl.load(prefix_lens + group)
        num_keys = tl.load(batch_lens + seq) - start
    tl.store(seq_lens + row, num_keys)
    first, num_blocks = start // block_size, tl.cdiv(num_keys, block_size)
    source = batch_tables + seq.to(tl.int64) * table_stride
    for column in range(0, num_blocks, TILE):
        at = column + tl.arange(0, TILE)
        mask = (at < num_blocks) & (first + at < width)
        blocks = tl.load(source + first + at, mask=mask)
        tl.store(tables + row.to(tl.int64) * width + at, blocks, mask=mask)


def lay_out(
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    cu_group_seqs: Tensor,
    prefix_lens: Tensor,
    *,
    splits: int,
    num_tokens: int,
    block_size: int,
) -> Layout:
    """Lay out both passes of a batch whose groups share prefixes.

    Args:
        block_tables: int32 ``[num_seqs, width]``, as the batch's other tensors.
        seq_lens: int32 ``[num_seqs]``
        cu_seqlens_q: int32 ``[num_seqs + 1]``
        cu_group_seqs: int32 ``[num_groups + 1]``
        prefix_lens: int32 ``[num_groups]``
        splits: Parts of a prefix, each with queries of its own.
        num_tokens: Queries of the batch.
        block_size: Tokens of a block.
    """
    (num_seqs, width), num_groups = block_tables.shape, len(prefix_lens)
    num_prefixes = splits * num_groups
    rows = num_prefixes + num_seqs
    new = functools.partial(torch.empty, dtype=torch.int32, device=block_tables.device)
    layout = Layout(
        new(rows, width), new(rows), new(splits, num_groups), new(num_prefixes + 1)
    )  # entries past a sequence's end are never read
    _make_launcher(triton.next_power_of_2(num_groups))(
        (rows, 1, 1), *layout, cu_group_seqs, prefix_lens, block_tables, seq_lens, cu_seqlens_q,
        num_groups, splits, num_tokens, block_size, width, block_tables.stride(0),
    )  # fmt: skip
    return layout


@functools.lru_cache(maxsize=64)
def _make_launcher(groups: int) -> Launcher:
    names = (
        "tables seq_lens starts prefix_starts_q cu_group_seqs prefix_lens batch_tables batch_lens "
        "cu_seqlens_q"
    )
    numbers = "num_groups splits num_tokens block_size width table_stride"
    types = {**dict.fromkeys(names.split(), "*i32"), **dict.fromkeys(numbers.split(), "i32")}
    return Launcher(_lay_out_kernel, types, {"GROUPS": groups, "TILE": _TILE}, num_warps=1)

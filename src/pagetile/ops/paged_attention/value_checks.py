"""Checks of the values in a batch's tensors, on the host.

With a wrong length or block id a kernel would read or write out of bounds. So every integer is
compared with the tensors that it indexes, before anything is written: 16384 table entries take
about 2 microseconds on a CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ...errors import ShapeError, plural
from .batch import PagedBatch
from .problem import Problem

try:
    from ...tiles.cpu.compile import entry
except ImportError:  # without Numba the reference runs, and this as Python

    def entry() -> Callable[[Callable[..., Any]], Any]:
        """Leave a function as it is."""
        return lambda function: function


_Integers = npt.NDArray[np.int32]

_FINE = -1
_MESSAGES = (
    "cu_seqlens_q[0] is {start}, expected 0",
    "cu_seqlens_q[{next}] is {end} but cu_seqlens_q[{seq}] is {start}: no sequence ends before it "
    "starts",
    "cu_seqlens_q[{next}] is {end} but q has num_tokens={num_tokens}: give q one row for "
    "each new token of the batch (PagedBatch.decode has one a sequence)",
    "max_query_len is {max_query_len} but sequence {seq} has query_len={query_len}: "
    "cu_seqlens_q[{seq}] is {start}, cu_seqlens_q[{next}] is {end}. Give the largest query_len, or "
    "more",
    "seq_lens[{seq}] is {seq_len}, expected 0 or more",
    "max_seq_len is {max_seq_len} but seq_lens[{seq}] is {seq_len}: give the largest of "
    "seq_lens, or more",
    "seq_lens[{seq}] is {seq_len}, {used} blocks of block_size={block_size}, but block_tables has "
    "max_blocks_per_seq={max_blocks}: give all blocks of the sequence",
    "block_tables[{seq}, {i}] is {block}, expected {known}",
)
_START, _ORDER, _END, _QUERY_LEN, _NEGATIVE, _SEQ_LEN, _TABLE, _BLOCK = range(len(_MESSAGES))


@entry()
def _find_fault(
    cu_seqlens_q: _Integers,
    seq_lens: _Integers,
    block_tables: _Integers,
    table_stride: int,
    max_blocks: int,
    block_size: int,
    num_blocks: int,
    num_tokens: int,
    max_query_len: int,
    max_seq_len: int,
) -> tuple[int, int, int]:
    """Return the first wrong value: number of the message, sequence, index in the table."""
    if cu_seqlens_q[0] != 0:
        return _START, 0, 0
    for seq in range(len(seq_lens)):
        if cu_seqlens_q[seq + 1] < cu_seqlens_q[seq]:
            return _ORDER, seq, 0
        if cu_seqlens_q[seq + 1] - cu_seqlens_q[seq] > max_query_len:
            return _QUERY_LEN, seq, 0
        if seq_lens[seq] < 0:
            return _NEGATIVE, seq, 0
        if seq_lens[seq] > max_seq_len:
            return _SEQ_LEN, seq, 0
        used = (seq_lens[seq] + block_size - 1) // block_size
        if used > max_blocks:
            return _TABLE, seq, 0
        row = block_tables[seq * table_stride : seq * table_stride + used]
        highest = np.uint32(0)  # as unsigned, a negative id is a large one
        for i in range(used):
            highest = max(highest, np.uint32(row[i]))
        if used > 0 and highest >= num_blocks:
            for i in range(used):
                if not 0 <= row[i] < num_blocks:
                    return _BLOCK, seq, i
    if cu_seqlens_q[len(seq_lens)] != num_tokens:
        return _END, max(0, len(seq_lens) - 1), 0
    return _FINE, 0, 0


def check_visible_blocks(visible_blocks: Tensor, seq_lens: Tensor, block_size: int) -> None:
    """Raise ShapeError for a list that is not ascending, or names a block past its sequence.

    Args:
        visible_blocks: As for ``paged_attention``, on the host.
        seq_lens: The batch's ``seq_lens``, on the host.
        block_size: Slots of a block.
    """
    counts = -(-seq_lens // block_size)
    is_end = visible_blocks == -1
    is_out = ~is_end & ((visible_blocks < 0) | (visible_blocks >= counts[:, None, None]))
    follows = visible_blocks[..., 1:] > visible_blocks[..., :-1]
    is_out_of_order = ~is_end[..., 1:] & (is_end[..., :-1] | ~follows)
    for wrong in (is_out, is_out_of_order):
        if not wrong.any():
            continue
        seq, head, i = (int(n) for n in wrong.nonzero()[0])
        if wrong is is_out:
            raise ShapeError(
                f"visible_blocks[{seq}, {head}, {i}] is {int(visible_blocks[seq, head, i])}, "
                f"expected 0 to {int(counts[seq]) - 1}, or -1 after the last: sequence {seq} has "
                f"{plural(int(seq_lens[seq]), 'key')} in blocks of {block_size}"
            )
        one, other = visible_blocks[seq, head, i : i + 2].tolist()
        raise ShapeError(
            f"visible_blocks[{seq}, {head}, {i + 1}] is {other} after {one}, expected block "
            "numbers in ascending order, each once, and -1 after the last"
        )


def check_shared_prefixes(batch: PagedBatch, block_size: int) -> None:
    """Raise ShapeError unless groups cover the batch and prefixes are whole, old blocks.

    Args:
        batch: A batch with shared prefixes, on the host.
        block_size: Slots of a block.
    """
    shared = batch.shared_prefixes
    assert shared is not None
    groups, lens = shared.cu_group_seqs.tolist(), shared.prefix_lens.tolist()
    sizes = [end - start for start, end in itertools.pairwise(groups)]
    if groups[0] != 0 or groups[-1] != batch.num_seqs or min(sizes, default=0) < 0:
        raise ShapeError(
            f"cu_group_seqs is {groups}, expected to ascend from 0 to num_seqs={batch.num_seqs}"
        )
    starts, seq_lens = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
    for group, prefix in enumerate(lens):
        first, end = groups[group], groups[group + 1]
        if prefix and first == end:
            raise ShapeError(
                f"prefix_lens[{group}] is {prefix}, but the group has no sequence: expected 0"
            )
        if prefix < 0 or prefix % block_size:
            raise ShapeError(
                f"prefix_lens[{group}] is {prefix}, expected whole blocks of {block_size}"
            )
        tables = batch.block_tables[first:end, : prefix // block_size]
        for seq in range(first, end):
            old = max(0, seq_lens[seq] - (starts[seq + 1] - starts[seq]))
            if prefix > old:
                raise ShapeError(
                    f"prefix_lens[{group}] is {prefix}, but sequence {seq} has "
                    f"{plural(old, 'key')} before its new tokens: a prefix holds none of them"
                )
        if (tables != tables[:1]).any():
            raise ShapeError(
                f"prefix_lens[{group}] is {prefix}, but block_tables of sequences {first} to "
                f"{end - 1} do not begin with the same {plural(prefix // block_size, 'block')}"
            )


def check_values(
    problem: Problem,
    batch: PagedBatch,
    num_blocks: int,
    *,
    cu_seqlens_q: _Integers,
    seq_lens: _Integers,
    block_tables: _Integers,
) -> None:
    """Raise ShapeError naming the first value that is out of bounds.

    Args:
        problem: The call's sizes.
        batch: The call's batch, for its host integers and strides.
        num_blocks: Blocks of the caches.
        cu_seqlens_q: The batch's tensor as a NumPy array, like the next two.
        seq_lens: One length per sequence.
        block_tables: All rows and the memory between them, one-dimensional.
    """
    max_blocks = batch.block_tables.shape[1]
    fault, seq, i = _find_fault(
        cu_seqlens_q, seq_lens, block_tables, batch.block_tables.stride(0), max_blocks,
        problem.block_size, num_blocks, problem.num_tokens, problem.max_query_len,
        problem.max_seq_len,
    )  # fmt: skip
    if fault == _FINE:
        return
    seq_len = int(seq_lens[seq]) if len(seq_lens) else 0
    used = -(-seq_len // problem.block_size)
    start, end = cu_seqlens_q[seq], cu_seqlens_q[min(seq + 1, len(seq_lens))]
    message = _MESSAGES[fault].format(
        seq=seq,
        next=min(seq + 1, len(seq_lens)),
        start=start,
        end=end,
        query_len=end - start,
        max_query_len=problem.max_query_len,
        num_tokens=problem.num_tokens,
        seq_len=seq_len,
        max_seq_len=problem.max_seq_len,
        used=used,
        block_size=problem.block_size,
        max_blocks=max_blocks,
        i=i,
        block=int(batch.block_tables[seq, i]) if fault == _BLOCK else None,
        known=f"0 to {num_blocks - 1}: k_cache has num_blocks={num_blocks}"
        if num_blocks
        else "a block of k_cache, which has num_blocks=0",
    )
    if fault == _BLOCK and batch.block_tables[seq, i] == -1:
        message += (
            f". -1 is PagedBatch.of's padding: the table has {plural(i, 'block')}, but "
            f"seq_lens[{seq}] is {seq_len}, which takes {used}. Append to the table first"
        )
    raise ShapeError(message)

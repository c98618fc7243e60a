"""Lists of visible blocks: the position of a key among the visible keys of a KV head.

A list has logical block numbers in ascending order, then -1. The *compact* keys of a KV head are
those of its listed blocks, numbered consecutively; kernels visit them like all keys otherwise.
Blocks of 4 keys, of which 0, 3 and 4 are listed, for a sequence of 18 keys::

    logical   0  1  2  3 │ 4 … 11 │ 12 13 14 15 │ 16 17
    compact   0  1  2  3 │        │  4  5  6  7 │  8  9

Order is kept, so a range of logical keys is a range of compact keys, and masks by causality and
windows stay comparisons with two ends. No helper creates a tensor: Gluon kernels call them too.
"""

import triton
import triton.language as tl


@triton.jit
def _count_below(blocks, block, max_visible, search_steps):
    """Number of entries less than ``block``, by binary search; -1 counts as infinite."""
    count = 0 * block
    for step in tl.range(search_steps, num_stages=1, loop_unroll_factor=1):
        probe = count + (1 << (search_steps - 1 - step))
        inside = probe <= max_visible
        entry = tl.load(blocks + (probe - 1), mask=inside, other=-1)
        is_below = inside & (entry >= 0) & (entry < block)
        count = tl.where(is_below, probe, count)
    return count


@triton.jit
def compact_position(blocks, key, block_size, max_visible, search_steps):
    """Number of visible keys before ``key``: its compact position, if it is visible.

    Args:
        blocks: Pointer to a list, or a tensor of pointers.
        key: Logical keys, a scalar or a tensor; negative ones count as 0.
        block_size: Keys of a block.
        max_visible: Length of a list.
        search_steps: Bits of ``max_visible``.
    """
    key = tl.maximum(key, 0)
    block = key // block_size
    count = _count_below(blocks, block, max_visible, search_steps)
    entry = tl.load(blocks + count, mask=count < max_visible, other=-1)
    return count * block_size + tl.where(entry == block, key % block_size, 0)


@triton.jit
def logical_keys(blocks, compact, first, end, block_size):
    """The logical keys of compact keys from ``first`` to ``end``; negative for others."""
    inside = (compact >= first) & (compact < end)
    entry = tl.load(blocks + compact // block_size, mask=inside, other=-1)
    return entry * block_size + compact % block_size

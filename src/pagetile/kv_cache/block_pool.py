"""The allocator of cache blocks: free list, reference counts and order of reuse.

A block is a number here; its keys and values lie in the cache tensors. A free block keeps its
content until it is handed out again, so a ``PrefixIndex`` can still find what a finished sequence
computed, and ``retain`` takes it back out of the free list::

             allocate                    release, at zero holders
    free ───────────────► held ──────────────────────────────────► free
    (old end of the list)  ▲                             (young end of the list)
                           └──── retain, from anywhere in the list
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NoReturn

from ..errors import DTypeError, OutOfBlocksError, ShapeError, plural
from .integers import block_ids, whole_number

_MOST_BLOCKS = 1 << 26
"""The pool's lists take about 90 bytes a block of the host's memory, 6 GB for these."""


class BlockPool:
    """Allocates, shares and frees blocks ``0 .. num_blocks - 1`` of ``block_size`` tokens.

    The free list is in reuse order: the block whose last holder left longest ago comes first.
    It is doubly linked (two lists of integers), so every operation costs O(1) per block, also
    taking a block out of the middle.

    Args:
        num_blocks: Size of the pool, 1 to 67,108,864.
        block_size: Tokens per block, at least 1. Block tables, prefix indexes and caches take
            it from their pool.

    Raises:
        ShapeError: A size is not an integer or out of range.

    Examples:
        >>> pool = BlockPool(4, block_size=16)
        >>> blocks = pool.allocate(3)
        >>> blocks
        [0, 1, 2]
        >>> pool.release(blocks[::-1])
        >>> list(pool.free_blocks())
        [3, 2, 1, 0]
        >>> pool.retain([1])
        >>> pool.ref_count(1), pool.num_free
        (1, 3)
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        num_blocks = whole_number("num_blocks", num_blocks, least=1)
        if num_blocks > _MOST_BLOCKS:
            raise ShapeError(
                f"num_blocks={num_blocks}, expected at most {_MOST_BLOCKS}: use larger blocks"
            )
        self._block_size = whole_number("block_size", block_size, least=1)
        self._num_blocks = num_blocks
        self._reuse_listeners: list[Callable[[int], None]] = []
        self.clear()

    def __repr__(self) -> str:
        return (
            f"<BlockPool: {self._num_free} of {self._num_blocks} blocks of {self._block_size} "
            f"token{'s' * (self._block_size != 1)} free>"
        )

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._num_blocks

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @property
    def num_free(self) -> int:
        """Blocks without a holder, those with cached content included."""
        return self._num_free

    @property
    def num_shared(self) -> int:
        """Blocks with more than one holder."""
        return self._num_shared

    def ref_count(self, block: int) -> int:
        """Number of holders of ``block``; 0: it is free.

        Raises:
            ValueError: The pool has no such block.
            ShapeError: ``block`` is not an integer.
        """
        try:
            if 0 <= block < self._num_blocks:
                return self._ref_counts[block]
        except TypeError:
            pass
        self._reject([whole_number("block", block, least=None)])

    def can_allocate(self, n: int) -> bool:
        """Whether ``allocate(n)`` would succeed now.

        Raises:
            ShapeError: ``n`` is not an integer.
        """
        if n.__class__ is not int:
            n = whole_number("n", n, least=None)
        return 0 <= n <= self._num_free

    def add_reuse_listener(self, listener: Callable[[int], None]) -> None:
        """Call ``listener(block)`` whenever a block's content is about to be replaced.

        That is for each block that ``allocate`` hands out and each that is given to
        ``overwrite``. A ``PrefixIndex`` registers its ``forget`` here when it is made.
        """
        self._reuse_listeners.append(listener)

    def allocate(self, n: int = 1) -> list[int]:
        """Take ``n`` free blocks, least recently released first, each with one holder.

        Raises:
            OutOfBlocksError: Fewer than ``n`` are free. Nothing was taken.
            ShapeError: ``n`` is negative or no integer.
        """
        n = whole_number("n", n)
        if n > self._num_free:
            raise OutOfBlocksError(
                f"{plural(n, 'block')} needed, but {self._num_free} of {self._num_blocks} are free"
                ": release some or make the pool larger"
            )
        ends, following = self._num_blocks, self._next
        taken = []
        block = following[ends]
        for _ in range(n):
            taken.append(block)
            self._ref_counts[block] = 1
            block = following[block]
        following[ends], self._previous[block] = block, ends
        self._num_free -= n
        for listener in self._reuse_listeners:
            for block in taken:
                listener(block)
        return taken

    def retain(self, blocks: Sequence[int]) -> None:
        """Add one holder to each block; a free one leaves the free list with its content.

        Retain blocks that a ``PrefixIndex`` found before the next ``allocate``, which may hand out
        any free block.

        Raises:
            ValueError: The pool has no such block. Nothing was retained.
            DTypeError: ``blocks`` is not a list of integers.
        """
        blocks = self._check_ids(blocks)
        for block in blocks:
            if not self._ref_counts[block]:
                before, after = self._previous[block], self._next[block]
                self._next[before], self._previous[after] = after, before
                self._num_free -= 1
            self._ref_counts[block] += 1
            self._num_shared += self._ref_counts[block] == 2

    def release(self, blocks: Sequence[int]) -> None:
        """Take one holder from each block, in order; the last one freed is reused last.

        Pass the blocks of a sequence last first, so that its last blocks are reused first: the
        beginning of a prefix can be found without its end, but not the other way round.

        Raises:
            ValueError: A block has fewer holders than are released, or the pool has no such
                block. Nothing was released.
            DTypeError: ``blocks`` is not a list of integers.
        """
        blocks = self._check_ids(blocks)
        for block, times in Counter(blocks).items():
            if self._ref_counts[block] < times:
                raise ValueError(
                    f"block {block} is released {times} times but has "
                    f"{self._ref_counts[block]} holders: each holder releases it once"
                )
        ends = self._num_blocks
        for block in blocks:
            self._ref_counts[block] -= 1
            self._num_shared -= self._ref_counts[block] == 1
            if not self._ref_counts[block]:
                youngest = self._previous[ends]
                self._next[youngest], self._previous[block] = block, youngest
                self._next[block], self._previous[ends] = ends, block
                self._num_free += 1

    def clear(self) -> None:
        """Free every block, whatever its holders: tables that hold any must not be used again."""
        num_blocks = self._num_free = self._num_blocks
        self._num_shared = 0
        self._ref_counts = [0] * num_blocks
        # A circular list: the sentinel `num_blocks` is both of its ends and never handed out.
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]

    def overwrite(self, block: int) -> None:
        """Call the reuse listeners: the content of a held block is about to be replaced."""
        for listener in self._reuse_listeners:
            listener(block)

    def free_blocks(self) -> Iterator[int]:
        """The free blocks in reuse order. The pool must not change while this runs."""
        return self._walk(self._next)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Prove that no block is lost, free and held at once, or miscounted.

        Args:
            tables: The blocks of every holder, each holder once.

        Raises:
            AssertionError: With the numbers that disagree.
            DTypeError: ``tables`` or one of them is not a list.
        """
        if not isinstance(tables, Iterable):
            raise DTypeError(
                f"tables is of type {type(tables).__name__}, expected a list of lists: pass "
                "[table.blocks for table in tables]"
            )
        forward = list(islice(self._walk(self._next), self._num_blocks + 1))
        backward = list(islice(self._walk(self._previous), self._num_blocks + 1))
        if forward != backward[::-1]:
            raise AssertionError(f"free list is {forward} forwards, {backward} backwards")
        held = sum(count > 0 for count in self._ref_counts)
        if not len(set(forward)) == len(forward) == self._num_free == self._num_blocks - held:
            raise AssertionError(
                f"free list has {len(forward)} entries, {len(set(forward))} distinct; "
                f"num_free={self._num_free}; {held} of {self._num_blocks} blocks are held"
            )
        holders: Counter[int] = Counter()
        for table in tables:
            if not isinstance(table, Sequence):
                raise DTypeError(
                    f"tables holds a {type(table).__name__}, expected lists: pass table.blocks"
                )
            self._check_table(table)
            holders.update(table)
        for block, count in enumerate(self._ref_counts):
            if count != holders[block]:
                raise AssertionError(
                    f"block {block} has ref count {count} but is in {holders[block]} tables"
                )
        shared = sum(count > 1 for count in self._ref_counts)
        if shared != self._num_shared:
            raise AssertionError(f"num_shared={self._num_shared}, but {shared} blocks are shared")

    def _check_table(self, table: Sequence[int]) -> None:
        for block, times in Counter(table).items():
            if times > 1:
                raise AssertionError(f"block {block} is {times} times in table {table}")
            if not 0 <= block < self._num_blocks or not self._ref_counts[block]:
                raise AssertionError(f"table {table} has block {block}, which is free")

    def _walk(self, links: list[int]) -> Iterator[int]:
        block = links[self._num_blocks]
        while block != self._num_blocks:
            yield block
            block = links[block]

    def _check_ids(self, blocks: Sequence[int]) -> list[int]:
        blocks = block_ids(blocks)
        if blocks and not 0 <= min(blocks) <= max(blocks) < self._num_blocks:
            self._reject(blocks)
        return blocks

    def _reject(self, blocks: Sequence[int]) -> NoReturn:
        wrong = next(block for block in blocks if not 0 <= block < self._num_blocks)
        raise ValueError(
            f"block {wrong} is not one of 0 .. {self._num_blocks - 1}: the pool has "
            f"{plural(self._num_blocks, 'block')}"
        )

"""The cache blocks of one sequence, and the slots of its tokens in them.

Token ``t`` lies in slot ``blocks[t // block_size] * block_size + t % block_size``. A fork holds
the same blocks; only the last one can be partly filled, and the first table that appends to it
while it is shared takes a copy (copy-on-write; block_size 4, six tokens)::

    parent            [2][5]         blocks 2 and 5 have two holders each
    fork              [2][5]
    fork.append(1)    [2][7]         copy 5 → 7, then write; only the parent still holds 5
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from ..errors import ShapeError, plural
from .block_pool import BlockPool
from .integers import check_type, whole_number
from .prefix_index import BlockHashes, PrefixIndex


class BlockTable:
    """The cache blocks of one sequence, in the order of its tokens. Starts empty.

    Args:
        pool: Where blocks are taken from and given back to; it gives the block size.

    Raises:
        DTypeError: ``pool`` is not a ``BlockPool``.

    Examples:
        >>> table = BlockTable(BlockPool(8, block_size=4))
        >>> table.append(6)
        []
        >>> table.blocks, table.num_tokens, table.slots(3, 6)
        ([0, 1], 6, [3, 4, 5])
        >>> fork = table.fork()
        >>> fork.append(1)
        [(1, 2)]
        >>> table.blocks, fork.blocks
        ([0, 1], [0, 2])
    """

    def __init__(self, pool: BlockPool) -> None:
        check_type("pool", pool, BlockPool, "(num_blocks, block_size)")
        self._pool = pool
        self._block_size = pool.block_size
        self._blocks: list[int] = []
        self._num_tokens = 0
        self._was_cut = False

    def __repr__(self) -> str:
        return f"<BlockTable: {self.num_tokens} tokens in blocks {self.blocks}>"

    @property
    def blocks(self) -> list[int]:
        """The blocks in order of their tokens: the live list, to be read only."""
        return self._blocks

    @property
    def num_tokens(self) -> int:
        """Tokens whose slots are reserved."""
        return self._num_tokens

    def blocks_needed(self, num_new_tokens: int) -> int:
        """How many blocks ``append(num_new_tokens)`` would take from the pool now.

        The copy of a shared, partly filled last block is counted.

        Raises:
            ShapeError: ``num_new_tokens`` is negative or no integer.
        """
        num_new_tokens = whole_number("num_new_tokens", num_new_tokens)
        if num_new_tokens == 0:
            return 0
        num_blocks = self._blocks_for(self._num_tokens + num_new_tokens)
        return num_blocks - len(self._blocks) + self._must_copy_last()

    def append(self, num_new_tokens: int) -> list[tuple[int, int]]:
        """Reserve slots for the next tokens.

        Returns:
            Block copies ``(src, dst)`` to be made before the tokens are written; none, or one
            when the partly filled last block is shared. ``src`` is no longer held through this
            table, so the copy must also come before anything else that is written to ``src``.

        Raises:
            OutOfBlocksError: The pool has too few free blocks. Nothing has changed.
            ShapeError: ``num_new_tokens`` is negative or no integer. Nothing has changed.
        """
        room = -self._num_tokens % self._block_size
        if (
            num_new_tokens.__class__ is int
            and 0 < num_new_tokens <= room
            and not self._was_cut
            and self._pool.ref_count(self._blocks[-1]) == 1
        ):
            self._num_tokens += num_new_tokens  # the usual case: the last block is not shared
            return []
        num_tokens = self._num_tokens + whole_number("num_new_tokens", num_new_tokens)
        if num_tokens == self._num_tokens:
            return []
        must_copy = room > 0 and self._must_copy_last()
        needed = self._blocks_for(num_tokens) - len(self._blocks) + must_copy
        taken = self._pool.allocate(needed) if needed else []
        copies = []
        if must_copy:
            copies.append((self._blocks[-1], taken[0]))
            self._pool.release([self._blocks.pop()])
        elif self._was_cut:
            # A truncated block may still be in a prefix index with its former tokens.
            self._pool.overwrite(self._blocks[-1])
        self._blocks.extend(taken)
        self._num_tokens = num_tokens
        self._was_cut = False
        return copies

    def adopt_prefix(
        self,
        index: PrefixIndex,
        tokens: Sequence[int] | BlockHashes,
        *,
        cache_salt: str | None = None,
        max_blocks: int | None = None,
    ) -> BlockHashes:
        """Find the longest cached prefix of a sequence and start from its blocks, held here.

        Matching and holding are one step, so no block can be reused in between. Afterwards
        ``num_tokens`` is the number of tokens that need no computing.

        Args:
            index: The index of this table's pool.
            tokens: The sequence's token ids, or its hashes made by ``index.block_hashes``.
            cache_salt: As for ``PrefixIndex.block_hashes``; only with token ids.
            max_blocks: Adopt no more than this many blocks. ``None``: with token ids, all but
                the block of the last token, which must be computed to have logits to sample
                from; with hashes, all of them.

        Returns:
            The sequence's block hashes, for ``index.insert``.

        Raises:
            DTypeError: ``index`` is not a ``PrefixIndex``, ``tokens`` is not a list, or a token is
                not an integer of 64 bits.
            ValueError: The table is not empty, or ``index`` belongs to another pool, or the
                hashes to another index. Nothing has changed.
        """
        if self._blocks:
            raise ValueError(
                f"adopt_prefix() on a table of {plural(len(self._blocks), 'block')}, expected an "
                "empty one: adopt before append(), or free() it first"
            )
        check_type("index", index, PrefixIndex, "(pool)")
        if index._pool is not self._pool:
            raise ValueError("the index belongs to another pool: make it with this table's pool")
        if isinstance(tokens, BlockHashes):
            hashes = tokens
        else:
            hashes = index.block_hashes(tokens, cache_salt=cache_salt)
            if max_blocks is None:
                max_blocks = max(0, len(tokens) - 1) // self._block_size
        blocks = index.match(hashes, max_blocks)
        self._pool.retain(blocks)
        hashes.num_inserted = len(blocks)
        self._blocks = blocks
        self._num_tokens = len(blocks) * self._block_size
        return hashes

    def slots(self, start: int, end: int) -> list[int]:
        """The slots of the tokens at positions ``start .. end - 1``: ``[end - start]``.

        Raises:
            ShapeError: The range is not within ``0 .. num_tokens``, or an end is not an integer.
        """
        if start.__class__ is not int or end.__class__ is not int:
            start = whole_number("start", start, least=None)
            end = whole_number("end", end, least=None)
        if not 0 <= start <= end <= self._num_tokens:
            raise ShapeError(
                f"slots({start}, {end}) of a table with num_tokens={self._num_tokens}, expected "
                f"0 <= start <= end <= {self._num_tokens}: append() reserves slots for new tokens"
            )
        size = self._block_size
        first, offset = divmod(start, size)
        if offset + end - start <= size:
            if start == end:
                return []
            slot = self._blocks[first] * size + offset
            return list(range(slot, slot + end - start))
        blocks = self._blocks[first : self._blocks_for(end)]
        slots = list(chain.from_iterable(range(b * size, (b + 1) * size) for b in blocks))
        return slots[offset : offset + end - start]

    def fork(self) -> BlockTable:
        """Return a table of the same tokens, which holds every block as well."""
        twin = BlockTable(self._pool)
        self._pool.retain(self._blocks)
        twin._blocks = self._blocks.copy()
        twin._num_tokens, twin._was_cut = self._num_tokens, self._was_cut
        return twin

    def truncate(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens and give back the blocks past them.

        Raises:
            ShapeError: ``num_tokens`` is not within ``0 .. self.num_tokens``, or no integer.
        """
        if num_tokens.__class__ is not int:
            num_tokens = whole_number("num_tokens", num_tokens, least=None)
        if not 0 <= num_tokens <= self._num_tokens:
            raise ShapeError(
                f"truncate({num_tokens}) of a table with {self._num_tokens} tokens, expected 0 to "
                f"{self._num_tokens}: append() adds tokens"
            )
        num_blocks = self._blocks_for(num_tokens)
        self._pool.release(self._blocks[num_blocks:][::-1])
        del self._blocks[num_blocks:]
        if num_tokens < self._num_tokens:
            self._was_cut = num_tokens % self._block_size > 0
        self._num_tokens = num_tokens

    def free(self) -> None:
        """Give back every block, last first. The table is empty afterwards."""
        self.truncate(0)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _must_copy_last(self) -> bool:
        partly_filled = self._num_tokens % self._block_size > 0
        return partly_filled and self._pool.ref_count(self._blocks[-1]) > 1

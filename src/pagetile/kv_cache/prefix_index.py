"""Index of full cache blocks by the hash of their tokens and of all tokens before them.

The keys and values of a token depend on all tokens before it, so a block's digest includes its
parent's (block_size 2 here)::

    salt  ──► [5 6] ──► [7 8] ──► [9 1]        digest = H(parent's digest, tokens)
               block 3   block 0   block 7

Only full blocks are indexed. A digest only finds a candidate: tokens and parents are compared,
so a collision is a miss and never wrong content. The cache salt is hashed into the root: sequences
with different salts share no block, so no tenant can learn from timing what another has sent.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import sha256
from itertools import islice
from struct import error as StructError
from struct import pack

from ..errors import DTypeError, ShapeError, plural
from .block_pool import BlockPool
from .integers import check_type, whole_number


class _Link:
    """One full block of tokens and, through its parents, everything before it."""

    __slots__ = ("digest", "parent", "tokens")

    def __init__(self, digest: bytes, parent: _Link | None, tokens: bytes) -> None:
        self.digest = digest
        self.parent = parent
        self.tokens = tokens


class PrefixIndex:
    """Index of the pool's blocks whose content is known, by the tokens up to their end.

    The index removes a block by itself when the pool hands it out again. When a block in the
    middle of a sequence is removed, ``match`` no longer reaches the blocks after it. They stay
    indexed until they are reused, and are found again when the missing block is computed again.

    Args:
        pool: The pool whose blocks are indexed; it gives the block size.
        salt: The operator's salt, hashed into every digest.

    Raises:
        DTypeError: ``pool`` is not a ``BlockPool``, or ``salt`` is not bytes.

    Examples:
        >>> from pagetile import BlockTable
        >>> pool = BlockPool(8, block_size=2)
        >>> index = PrefixIndex(pool)
        >>> first, second = BlockTable(pool), BlockTable(pool)
        >>> hashes = first.adopt_prefix(index, [5, 6, 7, 8, 9])  # finds nothing yet
        >>> first.append(5)
        []
        >>> index.insert(hashes, first.blocks, num_full_blocks=2)  # once they are written
        >>> _ = second.adopt_prefix(index, [5, 6, 7, 8, 1, 1])
        >>> second.blocks, second.num_tokens
        ([0, 1], 4)
    """

    def __init__(self, pool: BlockPool, *, salt: bytes = b"") -> None:
        check_type("pool", pool, BlockPool, "(num_blocks, block_size)")
        if not isinstance(salt, bytes):
            raise DTypeError(f"salt is {salt!r}, expected bytes")
        self._pool = pool
        self._block_size = pool.block_size
        self._salt = salt
        self._encode = partial(pack, f"<{pool.block_size}q")  # unlike a Struct, it can be pickled
        self._blocks: dict[bytes, int] = {}
        self._links: dict[int, _Link] = {}
        pool.add_reuse_listener(self.forget)

    def block_hashes(
        self, token_ids: Sequence[int] = (), *, cache_salt: str | None = None
    ) -> BlockHashes:
        """Return the hashes of a sequence's full blocks, to be extended as it grows.

        Args:
            token_ids: The sequence's tokens so far.
            cache_salt: Sequences find each other's blocks only if their salts are equal.
                ``None`` is not the empty salt.

        Raises:
            DTypeError: ``cache_salt`` is not a string, ``token_ids`` is not a list, or a token
                is not an integer of 64 bits.
        """
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise DTypeError(f"cache_salt is {cache_salt!r}, expected a string, or None")
        if isinstance(token_ids, (str, bytes)):
            raise DTypeError(f"token_ids is {token_ids!r}, expected a list of token ids: encode it")
        fields = _field(b"operator", self._salt)
        if cache_salt is not None:
            fields += _field(b"request", cache_salt.encode("utf-8", "surrogatepass"))
        hashes = BlockHashes(self, _Link(self._digest(b"root" + fields), None, fields))
        hashes.extend(token_ids)
        return hashes

    def _pack(self, token_ids: Sequence[int]) -> bytes:
        try:
            return self._encode(*token_ids)
        except StructError as reason:
            raise DTypeError(
                f"token ids are {list(token_ids)}, expected integers of 64 bits: {reason}"
            ) from None

    def match(self, hashes: BlockHashes, max_blocks: int | None = None) -> list[int]:
        """Return the blocks that hold the longest indexed prefix of a sequence, in order.

        The answer is valid until the pool changes; ``BlockTable.adopt_prefix`` matches and holds
        the blocks in one step.

        Args:
            hashes: The sequence's block hashes, extended with its tokens.
            max_blocks: Look no further than this many blocks, ``None`` for all.

        Raises:
            ValueError: ``hashes`` were made by another index.
        """
        self._check_hashes(hashes)
        found: list[int] = []
        parent = hashes._root
        for link in islice(hashes._links, max_blocks):
            block = self._blocks.get(link.digest)
            if block is None:
                break
            candidate = self._links[block]
            if candidate.tokens != link.tokens or not _is_same_prefix(candidate.parent, parent):
                break
            # Share the parent object, so that the next comparison of prefixes is one step.
            candidate.parent = parent
            parent = candidate
            found.append(block)
        return found

    def insert(self, hashes: BlockHashes, blocks: Sequence[int], num_full_blocks: int) -> None:
        """Register the blocks of a sequence whose keys and values have been written.

        Costs O(blocks not inserted before). Content that another block already holds stays
        with that block.

        Args:
            hashes: The sequence's block hashes, extended at least as far as ``num_full_blocks``.
            blocks: The sequence's block table.
            num_full_blocks: How many of ``blocks``, from the first, are written to the end.

        Raises:
            ShapeError: ``num_full_blocks`` is more than ``hashes`` or ``blocks`` has, negative or
                no integer.
            ValueError: ``hashes`` were made by another index, or the pool has no such block.
                Nothing was registered.
            DTypeError: ``hashes`` are not ``BlockHashes``, or ``blocks`` is not a sequence.
        """
        self._check_hashes(hashes)
        if not isinstance(blocks, (list, Sequence)):  # isinstance of list is much faster
            raise DTypeError(
                f"blocks is of type {type(blocks).__name__}, expected a list: pass table.blocks"
            )
        if num_full_blocks.__class__ is not int or num_full_blocks < 0:
            num_full_blocks = whole_number("num_full_blocks", num_full_blocks)
        if num_full_blocks > min(len(hashes), len(blocks)):
            raise ShapeError(
                f"num_full_blocks={num_full_blocks} but there are hashes of {len(hashes)} full "
                f"blocks and the table has {len(blocks)}: extend them first"
            )
        start = hashes.num_inserted
        new = blocks[start:num_full_blocks]
        for block in new:
            self._pool.ref_count(block)  # raises where the pool has no such block
        for link, block in zip(hashes._links[start:num_full_blocks], new, strict=True):
            if block in self._links:
                self.forget(block)
            if link.digest not in self._blocks:
                self._blocks[link.digest] = block
                self._links[block] = link
        hashes.num_inserted = max(hashes.num_inserted, num_full_blocks)

    def forget(self, block: int) -> None:
        """Remove a block whose content is about to be replaced; an unknown one changes nothing."""
        if link := self._links.pop(block, None):
            del self._blocks[link.digest]

    def clear(self) -> None:
        """Remove every block: after the model's weights have changed, say."""
        self._blocks.clear()
        self._links.clear()

    def repair(self) -> None:
        """Remove entries that an interrupted ``insert`` or ``forget`` has left half made."""
        found = {b: link for b, link in self._links.items() if self._blocks.get(link.digest) == b}
        self._links, self._blocks = found, {link.digest: block for block, link in found.items()}

    def check(self) -> None:
        """Raise AssertionError unless blocks and digests name each other and are right."""
        if len(self._blocks) != len(self._links):
            raise AssertionError(
                f"{plural(len(self._blocks), 'digest')} for {plural(len(self._links), 'block')}"
            )
        for block, link in self._links.items():
            if self._blocks.get(link.digest) != block:
                found = self._blocks.get(link.digest)
                raise AssertionError(f"block {block} is indexed but its digest finds {found}")
            if link.parent is None or link.digest != self._link(link.parent, link.tokens).digest:
                raise AssertionError(f"the digest of block {block} is not that of its tokens")

    def __len__(self) -> int:
        return len(self._links)

    def __contains__(self, block: int) -> bool:
        return block in self._links

    def __iter__(self) -> Iterator[int]:
        """The indexed blocks."""
        return iter(self._links)

    def _check_hashes(self, hashes: BlockHashes) -> None:
        if hashes.__class__ is not BlockHashes:
            check_type("hashes", hashes, BlockHashes, ": adopt_prefix and block_hashes return them")
        if hashes._index is not self:
            raise ValueError(
                "these block hashes were made by another index: use this index's block_hashes()"
            )

    def _link(self, parent: _Link, tokens: bytes) -> _Link:
        return _Link(self._digest(b"link" + parent.digest + tokens), parent, tokens)

    @staticmethod
    def _digest(data: bytes) -> bytes:
        return sha256(data).digest()


class BlockHashes:
    """The hashes of one sequence's full blocks.

    ``BlockTable.adopt_prefix`` and ``PrefixIndex.block_hashes`` make them.

    Attributes:
        num_inserted: Blocks, from the first, that were adopted from the index or inserted into it.

    Examples:
        >>> hashes = PrefixIndex(BlockPool(8, block_size=2)).block_hashes(cache_salt="tenant-1")
        >>> hashes.extend([5, 6, 7])
        >>> len(hashes)
        1
        >>> hashes.extend([5, 6, 7, 8])
        >>> len(hashes)
        2
    """

    def __init__(self, index: PrefixIndex, root: _Link) -> None:
        self._index = index
        self._root = root
        self._links: list[_Link] = []
        self.num_inserted = 0

    def __len__(self) -> int:
        """Full blocks hashed so far."""
        return len(self._links)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Hash the blocks of ``token_ids`` that are full and not hashed yet.

        Args:
            token_ids: The whole sequence, its earlier tokens unchanged.

        Raises:
            ValueError: The sequence has become shorter than what is hashed (``truncate`` it), or
                its last hashed block differs now: it needs new hashes.
            DTypeError: ``token_ids`` is not a list, or a token is not an integer of 64 bits.
        """
        index, last, size = self._index, self._last, self._index._block_size
        try:
            start, end = len(self._links) * size, len(token_ids) // size * size
        except TypeError:
            raise DTypeError(
                f"token_ids is of type {type(token_ids).__name__}, expected a list of token ids"
            ) from None
        if start == end:
            return
        if end < start or (start and index._pack(token_ids[start - size : start]) != last.tokens):
            raise ValueError(
                f"{plural(len(token_ids), 'token')} cannot continue the {start} that are hashed: "
                "give extend() the whole sequence, not its new tokens alone; call truncate() for a "
                "sequence that was cut, make new hashes where tokens changed"
            )
        for i in range(start, end, size):
            last = index._link(last, index._pack(token_ids[i : i + size]))
            self._links.append(last)

    def truncate(self, num_tokens: int) -> None:
        """Forget the blocks that are not full of the first ``num_tokens`` tokens: after a rollback.

        Raises:
            ShapeError: ``num_tokens`` is negative or no integer.
        """
        num_tokens = whole_number("num_tokens", num_tokens)
        del self._links[num_tokens // self._index._block_size :]
        self.num_inserted = min(self.num_inserted, len(self._links))

    def num_common(self, other: BlockHashes) -> int:
        """Return how many full blocks, from the first, have the same digests as ``other``'s.

        Digests cover whole prefixes, so binary search finds the first difference.
        """
        check_type("other", other, BlockHashes)
        mine, others = self._links, other._links
        return bisect_left(
            range(min(len(mine), len(others))),
            True,
            key=lambda at: mine[at].digest != others[at].digest,
        )

    def fork(self) -> BlockHashes:
        """Return the hashes of a sequence that continues from the same tokens and blocks."""
        twin = BlockHashes(self._index, self._root)
        twin._links = self._links.copy()
        twin.num_inserted = self.num_inserted
        return twin

    @property
    def _last(self) -> _Link:
        return self._links[-1] if self._links else self._root


def _field(tag: bytes, value: bytes) -> bytes:
    """Encode a value with tag and length, so that no value can imitate another field."""
    return tag + len(value).to_bytes(8, "little") + value


def _is_same_prefix(a: _Link | None, b: _Link | None) -> bool:
    while a is not b:
        if a is None or b is None or a.tokens != b.tokens:
            return False
        a, b = a.parent, b.parent
    return True

"""Which cache block holds which full block of tokens, found by everything before it.

The keys and values of a token depend on all tokens before it, so a block is found by the hash
of its whole prefix, one link per full block (block_size 2 here)::

    salts ──► [5 6] ──► [7 8] ──► [9 1]        digest = H(parent's digest, tokens)
               block 3   block 0   block 7

Only full blocks are indexed. A digest only finds a candidate: tokens and parents are compared,
so a collision is a miss and never wrong content. Salts sit at the root: chains with different
salts have no link in common, so one tenant cannot time whether another has sent a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import islice
from struct import Struct
from struct import error as StructError

from ..errors import DTypeError, ShapeError

__all__ = ["PrefixChain", "PrefixIndex"]


class _Link:
    """One full block of tokens and, through its parents, everything before it."""

    __slots__ = ("digest", "parent", "tokens")

    def __init__(self, digest: bytes, parent: _Link | None, tokens: bytes) -> None:
        self.digest = digest
        self.parent = parent
        self.tokens = tokens


class PrefixIndex:
    """The blocks whose content is known, by the tokens that lead up to and fill them.

    Give ``forget`` to the pool as ``on_reuse``. When a block in the middle of a chain is
    forgotten, the blocks after it are out of ``match``'s reach but stay indexed until they
    are reused themselves; if the missing content is computed again they are found again.

    Args:
        block_size: Tokens per block, at least 1.
        salt: The operator's salt, hashed into every chain.

    Raises:
        ShapeError: ``block_size`` is below 1.

    Example:
        >>> index = PrefixIndex(block_size=2)
        >>> chain = index.chain()
        >>> chain.extend([5, 6, 7, 8, 9])
        >>> index.insert(chain, blocks=[3, 0], num_full_blocks=2)
        >>> other = index.chain()
        >>> other.extend([5, 6, 7, 8, 1, 1])
        >>> index.match(other)
        [3, 0]
        >>> index.forget(0)
        >>> index.match(other)
        [3]
    """

    def __init__(self, block_size: int, *, salt: bytes = b"") -> None:
        if block_size < 1:
            raise ShapeError(f"block_size={block_size}, expected at least 1")
        self._block_size = block_size
        self._salt = salt
        self._encode = Struct(f"<{block_size}q").pack
        self._blocks: dict[bytes, int] = {}
        self._links: dict[int, _Link] = {}

    def chain(self, salt: str | None = None) -> PrefixChain:
        """A new sequence's place in the index.

        Args:
            salt: Sequences find each other's blocks only if their salts are equal. ``None``
                is not the empty salt.
        """
        fields = _field(b"operator", self._salt)
        if salt is not None:
            fields += _field(b"request", salt.encode("utf-8", "surrogatepass"))
        return PrefixChain(self, _Link(self._digest(b"root" + fields), None, fields))

    def _pack(self, *token_ids: int) -> bytes:
        try:
            return self._encode(*token_ids)
        except StructError as reason:
            raise DTypeError(
                f"token ids are {list(token_ids)}, expected integers of 64 bits: {reason}"
            ) from None

    def match(self, chain: PrefixChain, max_blocks: int | None = None) -> list[int]:
        """The blocks that hold the longest indexed prefix of ``chain``, in order.

        Retain them before anything is allocated. Called at every admission of a sequence:
        the next ``insert`` then starts behind the blocks that were found.

        Args:
            chain: The sequence, extended with its tokens.
            max_blocks: Look no further than this many blocks, ``None`` for all. One less than
                the prompt fills leaves a token to compute the first logits from.
        """
        found: list[int] = []
        parent = chain._root
        for link in islice(chain._links, max_blocks):
            block = self._blocks.get(link.digest)
            if block is None:
                break
            candidate = self._links[block]
            if candidate.tokens != link.tokens or not _is_same_prefix(candidate.parent, parent):
                break
            # Equal content, made one object: the next comparison is a single step.
            candidate.parent = parent
            parent = candidate
            found.append(block)
        chain._num_inserted = len(found)
        return found

    def insert(self, chain: PrefixChain, blocks: Sequence[int], num_full_blocks: int) -> None:
        """Register the blocks of a sequence whose keys and values have been written.

        Costs O(blocks not inserted through this chain before). Content that another block
        already holds stays with that block.

        Args:
            chain: The sequence, extended at least as far as ``num_full_blocks``.
            blocks: The sequence's block table.
            num_full_blocks: How many of ``blocks``, from the first, are written to the end.

        Raises:
            ShapeError: ``num_full_blocks`` is more than the chain or ``blocks`` has.
        """
        if num_full_blocks > min(len(chain), len(blocks)):
            raise ShapeError(
                f"num_full_blocks={num_full_blocks} but the chain has {len(chain)} full blocks "
                f"and the table {len(blocks)}: extend them first"
            )
        for i in range(chain._num_inserted, num_full_blocks):
            link, block = chain._links[i], blocks[i]
            self.forget(block)
            if link.digest not in self._blocks:
                self._blocks[link.digest] = block
                self._links[block] = link
        chain._num_inserted = max(chain._num_inserted, num_full_blocks)

    def forget(self, block: int) -> None:
        """The block's content is about to be replaced. An unknown block changes nothing."""
        if link := self._links.pop(block, None):
            del self._blocks[link.digest]

    def clear(self) -> None:
        """Forget every block, as after the weights have changed."""
        self._blocks.clear()
        self._links.clear()

    def check(self) -> None:
        """Raise AssertionError unless blocks and digests name each other and are right."""
        if len(self._blocks) != len(self._links):
            raise AssertionError(f"{len(self._blocks)} digests for {len(self._links)} blocks")
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

    def _link(self, parent: _Link, tokens: bytes) -> _Link:
        return _Link(self._digest(b"link" + parent.digest + tokens), parent, tokens)

    @staticmethod
    def _digest(data: bytes) -> bytes:
        return sha256(data).digest()


class PrefixChain:
    """The full blocks of one sequence, hashed as it grows; made by ``PrefixIndex.chain``.

    Example:
        >>> chain = PrefixIndex(block_size=2).chain(salt="tenant-1")
        >>> chain.extend([5, 6, 7])
        >>> len(chain)
        1
        >>> chain.extend([5, 6, 7, 8])
        >>> len(chain)
        2
    """

    def __init__(self, index: PrefixIndex, root: _Link) -> None:
        self._index = index
        self._root = root
        self._links: list[_Link] = []
        self._num_inserted = 0

    def __len__(self) -> int:
        """Full blocks hashed so far."""
        return len(self._links)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Hash the blocks of ``token_ids`` that are full and not hashed yet.

        Args:
            token_ids: The whole sequence, its earlier tokens unchanged.

        Raises:
            ValueError: The sequence has become shorter than the chain (``truncate`` it), or its
                last hashed block differs now: it needs a new chain.
            DTypeError: A token is no integer of 64 bits.
        """
        size, encode = self._index._block_size, self._index._pack
        start, end = len(self._links) * size, len(token_ids) // size * size
        if start == end:
            return
        if end < start or (start and encode(*token_ids[start - size : start]) != self._last.tokens):
            raise ValueError(
                f"{len(token_ids)} tokens do not continue the {start} tokens of this chain: "
                "truncate it with a sequence that was cut, make a new one where tokens changed"
            )
        for i in range(start, end, size):
            self._links.append(self._index._link(self._last, encode(*token_ids[i : i + size])))

    def truncate(self, num_tokens: int) -> None:
        """Forget the blocks that are not full of the first ``num_tokens`` tokens: after a rollback.

        Raises:
            ValueError: ``num_tokens`` is negative.
        """
        if num_tokens < 0:
            raise ValueError(f"truncate({num_tokens}), expected 0 or more tokens")
        del self._links[num_tokens // self._index._block_size :]
        self._num_inserted = min(self._num_inserted, len(self._links))

    def fork(self) -> PrefixChain:
        """The chain of a sequence that continues from the same tokens and blocks."""
        twin = PrefixChain(self._index, self._root)
        twin._links = self._links.copy()
        twin._num_inserted = self._num_inserted
        return twin

    @property
    def _last(self) -> _Link:
        return self._links[-1] if self._links else self._root


def _field(tag: bytes, value: bytes) -> bytes:
    """Tagged and with its length, so that no value can imitate another field."""
    return tag + len(value).to_bytes(8, "little") + value


def _is_same_prefix(a: _Link | None, b: _Link | None) -> bool:
    while a is not b:
        if a is None or b is None or a.tokens != b.tokens:
            return False
        a, b = a.parent, b.parent
    return True

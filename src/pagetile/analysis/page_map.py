"""A picture of the block pool: which sequence holds which block.

::

    2 sequences hold 6 of 24 blocks, 2 shared; 3 cached, 15 free

     0  22AABB.. ...:::.. ........

     A one sequence   2 shared by so many   : free, content kept   . free

        sequence  tokens  blocks  unused  block table (* shared)
     A  first         57       4       7  0-1* 2-3
     B  second        50       4      14  0-1* 4-5
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

from ..errors import plural

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from ..kv_cache import BlockPool, BlockTable, PrefixIndex

FREE, CACHED, MANY, OTHER = ".", ":", "#", "+"
LETTERS = string.ascii_uppercase + string.ascii_lowercase
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")
GROUP = 8  # cells between two spaces
MAX_LINES = 32  # of the grid, and of the list of sequences

Line = list[tuple[str, str]]
"""Pieces of text, each with a rich style."""


@dataclass(frozen=True)
class HeldBlocks:
    """One sequence's part of the pool."""

    name: str
    num_tokens: int
    """Slots that hold a token."""
    blocks: tuple[int, ...]
    """The block table, in order of the tokens."""


@dataclass(frozen=True)
class PageMap:
    """A snapshot of who holds which block; ``str()`` of it, or rich's ``print``, draws it.

    In the grid a letter is a block of one sequence, a digit a block that so many share (``#`` is
    more than 9), ``:`` a free block whose content can still be found by its prefix, ``.`` any
    other free block. Long stretches of equal rows are one line.

    Examples:
        >>> print(PageMap(16, 4, (HeldBlocks("a", 6, (0, 1)), HeldBlocks("b", 7, (0, 3)))))
        2 sequences hold 3 of 16 blocks, 1 shared; 0 cached, 13 free
        <BLANKLINE>
         0  2A.B.... ........
        <BLANKLINE>
         A one sequence   2 shared by so many   . free
        <BLANKLINE>
            sequence  tokens  blocks  unused  block table (* shared)
         A  a              6       2       2  0* 1
         B  b              7       2       1  0* 3
    """

    num_blocks: int
    block_size: int
    sequences: tuple[HeldBlocks, ...]
    cached: frozenset[int] = frozenset()
    """Free blocks whose content can still be found by its prefix."""

    @classmethod
    def of(
        cls, pool: BlockPool, tables: Mapping[str, BlockTable], index: PrefixIndex | None = None
    ) -> PageMap:
        """What ``pool`` looks like now, the tables under the names to show."""
        held = (HeldBlocks(name, t.num_tokens, tuple(t.blocks)) for name, t in tables.items())
        known: Iterable[int] = () if index is None else index
        cached = frozenset(block for block in known if pool.ref_count(block) == 0)
        return cls(pool.num_blocks, pool.block_size, tuple(held), cached)

    @cached_property
    def num_holders(self) -> Mapping[int, int]:
        """For each held block, how many sequences hold it."""
        return Counter(block for sequence in self.sequences for block in sequence.blocks)

    @property
    def num_held(self) -> int:
        """Blocks that a sequence holds."""
        return len(self.num_holders)

    @property
    def num_shared(self) -> int:
        """Blocks that more than one sequence holds."""
        return sum(count > 1 for count in self.num_holders.values())

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds and whose content cannot be found again."""
        return self.num_blocks - self.num_held - len(self.cached)

    def lines(self, width: int = 80) -> Iterator[Line]:
        """The picture, line by line: a sentence, then none wider than ``width`` (80 or more)."""
        yield [(self._summary(), "")]
        yield []
        cells = "".join(self._cells())
        yield from self._grid(cells, width)
        yield []
        yield _legend(set(cells))
        if self.sequences:
            yield []
            yield from self._tables(width)

    def __str__(self) -> str:
        return "\n".join("".join(text for text, _ in line).rstrip() for line in self.lines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        for line in self.lines(options.max_width):
            yield Text.assemble(*line)

    def _summary(self) -> str:
        count = len(self.sequences)
        return (
            f"{count} sequence{'s hold' if count != 1 else ' holds'} {self.num_held} of "
            f"{plural(self.num_blocks, 'block')}, {self.num_shared} shared; "
            f"{len(self.cached)} cached, {self.num_free} free"
        )

    def _grid(self, cells: str, width: int) -> Iterator[Line]:
        gutter = max(2, len(str(self.num_blocks - 1)))
        size = _cells_per_row(width - gutter - 2)
        rows = ((start, cells[start : start + size]) for start in range(0, len(cells), size))
        for num_lines, (_, run) in enumerate(groupby(rows, _likeness)):
            (start, row), *others = run
            if num_lines == MAX_LINES:
                yield [(f"{'':{gutter}}  ... not shown: blocks {start} to {len(cells) - 1}", "dim")]
                return
            yield [(f"{start:{gutter}}  ", "dim"), *_row(row)]
            if others:
                count = sum(len(row) for _, row in others)
                note = f"... {count} more like these, to block {start + len(row) + count - 1}"
                yield [(f"{'':{gutter}}  {note}", "dim")]

    def _cells(self) -> list[str]:
        """One sign for each block."""
        cells = [FREE] * self.num_blocks
        for block in self.cached:
            cells[block] = CACHED
        for position, sequence in enumerate(self.sequences):
            letter = LETTERS[position] if position < len(LETTERS) else OTHER
            for block in sequence.blocks:
                count = self.num_holders[block]
                cells[block] = letter if count == 1 else str(count) if count < 10 else MANY
        return cells

    def _tables(self, width: int) -> Iterator[Line]:
        names = max(8, *(len(sequence.name) for sequence in self.sequences))
        margin = " " * (max(2, len(str(self.num_blocks - 1))) - 1)
        header = f"{'sequence':{names}}  tokens  blocks  unused  block table (* shared)"
        yield [(f"{margin}   {header}", "dim")]
        for position, sequence in enumerate(self.sequences[:MAX_LINES]):
            blocks, tokens = len(sequence.blocks), sequence.num_tokens
            unused = blocks * self.block_size - tokens
            text = f"  {sequence.name:{names}}  {tokens:6}  {blocks:6}  {unused:6}  "
            room = width - len(margin) - 1 - len(text)
            letter = LETTERS[position]
            yield [(margin, ""), (letter, _style(letter)), (text + self._table(sequence, room), "")]
        if len(self.sequences) > MAX_LINES:
            yield [(f"{margin}   ... and {len(self.sequences) - MAX_LINES} more", "dim")]

    def _table(self, sequence: HeldBlocks, room: int) -> str:
        """A block table as runs of ascending blocks, cut to ``room`` characters."""
        text = ""
        for run in self._runs(sequence.blocks):
            if len(text) + len(run) + len(" ...") > room:
                return f"{text}..."
            text += f"{run} "
        return text.rstrip()

    def _runs(self, blocks: Iterable[int]) -> Iterator[str]:
        placed = (
            (block, block - position, self.num_holders[block] > 1)
            for position, block in enumerate(blocks)
        )
        for (_, is_shared), run in groupby(placed, lambda item: item[1:]):
            members = [block for block, *_ in run]
            text = f"{members[0]}-{members[-1]}" if len(members) > 1 else f"{members[0]}"
            yield text + "*" * is_shared


def _cells_per_row(width: int) -> int:
    """The most cells, a power of two, that fit with their spaces."""
    cells = 64
    while cells > GROUP and cells + cells // GROUP - 1 > width:
        cells //= 2
    return cells


def _likeness(row: tuple[int, str]) -> str | int:
    """Equal for rows next to each other that are filled with the same sign."""
    start, cells = row
    return cells[0] if len(set(cells)) == 1 else start


def _row(cells: str) -> Line:
    line: Line = []
    for start in range(0, len(cells), GROUP):
        line += [
            ("".join(run), _style(sign)) for sign, run in groupby(cells[start : start + GROUP])
        ]
        line.append((" ", ""))
    return line[:-1]


def _legend(signs: set[str]) -> Line:
    """What each kind of sign in the grid means."""
    line: Line = []
    for example, kind, meaning in (
        ("A", LETTERS, "one sequence"),
        (OTHER, OTHER, "one of the other sequences"),
        ("2", string.digits + MANY, "shared by so many"),
        (CACHED, CACHED, "free, content kept"),
        (FREE, FREE, "free"),
    ):
        if signs & set(kind):
            space = "   " if line else " "
            line += [(space, ""), (example, _style(example)), (f" {meaning}", "")]
    return line


def _style(sign: str) -> str:
    if sign in (FREE, CACHED):
        return "dim"
    if sign in LETTERS:
        return f"black on {COLOURS[LETTERS.index(sign) % len(COLOURS)]}"
    return "bold reverse"

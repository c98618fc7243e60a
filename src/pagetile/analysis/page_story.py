"""A demonstration of a block pool, step by step, with the real objects.

Four sequences use a pool of sixteen blocks of four tokens. Each step is a snapshot with a sentence
that says what happened; the pictures of ``pagetile explain pages`` draw them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..kv_cache import BlockPool, BlockTable, PrefixIndex
from .page_map import PageMap

MAX_MODEL_LEN = 24
"""Tokens that an engine without pages would reserve for each sequence."""


@dataclass(frozen=True)
class PageStep:
    """A snapshot of the pool, and what has just happened."""

    caption: str
    pages: PageMap
    written: frozenset[int] = frozenset()
    """Blocks that are written in this step."""
    copy: tuple[int, int] | None = None
    """A block copy ``(source, destination)`` made in this step."""


def page_story() -> list[PageStep]:
    """Return the steps, from an empty pool to the reuse of a cached block.

    Examples:
        >>> [step.pages.num_held for step in page_story()][:3]
        [0, 3, 4]
    """
    pool = BlockPool(num_blocks=16, block_size=4)
    index = PrefixIndex(pool)
    tables: dict[str, BlockTable] = {}
    steps: list[PageStep] = []

    def note(caption: str, *written: int, copy: tuple[int, int] | None = None) -> None:
        pages = PageMap.of(pool, tables, index)
        steps.append(PageStep(caption, pages, frozenset(written), copy))

    note("The pool is empty: 16 blocks of 4 tokens.")
    prompt = list(range(10))
    a = tables["A"] = BlockTable(pool)
    hashes = a.adopt_prefix(index, prompt)
    a.append(len(prompt))
    index.insert(hashes, a.blocks, 2)
    note(
        "A arrives with a prompt of 10 tokens. It takes 3 blocks; the last is half full.", *a.blocks
    )

    a.append(4)
    hashes.extend([*prompt, 10, 11, 12, 13])
    index.insert(hashes, a.blocks, 3)
    note("A generates 4 tokens. A block is taken when one is needed, not before.", *a.blocks[2:])

    b = tables["B"] = BlockTable(pool)
    b.adopt_prefix(index, [*range(8), 50, 51, 52])
    shared = len(b.blocks)
    b.append(3)
    note(
        f"B begins with the same 8 tokens: it adopts {shared} blocks and computes 3 tokens.",
        *b.blocks[shared:],
    )

    c = tables["C"] = a.fork()
    note("A is asked for a second answer, C. It holds all of A's blocks: no memory, no copy.")
    [copy] = c.append(1)
    note("C writes a token of its own. The shared last block is copied first.", copy[1], copy=copy)

    a.free()
    del tables["A"]
    note("A ends. Blocks that B and C hold stay; A's own keep their content until they are reused.")
    c.free()
    del tables["C"]
    note("C ends as well. Full blocks can still be found by their tokens.")

    d = tables["D"] = BlockTable(pool)
    d.adopt_prefix(index, [*prompt, 10, 11, 60, 61])
    found = len(d.blocks)
    d.append(2)
    note(
        f"D repeats A's text so far: {found} blocks are found, one of them was free.", d.blocks[-1]
    )

    e = tables["E"] = BlockTable(pool)
    e.append(4 * pool.num_free)
    note(
        "E needs all that is left. Cached blocks are reused, least recently used first.", *e.blocks
    )
    return steps

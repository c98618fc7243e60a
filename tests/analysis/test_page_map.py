from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pagetile.analysis.page_map import HeldBlocks, PageMap
from pagetile.kv_cache import BlockPool, BlockTable, PrefixIndex


def _grid(page_map: PageMap) -> str:
    """The signs of the grid alone, rows joined."""
    lines = str(page_map).split("\n\n")[1].splitlines()
    return "".join("".join(line.split()[1:]) for line in lines)


def test_every_kind_of_block_has_its_sign():
    held = (HeldBlocks("a", 12, (0, 1, 2)), HeldBlocks("b", 9, (0, 1, 5)), HeldBlocks("c", 4, (0,)))
    page_map = PageMap(10, 4, held, frozenset({7, 8}))
    assert _grid(page_map) == "32A..B.::."
    assert str(page_map).startswith("3 sequences hold 4 of 10 blocks, 2 shared; 2 cached, 4 free\n")
    assert "2 shared by so many" in str(page_map)


def test_block_tables_keep_their_order_and_mark_what_is_shared():
    held = (HeldBlocks("one", 14, (4, 5, 6, 2)), HeldBlocks("two", 12, (4, 5, 9)))
    lines = str(PageMap(16, 4, held)).splitlines()
    assert lines[-2].split() == ["A", "one", "14", "4", "2", "4-5*", "6", "2"]
    assert lines[-1].split() == ["B", "two", "12", "3", "0", "4-5*", "9"]


def test_more_than_nine_holders():
    held = tuple(HeldBlocks(str(i), 1, (3,)) for i in range(10))
    assert _grid(PageMap(5, 1, held)) == "...#."


def test_an_empty_pool():
    assert str(PageMap(3, 1, ())) == (
        "0 sequences hold 0 of 3 blocks, 0 shared; 0 cached, 3 free\n\n 0  ...\n\n . free"
    )


def test_long_stretches_are_one_line():
    page_map = PageMap(100_000, 16, (HeldBlocks("a", 16, (5,)),), frozenset(range(50_000, 60_000)))
    lines = str(page_map).splitlines()
    assert len(lines) < 20
    assert any("to block 99999" in line for line in lines)
    assert any("more like these" in line and "59" in line for line in lines)


def test_a_full_pool_is_cut_to_what_can_be_read():
    held = tuple(HeldBlocks(f"prompt {i}", 500, tuple(range(i, 60_000, 100))) for i in range(100))
    text = str(PageMap(60_000, 1, held))
    assert len(text.splitlines()) < 75
    assert "not shown: blocks 2048 to 59999" in text
    assert "... and 68 more" in text
    assert "+ one of the other sequences" in text


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_too_wide(width):
    held = tuple(
        HeldBlocks(f"prompt {i}, sample 10", 500, tuple(range(i * 3, 70_000, 997)))
        for i in range(9)
    )
    for line in list(PageMap(99_999, 16, held).lines(width))[1:]:
        assert len("".join(text for text, _ in line)) <= width


@given(
    st.integers(1, 400).flatmap(
        lambda n: st.tuples(
            st.just(n),
            st.lists(st.sets(st.integers(0, n - 1)), max_size=5),
            st.sets(st.integers(0, n - 1)),
        )
    )
)
def test_counts_and_signs_agree(drawn):
    num_blocks, tables, cached = drawn
    cached -= set().union(*tables)
    held = tuple(HeldBlocks(str(i), len(t), tuple(t)) for i, t in enumerate(tables))
    page_map = PageMap(num_blocks, 1, held, frozenset(cached))
    cells = page_map._cells()
    assert len(cells) == num_blocks
    assert cells.count(":") == len(cached)
    assert num_blocks - cells.count(".") - len(cached) == page_map.num_held
    assert sum(cell.isdigit() for cell in cells) == page_map.num_shared


def test_a_snapshot_does_not_follow_the_pool():
    pool = BlockPool(8, block_size=4)
    index = PrefixIndex(pool)
    done = BlockTable(pool)
    done.append(8)
    index.insert(index.block_hashes(range(8)), done.blocks, 2)
    table = BlockTable(pool)
    table.append(6)
    fork = table.fork()
    done.free()
    page_map = PageMap.of(pool, {"parent": table, "fork": fork}, index)
    table.free()
    fork.append(4)
    assert _grid(page_map) == "::22...."
    assert page_map.cached == {0, 1}
    assert [held.name for held in page_map.sequences] == ["parent", "fork"]
    assert page_map.sequences[1].num_tokens == 6


def test_colours_only_where_they_can_be_seen():
    page_map = PageMap(10, 4, (HeldBlocks("a", 12, (0, 1, 2)),))
    plain, coloured = io.StringIO(), io.StringIO()
    Console(file=plain, width=80).print(page_map)
    Console(file=coloured, width=80, force_terminal=True, color_system="standard").print(page_map)
    assert "\x1b" not in plain.getvalue()
    assert "\x1b[30;46mAAA" in coloured.getvalue()
    assert [line.rstrip() for line in plain.getvalue().splitlines()] == str(page_map).splitlines()

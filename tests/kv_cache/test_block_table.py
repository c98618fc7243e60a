import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetile.errors import DTypeError, OutOfBlocksError, ShapeError
from pagetile.kv_cache import BlockPool, BlockTable, PrefixIndex


def make(num_blocks=8, block_size=4, num_tokens=0):
    pool = BlockPool(num_blocks, block_size)
    table = BlockTable(pool)
    table.append(num_tokens)
    return pool, table


def test_a_pool_and_a_table_show_what_they_hold():
    pool, table = make(num_tokens=5)
    assert repr(pool) == "<BlockPool: 6 of 8 blocks of 4 tokens free>"
    assert repr(table) == "<BlockTable: 5 tokens in blocks [0, 1]>"


@given(
    block_size=st.integers(1, 9),
    num_tokens=st.integers(0, 40),
    data=st.data(),
)
def test_every_token_lies_where_the_definition_says(block_size, num_tokens, data):
    pool = BlockPool(80, block_size)
    shuffled = data.draw(st.permutations(pool.allocate(80)))
    pool.release(shuffled)
    table = BlockTable(pool)
    table.append(num_tokens)
    end = data.draw(st.integers(0, num_tokens))
    start = data.draw(st.integers(0, end))
    assert table.slots(start, end) == [
        table.blocks[t // block_size] * block_size + t % block_size for t in range(start, end)
    ]


@given(
    block_size=st.integers(1, 5),
    num_tokens=st.integers(0, 12),
    num_new_tokens=st.integers(0, 12),
    is_shared=st.booleans(),
)
def test_blocks_needed_is_what_append_takes(block_size, num_tokens, num_new_tokens, is_shared):
    pool, table = make(64, block_size, num_tokens)
    fork = table.fork() if is_shared else None
    before = pool.num_free
    needed = table.blocks_needed(num_new_tokens)
    assert pool.num_free == before
    table.append(num_new_tokens)
    assert pool.num_free == before - needed
    pool.check([table.blocks, fork.blocks] if fork else [table.blocks])


def test_no_block_is_taken_before_a_token_needs_it():
    _, table = make(block_size=4, num_tokens=4)
    assert table.blocks == [0]
    assert table.blocks_needed(0) == 0
    assert table.blocks_needed(1) == 1


@pytest.mark.parametrize("question_or_command", ["blocks_needed", "append"])
def test_a_negative_number_of_tokens_is_an_error(question_or_command):
    _, table = make(num_tokens=3)
    with pytest.raises(ShapeError, match="num_new_tokens=-1"):
        getattr(table, question_or_command)(-1)
    assert table.num_tokens == 3


@pytest.mark.parametrize("is_shared", [False, True])
def test_an_append_that_finds_too_few_blocks_changes_nothing(is_shared):
    pool, table = make(num_blocks=3, block_size=4, num_tokens=6)
    tables = [table, table.fork()] if is_shared else [table]
    with pytest.raises(OutOfBlocksError, match="but 1 of 3 are free"):
        table.append(3 if is_shared else 7)
    assert (table.blocks, table.num_tokens) == ([0, 1], 6)
    pool.check([t.blocks for t in tables])


def test_the_first_writer_into_a_shared_block_copies_and_the_last_does_not():
    pool, table = make(block_size=4, num_tokens=6)
    first, second = table.fork(), table.fork()
    assert first.append(1) == [(1, 2)]
    assert second.append(1) == [(1, 3)]
    assert table.append(1) == []
    assert (table.blocks, first.blocks, second.blocks) == ([0, 1], [0, 2], [0, 3])
    pool.check([table.blocks, first.blocks, second.blocks])


def test_a_shared_full_block_is_not_copied():
    pool, table = make(block_size=4, num_tokens=8)
    fork = table.fork()
    assert fork.append(1) == []
    assert (table.blocks, fork.blocks) == ([0, 1], [0, 1, 2])
    pool.check([table.blocks, fork.blocks])


def test_the_last_blocks_of_a_sequence_are_reused_first():
    pool, table = make(num_blocks=3, block_size=4, num_tokens=12)
    table.free()
    assert list(pool.free_blocks()) == [2, 1, 0]


def test_a_table_freed_twice_is_empty_and_has_released_once():
    pool, table = make(block_size=4, num_tokens=6)
    fork = table.fork()
    table.free()
    table.free()
    assert (table.blocks, table.num_tokens) == ([], 0)
    pool.check([fork.blocks])


@pytest.mark.parametrize(("keep", "blocks"), [(9, 3), (8, 2), (5, 2), (4, 1), (0, 0)])
def test_truncate_gives_back_whole_blocks_last_first(keep, blocks):
    pool, table = make(num_blocks=3, block_size=4, num_tokens=12)
    table.truncate(keep)
    assert (table.blocks, table.num_tokens) == ([0, 1, 2][:blocks], keep)
    assert list(pool.free_blocks()) == [2, 1, 0][: 3 - blocks]
    pool.check([table.blocks])


@pytest.mark.parametrize("num_tokens", [-1, 7])
def test_truncate_outside_the_sequence_is_an_error(num_tokens):
    _, table = make(num_tokens=6)
    with pytest.raises(ShapeError, match=rf"truncate\({num_tokens}\).*, expected 0 to 6: append"):
        table.truncate(num_tokens)


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (3, 2), (0, 7), (7, 7)])
def test_slots_outside_the_sequence_are_an_error(start, end):
    _, table = make(num_tokens=6)
    with pytest.raises(ShapeError, match=rf"slots\({start}, {end}\).*num_tokens=6, .*: append"):
        table.slots(start, end)


@pytest.mark.parametrize("wrong", [1.0, "1", None])
def test_positions_are_integers(wrong):
    _, table = make(num_tokens=6)
    with pytest.raises(ShapeError, match=f"start={wrong!r}, expected an integer"):
        table.slots(wrong, 2)
    with pytest.raises(ShapeError, match=f"end={wrong!r}, expected an integer"):
        table.slots(0, wrong)
    with pytest.raises(ShapeError, match=f"num_tokens={wrong!r}, expected an integer"):
        table.truncate(wrong)
    assert table.num_tokens == 6


def finish(pool, index, num_tokens):
    """Compute, index and free a sequence of tokens 0, 1, 2, …; returns its blocks."""
    table = BlockTable(pool)
    table.append(num_tokens)
    index.insert(index.block_hashes(range(num_tokens)), table.blocks, num_tokens // pool.block_size)
    blocks = table.blocks.copy()
    table.free()
    return blocks


def test_adopted_blocks_are_held_and_full():
    pool = BlockPool(8, block_size=4)
    index = PrefixIndex(pool)
    blocks = finish(pool, index, 8)
    table = BlockTable(pool)
    hashes = table.adopt_prefix(index, range(9))
    assert (table.blocks, table.num_tokens, len(hashes)) == (blocks, 8, 2)
    assert table.append(1) == []
    pool.check([table.blocks])


def test_the_block_of_the_last_token_is_left_to_be_computed():
    pool = BlockPool(8, block_size=4)
    index = PrefixIndex(pool)
    blocks = finish(pool, index, 8)
    table = BlockTable(pool)
    table.adopt_prefix(index, range(8))
    assert (table.blocks, table.num_tokens) == (blocks[:1], 4)
    table.free()
    table.adopt_prefix(index, [])
    assert table.num_tokens == 0
    table.adopt_prefix(index, range(8), max_blocks=2)
    assert table.blocks == blocks


def test_a_block_that_was_reused_since_a_match_is_not_adopted():
    pool = BlockPool(2, block_size=4)
    index = PrefixIndex(pool)
    blocks = finish(pool, index, 8)
    hashes = index.block_hashes(range(8))
    assert index.match(hashes) == blocks
    [reused] = pool.allocate()  # the last block's content is gone
    table = BlockTable(pool)
    table.adopt_prefix(index, hashes)
    assert table.blocks == blocks[:1] != [reused]
    pool.check([table.blocks, [reused]])


def test_only_an_empty_table_adopts():
    pool, table = make(block_size=4, num_tokens=1)
    with pytest.raises(ValueError, match=r"adopt_prefix\(\) on a table of 1 block,"):
        table.adopt_prefix(PrefixIndex(pool), [1, 2])
    pool.check([table.blocks])


def test_blocks_of_another_pool_are_not_adopted():
    pool, other = BlockPool(2, block_size=4), BlockPool(2, block_size=4)
    table = BlockTable(pool)
    with pytest.raises(ValueError, match="the index belongs to another pool"):
        table.adopt_prefix(PrefixIndex(other), [1, 2])
    assert table.num_tokens == 0
    pool.check([[]])


@pytest.mark.parametrize("pool", ["4", None, 8])
def test_a_table_takes_blocks_from_a_pool(pool):
    with pytest.raises(
        DTypeError, match=f"pool is of type {type(pool).__name__}, expected a BlockPool"
    ):
        BlockTable(pool)


def test_tokens_are_reserved_by_their_number():
    _, table = make()
    with pytest.raises(ShapeError, match=r"num_new_tokens=\[1, 2\], expected an integer"):
        table.append([1, 2])
    assert table.num_tokens == 0


def test_a_full_block_that_was_cut_is_announced_before_it_is_overwritten():
    reused = []
    pool = BlockPool(8, block_size=4)
    pool.add_reuse_listener(reused.append)
    table = BlockTable(pool)
    table.append(8)
    del reused[:]
    table.truncate(6)
    assert reused == []
    table.append(1)
    assert reused == [1]
    table.append(1)
    assert reused == [1]


def test_a_cut_at_the_end_of_a_block_overwrites_nothing():
    reused = []
    pool = BlockPool(8, block_size=4)
    pool.add_reuse_listener(reused.append)
    table = BlockTable(pool)
    table.append(8)
    table.truncate(6)
    table.truncate(4)
    del reused[:]
    assert table.append(1) == []
    assert reused == table.blocks[1:]


def test_the_last_holder_of_a_cut_block_announces_it_even_if_another_cut_it():
    reused = []
    pool = BlockPool(8, block_size=4)
    pool.add_reuse_listener(reused.append)
    table = BlockTable(pool)
    table.append(4)
    table.truncate(3)
    fork = table.fork()
    del reused[:]
    assert table.append(1) == [(0, 1)]
    assert reused == [1]
    assert fork.append(1) == []
    assert reused == [1, 0]

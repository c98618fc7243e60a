import ast
from pathlib import Path

import pytest

import pagetile.kv_cache
from pagetile.errors import DTypeError, OutOfBlocksError, ShapeError
from pagetile.kv_cache import BlockPool

BLOCK_SIZE = 4


def free_list(pool):
    return list(pool.free_blocks())


def test_a_new_pool_hands_out_every_block_in_order():
    pool = BlockPool(4, BLOCK_SIZE)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate() == [3]
    assert (pool.num_blocks, pool.num_free) == (4, 0)


def test_a_block_is_shared_until_one_holder_is_left():
    pool = BlockPool(2, BLOCK_SIZE)
    [block] = pool.allocate()
    found = []
    for change in (pool.retain, pool.retain, pool.release, pool.release, pool.release):
        change([block])
        found.append(pool.num_shared)
        pool.check([[block]] * pool.ref_count(block))
    assert found == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_has_at_least_one_block(num_blocks):
    with pytest.raises(ShapeError, match=f"num_blocks={num_blocks}"):
        BlockPool(num_blocks, BLOCK_SIZE)


def test_the_least_recently_released_block_is_reused_first():
    pool = BlockPool(4, BLOCK_SIZE)
    pool.allocate(4)
    for block in (2, 0, 3, 1):
        pool.release([block])
    assert pool.allocate(4) == [2, 0, 3, 1]


def test_blocks_are_released_in_the_order_given():
    pool = BlockPool(4, BLOCK_SIZE)
    pool.release(pool.allocate(3)[::-1])
    assert free_list(pool) == [3, 2, 1, 0]


def test_allocating_nothing_changes_nothing():
    pool = BlockPool(2, BLOCK_SIZE)
    assert pool.allocate(0) == []
    assert free_list(pool) == [0, 1]


def test_too_large_a_request_takes_nothing_and_says_the_numbers():
    pool = BlockPool(5, BLOCK_SIZE)
    pool.allocate(2)
    assert pool.can_allocate(3)
    assert not pool.can_allocate(4)
    with pytest.raises(OutOfBlocksError, match=r"4 blocks needed, but 3 of 5 are free"):
        pool.allocate(4)
    assert free_list(pool) == [2, 3, 4]
    pool.check([[0, 1]])


def test_a_negative_number_of_blocks_is_an_error():
    pool = BlockPool(2, BLOCK_SIZE)
    assert not pool.can_allocate(-1)
    with pytest.raises(ShapeError, match="n=-1"):
        pool.allocate(-1)
    assert pool.num_free == 2


def test_a_shared_block_is_free_when_its_last_holder_leaves():
    pool = BlockPool(1, BLOCK_SIZE)
    pool.allocate()
    pool.retain([0])
    assert pool.ref_count(0) == 2
    pool.release([0])
    assert (pool.ref_count(0), pool.num_free) == (1, 0)
    pool.release([0])
    assert (pool.ref_count(0), pool.num_free) == (0, 1)


@pytest.mark.parametrize("block", [0, 2, 4], ids=["oldest", "middle", "youngest"])
def test_a_free_block_is_retained_from_anywhere_in_the_list(block):
    pool = BlockPool(5, BLOCK_SIZE)
    pool.retain([block])
    assert free_list(pool) == [b for b in range(5) if b != block]
    pool.check([[block]])


def test_a_block_retained_twice_in_one_call_has_two_more_holders():
    pool = BlockPool(2, BLOCK_SIZE)
    pool.retain([1, 1])
    assert (pool.ref_count(1), pool.num_free) == (2, 1)
    pool.release([1, 1])
    assert free_list(pool) == [0, 1]


@pytest.mark.parametrize(
    "blocks",
    [[0, 2], [0, 0]],
    ids=["a free block", "more times than it has holders"],
)
def test_a_release_too_many_raises_and_releases_nothing(blocks):
    pool = BlockPool(3, BLOCK_SIZE)
    pool.allocate(2)
    with pytest.raises(ValueError, match=rf"block {blocks[-1]} is released \d times"):
        pool.release(blocks)
    pool.check([[0], [1]])


@pytest.mark.parametrize("block", [-1, 3])
@pytest.mark.parametrize("command", ["retain", "release"])
def test_a_block_of_another_pool_raises_and_changes_nothing(command, block):
    pool = BlockPool(3, BLOCK_SIZE)
    pool.allocate()
    with pytest.raises(ValueError, match=rf"block {block} is not one of 0 \.\. 2"):
        getattr(pool, command)([0, block])
    with pytest.raises(ValueError, match=f"block {block}"):
        pool.ref_count(block)
    pool.check([[0]])


def test_a_listener_sees_the_blocks_that_are_handed_out_or_overwritten_and_no_others():
    reused = []
    pool = BlockPool(3, BLOCK_SIZE)
    pool.add_reuse_listener(reused.append)
    pool.allocate(2)
    pool.release([1])
    pool.retain([1])
    assert reused == [0, 1]
    pool.overwrite(1)
    assert reused == [0, 1, 1]


def corrupt_ref_count(pool):
    pool._ref_counts[0] = 2


def lose_a_block(pool):
    pool._next[3], pool._previous[5] = 5, 3
    pool._num_free -= 1


def break_the_backward_links(pool):
    pool._previous[4] = 2


def tie_a_loop(pool):
    pool._next[4], pool._previous[3] = 3, 4


def miscount_the_free_blocks(pool):
    pool._num_free = 4


def miscount_the_shared_blocks(pool):
    pool._num_shared = 1


def hold_a_free_block(pool):
    pool._ref_counts[3] = 1


@pytest.mark.parametrize(
    ("corrupt", "numbers"),
    [
        (corrupt_ref_count, "block 0 has ref count 2 but is in 1 tables"),
        (lose_a_block, "2 entries, 2 distinct; num_free=2; 3 of 6 blocks are held"),
        (break_the_backward_links, r"\[3, 4, 5\] forwards, \[5, 4, 2, 1, 0\] backwards"),
        (tie_a_loop, r"\[3, 4, 3, 4, 3, 4, 3\] forwards"),
        (miscount_the_free_blocks, "3 entries, 3 distinct; num_free=4"),
        (miscount_the_shared_blocks, "num_shared=1, but 0 blocks are shared"),
        (hold_a_free_block, "4 of 6 blocks are held"),
    ],
)
def test_check_finds_a_corrupt_pool(corrupt, numbers):
    pool = BlockPool(6, BLOCK_SIZE)
    table = pool.allocate(3)
    pool.check([table])
    corrupt(pool)
    with pytest.raises(AssertionError, match=numbers):
        pool.check([table])


@pytest.mark.parametrize(
    ("tables", "numbers"),
    [
        ([[0, 1]], "block 2 has ref count 1 but is in 0 tables"),
        ([[0, 1, 2], [1]], "block 1 has ref count 1 but is in 2 tables"),
        ([[0, 1, 2, 1]], "block 1 is 2 times in table"),
        ([[0, 1, 2, 3]], "has block 3, which is free"),
        ([[0, 1, 2, 6]], "has block 6, which is free"),
    ],
    ids=["leak", "missing holder", "twice in a table", "free block", "unknown block"],
)
def test_check_finds_tables_that_do_not_match(tables, numbers):
    pool = BlockPool(6, BLOCK_SIZE)
    pool.allocate(3)
    with pytest.raises(AssertionError, match=numbers):
        pool.check(tables)


def test_no_check_vanishes_under_python_O():
    for path in Path(pagetile.kv_cache.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Assert)], path


@pytest.mark.parametrize("num_blocks", [0, -1, 4.0, "a", None])
def test_a_pool_is_of_a_whole_number_of_blocks(num_blocks):
    with pytest.raises(ShapeError, match=f"num_blocks={num_blocks!r}, expected"):
        BlockPool(num_blocks, BLOCK_SIZE)


def test_a_pool_that_would_exhaust_memory_is_refused():
    with pytest.raises(ShapeError, match=r"num_blocks=1000000000, expected at most 67108864: use"):
        BlockPool(10**9, 1)


@pytest.mark.parametrize("block_size", [0, -4, 4.0, "4", None])
def test_a_block_holds_a_whole_number_of_tokens(block_size):
    with pytest.raises(ShapeError, match=f"block_size={block_size!r}, expected"):
        BlockPool(1, block_size)


@pytest.mark.parametrize("n", [1.5, "1", None])
def test_a_fraction_of_a_block_is_not_allocated(n):
    pool = BlockPool(2, BLOCK_SIZE)
    with pytest.raises(ShapeError, match=f"n={n!r}, expected an integer"):
        pool.allocate(n)
    assert pool.num_free == 2


@pytest.mark.parametrize("wrong", [1.5, "1", None])
def test_a_question_is_asked_with_an_integer(wrong):
    pool = BlockPool(2, BLOCK_SIZE)
    with pytest.raises(ShapeError, match=f"n={wrong!r}, expected an integer"):
        pool.can_allocate(wrong)
    if wrong != 1.5:  # a float is compared like an integer, and then found to be none
        with pytest.raises(ShapeError, match=f"block={wrong!r}, expected an integer"):
            pool.ref_count(wrong)
    assert not pool.can_allocate(-1)


@pytest.mark.parametrize("tables", [None, 3])
def test_a_check_takes_a_list_of_tables(tables):
    with pytest.raises(DTypeError, match=r"expected a list of lists: pass \[table\.blocks for"):
        BlockPool(2, BLOCK_SIZE).check(tables)


@pytest.mark.parametrize("command", ["retain", "release"])
@pytest.mark.parametrize("blocks", [0, None, "01", [0.0]])
def test_blocks_are_given_as_a_list_of_integers(command, blocks):
    pool = BlockPool(2, BLOCK_SIZE)
    pool.allocate()
    with pytest.raises(DTypeError, match="expected a list of block numbers"):
        getattr(pool, command)(blocks)
    pool.check([[0]])

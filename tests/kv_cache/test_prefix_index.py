import pickle
from copy import deepcopy
from itertools import product

import pytest

from pagetile.errors import DTypeError, ShapeError
from pagetile.kv_cache import BlockPool, BlockTable, PrefixIndex, prefix_index


def make(block_size, index_class=PrefixIndex, num_blocks=200, **options):
    return index_class(BlockPool(num_blocks, block_size), **options)


def hashes_of(index, token_ids, salt=None):
    return index.block_hashes(token_ids, cache_salt=salt)


def insert(index, token_ids, blocks, salt=None):
    index.insert(hashes_of(index, token_ids, salt), blocks, len(blocks))


def match(index, token_ids, salt=None):
    return index.match(hashes_of(index, token_ids, salt))


class LastByte(PrefixIndex):
    """A hash of the low byte of the last token id only, so that many tokens collide."""

    @staticmethod
    def _digest(data):
        return data[-8:-7]


class Verbatim(PrefixIndex):
    """The digest is the hashed bytes, so digests are equal only if encodings are."""

    @staticmethod
    def _digest(data):
        return data


@pytest.mark.parametrize("pool", [4, None])
def test_an_index_is_made_with_its_pool(pool):
    with pytest.raises(
        DTypeError, match=f"pool is of type {type(pool).__name__}, expected a BlockPool"
    ):
        PrefixIndex(pool)


def test_a_block_that_the_pool_hands_out_again_is_not_found():
    """Otherwise a sequence would read keys and values of other tokens."""
    pool = BlockPool(1, block_size=2)
    index = PrefixIndex(pool)
    [block] = pool.allocate()
    insert(index, [5, 6], [block])
    pool.release([block])
    assert match(index, [5, 6]) == [block]
    pool.allocate()
    assert match(index, [5, 6]) == []


def test_hashes_of_another_index_are_refused():
    index, other = make(2), make(2)
    hashes = hashes_of(other, [1, 2])
    with pytest.raises(ValueError, match="made by another index"):
        index.match(hashes)
    with pytest.raises(ValueError, match="made by another index"):
        index.insert(hashes, [0], 1)
    assert len(index) == 0


def test_a_block_of_another_pool_is_refused_and_nothing_is_registered():
    index = make(1, num_blocks=2)
    with pytest.raises(ValueError, match="block 2 is not one of"):
        index.insert(hashes_of(index, [1, 2]), [0, 2], 2)
    assert len(index) == 0


def test_salts_have_their_types():
    with pytest.raises(DTypeError, match="cache_salt is b'a', expected a string"):
        make(1).block_hashes(cache_salt=b"a")
    with pytest.raises(DTypeError, match="salt is 'a', expected bytes"):
        make(1, salt="a")


@pytest.mark.parametrize(
    ("token_ids", "found"),
    [
        ([1, 2, 3, 4, 5, 6], [7, 5, 0]),
        ([1, 2, 3, 4, 5, 6, 9, 9], [7, 5, 0]),
        ([1, 2, 3, 4, 5], [7, 5]),
        ([1, 2, 3, 9, 5, 6], [7]),
        ([9, 2, 3, 4, 5, 6], []),
        ([3, 4], []),
        ([1], []),
        ([], []),
    ],
)
def test_the_longest_prefix_of_full_blocks_is_found(token_ids, found):
    index = make(2)
    insert(index, [1, 2, 3, 4, 5, 6], [7, 5, 0])
    assert match(index, token_ids) == found


@pytest.mark.parametrize(("max_blocks", "found"), [(None, [7, 5]), (9, [7, 5]), (1, [7]), (0, [])])
def test_no_more_than_max_blocks_are_found(max_blocks, found):
    index = make(2)
    insert(index, [1, 2, 3, 4], [7, 5])
    assert index.match(hashes_of(index, [1, 2, 3, 4]), max_blocks) == found


def test_a_block_that_is_not_full_is_not_registered():
    index = make(4)
    hashes = hashes_of(index, [1, 2, 3, 4, 5])
    index.insert(hashes, [0, 1], 1)
    assert 1 not in index
    with pytest.raises(ShapeError, match="num_full_blocks=2 but there are hashes of 1 full blocks"):
        index.insert(hashes, [0, 1], 2)


def test_a_table_shorter_than_claimed_is_an_error():
    index = make(1)
    with pytest.raises(ShapeError, match=r"num_full_blocks=2 .* the table has 1"):
        index.insert(hashes_of(index, [1, 2]), [0], 2)
    assert len(index) == 0


def test_the_first_holder_of_a_content_keeps_it():
    index = make(2)
    insert(index, [1, 2], [3])
    insert(index, [1, 2], [4])
    assert match(index, [1, 2]) == [3]
    assert 4 not in index
    index.check()


def test_a_block_found_behind_a_duplicate_is_still_found():
    index = make(1)
    insert(index, [1], [3])
    insert(index, [1, 2], [4, 5])
    assert match(index, [1, 2]) == [3, 5]


def test_what_follows_a_forgotten_block_is_out_of_reach_until_it_is_computed_again():
    index = make(1)
    insert(index, [1, 2, 3], [7, 8, 9])
    index.forget(7)
    assert match(index, [1, 2, 3]) == []
    assert 8 in index
    insert(index, [1], [4])
    assert match(index, [1, 2, 3]) == [4, 8, 9]
    index.check()


def test_forgetting_an_unknown_block_changes_nothing():
    index = make(1)
    insert(index, [1], [0])
    index.forget(5)
    assert len(index) == 1


def test_a_cleared_index_finds_nothing():
    index = make(1)
    insert(index, [1, 2], [0, 1])
    index.clear()
    assert len(index) == 0
    assert match(index, [1, 2]) == []
    index.check()


def test_a_block_registered_again_holds_only_its_new_content():
    index = make(1)
    insert(index, [1], [0])
    insert(index, [2], [0])
    assert (match(index, [1]), match(index, [2])) == ([], [0])
    index.check()


def test_negative_and_large_token_ids_are_told_apart():
    index = make(1)
    insert(index, [-1], [0])
    assert match(index, [2**63 - 1]) == []
    assert match(index, [255]) == []
    assert match(index, [-1]) == [0]


@pytest.mark.parametrize("salt", ["", "a", "A", "ab", "\ud800", None])
def test_only_equal_salts_share(salt):
    index = make(1)
    others = [other for other in ["", "a", "A", "ab", "\ud800", None] if other != salt]
    insert(index, [1], [0], salt)
    assert match(index, [1], salt) == [0]
    assert all(match(index, [1], other) == [] for other in others)


def test_the_operator_salt_enters_every_digest():
    digests = {hashes_of(make(1, salt=s), [1])._last.digest for s in (b"", b"a", b"b")}
    assert len(digests) == 3


def test_no_salt_can_imitate_tokens_or_another_salt():
    field = b"request" + (1).to_bytes(8, "little") + b"X"  # what salt="X" adds to the root
    words = [int.from_bytes(field[i : i + 8], "little") for i in (0, 8)]
    pieces = [b"X", b"request", b"requestX", b"operator", field]
    salts = [b"".join(parts) for n in range(3) for parts in product(pieces, repeat=n)]
    identities = {
        (operator, request, token_ids)
        for operator in salts
        for request in [None, *(salt.decode() for salt in salts)]
        for token_ids in [(), (0,), tuple(words), (*words, 0)]
    }
    digests = {
        hashes_of(make(1, Verbatim, salt=operator), token_ids, request)._last.digest
        for operator, request, token_ids in identities
    }
    assert len(digests) == len(identities) > 2000


def test_a_collision_is_a_miss():
    index = make(1, LastByte)
    insert(index, [1], [0])
    assert match(index, [257]) == []
    insert(index, [257], [5])
    assert 5 not in index
    assert match(index, [1]) == [0]


def test_a_collision_of_an_earlier_block_is_a_miss_too():
    index = make(1, LastByte)
    insert(index, [1, 2, 3], [0, 7, 8])
    index.forget(0)
    insert(index, [257], [4])
    # Block 7 has the digest, the tokens and the parent's digest that 257, 2 asks for.
    assert match(index, [257, 2, 3]) == [4]
    index.check()


def test_tokens_that_spell_out_a_root_are_not_taken_for_it():
    spelled = [int.from_bytes(b"operator", "little"), 0]
    index = make(2, LastByte)
    insert(index, [*spelled, 1, 2], [0, 7])
    assert match(index, [1, 2]) == []
    assert match(index, [*spelled, 1, 2]) == [0, 7]


def test_a_collision_of_salts_is_a_miss():
    index = make(1, LastByte)
    insert(index, [1], [0], salt="x")
    assert match(index, [1], salt="y") == []


def test_each_block_is_hashed_once_as_a_sequence_grows():
    class Counting(PrefixIndex):
        calls = 0

        @staticmethod
        def _digest(data):
            Counting.calls += 1
            return PrefixIndex._digest(data)

    hashes = make(4, Counting).block_hashes()
    for length in range(41):
        hashes.extend(list(range(length)))
    assert len(hashes) == 10
    assert Counting.calls == 11


def test_each_block_is_inserted_once_as_a_sequence_grows():
    class Reads(list):
        def __getitem__(self, part):
            reads.extend(super().__getitem__(part))
            return super().__getitem__(part)

    reads = []
    index = make(1)
    hashes = hashes_of(index, range(6))
    for length in (0, 1, 2, 3, 1, 4, 5, 6):
        index.insert(hashes, Reads(range(length)), length)
    index.insert(hashes.fork(), Reads(range(6)), 6)
    assert reads == [0, 1, 2, 3, 4, 5]


def test_a_prefix_that_was_computed_again_is_compared_once(monkeypatch):
    def count_steps(a, b):
        while a is not b:
            steps.append(a)
            a, b = a.parent, b.parent
        return True

    steps = []
    index = make(1)
    insert(index, range(100), range(100))
    for block in range(50):
        index.forget(block)
    insert(index, range(50), range(100, 150))
    monkeypatch.setattr(prefix_index, "_is_same_prefix", count_steps)
    hashes = hashes_of(index, range(100))
    assert index.match(hashes) == [*range(100, 150), *range(50, 100)]
    assert len(steps) <= 52
    steps.clear()
    assert len(index.match(hashes)) == 100
    assert not steps


def test_an_insert_after_an_adoption_starts_behind_what_was_found():
    index = make(1)
    hashes = hashes_of(index, [1, 2, 3])
    index.insert(hashes, [0, 1, 2], 3)
    index.forget(2)
    BlockTable(index._pool).adopt_prefix(index, hashes)
    index.insert(hashes, [0, 1, 6], 3)
    assert match(index, [1, 2, 3]) == [0, 1, 6]


@pytest.mark.parametrize(
    "token_ids",
    [[1, 2, 3], [1, 2, 3, 9, 5, 6], [1, 2, 9, 4, 5, 6]],
    ids=["shorter", "last token changed", "last block changed"],
)
def test_a_chain_does_not_follow_a_sequence_that_was_cut_or_changed(token_ids):
    hashes = hashes_of(make(2), [1, 2, 3, 4])
    with pytest.raises(ValueError, match=r"call truncate\(\) for a sequence that was cut"):
        hashes.extend(token_ids)
    assert len(hashes) == 2


def test_forked_hashes_go_their_own_ways():
    index = make(1)
    parent = hashes_of(index, [1])
    index.insert(parent, [0], 1)
    fork = parent.fork()
    parent.extend([1, 2])
    fork.extend([1, 3])
    index.insert(parent, [0, 4], 2)
    index.insert(fork, [0, 5], 2)
    assert (match(index, [1, 2]), match(index, [1, 3])) == ([0, 4], [0, 5])


def test_a_very_long_chain_is_compared_and_dropped_without_recursion():
    n = 50_000
    index = make(1, num_blocks=2 * n)
    insert(index, range(n), range(n))
    for block in range(n - 1):
        index.forget(block)
    insert(index, range(n - 1), range(n, 2 * n - 1))
    assert match(index, range(n)) == [*range(n, 2 * n - 1), n - 1]


def test_check_finds_a_block_that_its_digest_does_not_find():
    index = make(1)
    insert(index, [1], [0])
    index._blocks = dict.fromkeys(index._blocks, 9)
    with pytest.raises(AssertionError, match="block 0 is indexed but its digest finds 9"):
        index.check()


def test_check_finds_a_digest_without_a_block():
    index = make(1)
    insert(index, [1, 2], [0, 1])
    del index._links[1]
    with pytest.raises(AssertionError, match=r"2 digests for 1 block$"):
        index.check()


def test_check_finds_tokens_that_have_changed():
    index = make(1)
    insert(index, [1, 2], [0, 1])
    index._links[1].tokens = bytes(8)
    with pytest.raises(AssertionError, match="the digest of block 1"):
        index.check()


@pytest.mark.parametrize("tokens", [[1.5, 1], "abcd", [2**70, 1]], ids=str)
def test_tokens_that_are_no_integers_of_64_bits_are_refused(tokens):
    hashes = make(2).block_hashes()
    with pytest.raises(DTypeError, match="expected integers of 64 bits"):
        hashes.extend(tokens)
    assert len(hashes) == 0


@pytest.mark.parametrize("num_tokens", [0, 3, 4, 7, 8, 11, 20])
def test_a_chain_goes_on_after_a_rollback(num_tokens):
    """It equals a new chain of the remaining tokens and those that replace the others."""
    index = make(4)
    tokens = list(range(100, 111))
    hashes = index.block_hashes()
    hashes.extend(tokens)
    index.insert(hashes, [7, 3], 2)
    hashes.truncate(num_tokens)
    tokens = [*tokens[:num_tokens], *range(200, 210)]
    hashes.extend(tokens)
    fresh = index.block_hashes()
    fresh.extend(tokens)
    assert len(hashes) == len(fresh) == len(tokens) // 4
    blocks = list(range(20, 20 + len(hashes)))
    kept = num_tokens // 4
    blocks[: min(kept, 2)] = [7, 3][:kept]
    index.insert(hashes, blocks, len(hashes))
    assert index.match(fresh) == blocks
    index.check()
    for wrong in (-1, 1.5, "2"):
        with pytest.raises(ShapeError, match=f"num_tokens={wrong!r}, expected"):
            hashes.truncate(wrong)


@pytest.mark.parametrize("num_equal", range(6))
def test_common_blocks_are_those_of_a_common_beginning(num_equal):
    index = make(2)
    one = hashes_of(index, [*range(10), 10])
    other = hashes_of(index, [*range(2 * num_equal), *range(50, 60)])
    assert one.num_common(other) == other.num_common(one) == num_equal
    assert one.num_common(hashes_of(index, range(10), salt="other")) == 0


def test_a_table_in_the_place_of_its_blocks_is_named():
    pool = BlockPool(4, block_size=2)
    index, table = PrefixIndex(pool), BlockTable(pool)
    hashes = table.adopt_prefix(index, [1, 2, 3])
    table.append(3)
    with pytest.raises(DTypeError, match=r"blocks is of type BlockTable.*pass table\.blocks"):
        index.insert(hashes, table, 1)
    with pytest.raises(DTypeError, match=r"holds a BlockTable.*pass table\.blocks"):
        pool.check([table])
    with pytest.raises(DTypeError, match="hashes is of type list, expected a BlockHashes"):
        index.insert([1, 2], table.blocks, 1)
    with pytest.raises(DTypeError, match="index is of type list, expected a PrefixIndex"):
        BlockTable(pool).adopt_prefix([1, 2], index)
    assert len(index) == 0


@pytest.mark.parametrize("tokens", [None, 5, "def f", b"def f"])
def test_tokens_that_are_no_list_are_named_and_nothing_is_held(tokens):
    pool = BlockPool(4, block_size=2)
    index, table = PrefixIndex(pool), BlockTable(pool)
    with pytest.raises(DTypeError, match=r"token_ids is .*, expected a list of token ids"):
        table.adopt_prefix(index, tokens)
    if not isinstance(tokens, (str, bytes)):
        with pytest.raises(DTypeError, match="token_ids is of type"):
            index.block_hashes().extend(tokens)
    pool.check([])


@pytest.mark.parametrize("num_full_blocks", [-1, 0.5, "1", None])
def test_a_number_of_full_blocks_is_a_whole_number(num_full_blocks):
    index = make(2)
    hashes = hashes_of(index, [1, 2, 3, 4])
    with pytest.raises(ShapeError, match=f"num_full_blocks={num_full_blocks!r}, expected"):
        index.insert(hashes, [0, 1], num_full_blocks)
    assert len(index) == 0
    with pytest.raises(DTypeError, match="other is of type list, expected a BlockHashes"):
        hashes.num_common([1, 2])


def test_the_new_tokens_alone_do_not_extend_a_sequence():
    hashes = hashes_of(make(2), [1, 2, 3, 4])
    with pytest.raises(ValueError, match="the whole sequence, not its new tokens alone"):
        hashes.extend([5, 6])


@pytest.mark.parametrize("copy", [lambda x: pickle.loads(pickle.dumps(x)), deepcopy])
def test_a_copy_of_pool_index_and_table_goes_on_by_itself(copy):
    pool = BlockPool(8, 4)
    index, table = PrefixIndex(pool), BlockTable(pool)
    hashes = table.adopt_prefix(index, range(12))
    table.append(12)
    index.insert(hashes, table.blocks, 3)
    new_pool, new_index, new_table = copy((pool, index, table))
    other = BlockTable(new_pool)
    new_hashes = other.adopt_prefix(new_index, range(12))
    assert other.blocks == table.blocks[:2]  # the last one is computed again
    assert new_index.match(new_hashes) == table.blocks
    new_table.free()
    other.free()
    BlockTable(new_pool).append(32)  # takes all blocks, which the new index forgets
    assert new_index.match(new_hashes) == []
    assert index.match(hashes) == table.blocks
    pool.check([table.blocks])
    new_index.check()

"""BlockPool, PrefixIndex and BlockTable driven together against a model made of plain lists.

The model stores for every slot the salt and all tokens up to the one written there, on which keys
and values depend. So it shows from the content whether a prefix hit has other tokens, or a write
reaches another sequence.
"""

from collections import Counter
from functools import cache
from hashlib import sha256
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from pagetile.errors import OutOfBlocksError
from pagetile.kv_cache import BlockPool, BlockTable, PrefixIndex

# Few texts, few tokens and few salts, so that prefixes meet.
TEXTS = ([0] * 12, [0, 0, 0, 1] * 3, [1, 0] * 6)
prompts = st.builds(lambda text, n: text[:n], st.sampled_from(TEXTS), st.integers(0, 12))
token_lists = st.lists(st.integers(0, 1), max_size=5)
salts = st.sampled_from([None, None, None, "", "a"])
twelfths = st.sampled_from([12, 12, 12, 9, 6, 0])

CASES = (
    "hit",
    "copy on write",
    "out of blocks",
    "indexed block reused",
    "indexed block overwritten",
)


class WeakIndex(PrefixIndex):
    """A hash with eight digests, so that nearly every lookup collides."""

    @staticmethod
    def _digest(data):
        return bytes([sha256(data).digest()[0] % 8])


class Sequence:
    """The model's state of one sequence, and the objects under test."""

    def __init__(self, table, hashes, salt):
        self.table, self.hashes, self.salt = table, hashes, salt
        self.tokens, self.blocks, self.num_inserted = [], [], 0

    def history(self, num_tokens):
        """Everything that the keys and values of the last of ``num_tokens`` depend on."""
        return (self.salt, *self.tokens[:num_tokens])


class CacheMachine(RuleBasedStateMachine):
    index_class = PrefixIndex
    events: ClassVar = Counter()

    sequences = Bundle("sequences")

    @initialize(num_blocks=st.integers(3, 32), block_size=st.integers(1, 6))
    def start(self, num_blocks, block_size):
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, block_size)
        self.index = self.index_class(self.pool)
        self.reused = []
        self.pool.add_reuse_listener(self.reused.append)
        self.free = list(range(num_blocks))
        self.memory = [[None] * block_size for _ in range(num_blocks)]
        self.block_of = {}
        self.live = []
        self.events["steps"] -= 1  # the invariant counts this one, and it is no step

    # The model's half of each operation.

    def model_holders(self, block):
        return sum(block in sequence.blocks for sequence in self.live)

    def model_forget(self, block):
        self.block_of = {h: b for h, b in self.block_of.items() if b != block}

    def model_allocate(self, n):
        taken, self.free = self.free[:n], self.free[n:]
        for block in taken:
            self.events["indexed block reused"] += block in self.block_of.values()
            self.model_forget(block)
        return taken

    def model_release(self, sequence, num_kept):
        """Drop the blocks past ``num_kept``, last first."""
        while len(sequence.blocks) > num_kept:
            block = sequence.blocks.pop()
            if not self.model_holders(block):
                self.free.append(block)

    def model_match(self, sequence, tokens, max_blocks):
        found = []
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            block = self.block_of.get((sequence.salt, *tokens[:end]))
            if block is None or len(found) == max_blocks:
                break
            found.append(block)
        return found

    # What several rules need.

    def match(self, sequence, tokens, max_blocks=None):
        """Look up ``tokens``; the blocks that are found must have exactly these."""
        sequence.hashes.extend(tokens)
        found = self.index.match(sequence.hashes, max_blocks)
        histories = [(sequence.salt, *tokens[: end + 1]) for end in range(len(tokens))]
        content = [history for block in found for history in self.memory[block]]
        assert content == histories[: len(content)]
        assert max_blocks is None or len(found) <= max_blocks
        if self.index_class is PrefixIndex:
            assert found == self.model_match(sequence, tokens, max_blocks)
        self.events["hit"] += bool(found)
        sequence.num_inserted = len(found)
        return found

    def write(self, sequence, tokens):
        """Append and write ``tokens``; False, and no change, if the pool is too small."""
        start, end = len(sequence.tokens), len(sequence.tokens) + len(tokens)
        copies_last = (
            bool(tokens)
            and start % self.block_size > 0
            and self.model_holders(sequence.blocks[-1]) > 1
        )
        needed = -(-end // self.block_size) - len(sequence.blocks) + copies_last
        assert sequence.table.blocks_needed(len(tokens)) == needed
        assert self.pool.can_allocate(needed) == (needed <= len(self.free))
        if needed > len(self.free):
            self.events["out of blocks"] += 1
            with pytest.raises(OutOfBlocksError):
                sequence.table.append(len(tokens))
            return False

        del self.reused[:]
        copies = sequence.table.append(len(tokens))
        taken = self.model_allocate(needed)
        assert self.reused[:needed] == taken
        if copies_last:
            self.events["copy on write"] += 1
            shared = sequence.blocks.pop()
            assert copies == [(shared, taken[0])]
            self.memory[taken[0]] = self.memory[shared].copy()
        else:
            assert copies == []
        sequence.blocks += taken
        sequence.tokens += tokens

        for position, slot in enumerate(sequence.table.slots(start, end), start):
            block, offset = divmod(slot, self.block_size)
            if block in self.block_of.values():
                self.events["indexed block overwritten"] += 1
                self.model_forget(block)
            self.memory[block][offset] = sequence.history(position + 1)
        return True

    def admit(self, sequence, tokens, max_blocks=None):
        """Start an empty sequence from what the index has; False if the rest does not fit."""
        found = self.match(sequence, tokens, max_blocks)
        sequence.table.adopt_prefix(self.index, sequence.hashes, max_blocks=max_blocks)
        sequence.blocks = list(found)
        self.free = [block for block in self.free if block not in found]
        num_found = len(found) * self.block_size
        sequence.tokens = list(tokens[:num_found])
        return self.write(sequence, tokens[num_found:])

    def drop(self, sequence):
        sequence.table.free()
        self.model_release(sequence, 0)
        sequence.tokens = []

    def renew_hashes(self, sequence):
        sequence.hashes, sequence.num_inserted = (
            self.index.block_hashes(cache_salt=sequence.salt),
            0,
        )

    def register(self, sequence, written):
        num_full_blocks = len(sequence.tokens) // self.block_size * written // 12
        sequence.hashes.extend(sequence.tokens)
        self.index.insert(sequence.hashes, sequence.table.blocks, num_full_blocks)
        for i in range(sequence.num_inserted, num_full_blocks):
            self.model_forget(sequence.blocks[i])
            history = sequence.history((i + 1) * self.block_size)
            self.block_of.setdefault(history, sequence.blocks[i])
        sequence.num_inserted = max(sequence.num_inserted, num_full_blocks)

    # The steps.

    @rule(target=sequences, tokens=prompts, salt=salts, max_blocks=st.none() | st.integers(0, 3))
    def begin(self, tokens, salt, max_blocks):
        sequence = Sequence(BlockTable(self.pool), self.index.block_hashes(cache_salt=salt), salt)
        self.live.append(sequence)
        if self.admit(sequence, tokens, max_blocks):
            self.register(sequence, 12)
            return sequence
        self.drop(sequence)
        self.live.remove(sequence)
        return multiple()

    @rule(sequence=sequences, tokens=token_lists, written=twelfths)
    def append(self, sequence, tokens, written):
        self.write(sequence, tokens)
        self.register(sequence, written)

    @rule(target=sequences, sequence=sequences, tokens=token_lists)
    def fork(self, sequence, tokens):
        twin = Sequence(sequence.table.fork(), sequence.hashes.fork(), sequence.salt)
        twin.tokens, twin.blocks = sequence.tokens.copy(), sequence.blocks.copy()
        twin.num_inserted = sequence.num_inserted
        self.live.append(twin)
        self.write(twin, tokens)
        return twin

    @rule(sequence=sequences, num_cut=st.integers(0, 9), tokens=token_lists)
    def truncate(self, sequence, num_cut, tokens):
        num_tokens = max(len(sequence.tokens) - num_cut, 0)
        sequence.table.truncate(num_tokens)
        self.model_release(sequence, -(-num_tokens // self.block_size))
        del sequence.tokens[num_tokens:]
        if num_tokens < len(sequence.hashes) * self.block_size:
            self.renew_hashes(sequence)
        self.write(sequence, tokens)

    @rule(sequence=sequences, written=twelfths)
    def insert(self, sequence, written):
        self.register(sequence, written)

    @rule(sequence=sequences)
    def preempt_and_begin_again(self, sequence):
        tokens = sequence.tokens
        self.drop(sequence)
        if not self.admit(sequence, tokens):
            self.renew_hashes(sequence)  # it goes on with what was found

    @rule(sequence=consumes(sequences))
    def finish(self, sequence):
        self.drop(sequence)
        self.live.remove(sequence)

    @rule(n=st.integers(0, 4), data=st.data())
    def use_for_something_else(self, n, data):
        n = min(n, len(self.free))
        taken = self.pool.allocate(n)
        assert taken == self.model_allocate(n)
        for block in taken:
            self.memory[block] = [None] * self.block_size
        released = data.draw(st.permutations(taken))
        self.pool.release(released)
        self.free += released

    # What holds after every step.

    @invariant()
    def nothing_is_lost(self):
        self.events["steps"] += 1
        self.pool.check([sequence.table.blocks for sequence in self.live])
        self.index.check()

    @invariant()
    def the_pool_is_as_in_the_model(self):
        assert list(self.pool.free_blocks()) == self.free
        assert self.pool.num_free == len(self.free)
        for block in range(self.pool.num_blocks):
            assert self.pool.ref_count(block) == self.model_holders(block)

    @invariant()
    def every_sequence_reads_what_it_wrote(self):
        for sequence in self.live:
            assert sequence.table.blocks == sequence.blocks
            assert sequence.table.num_tokens == len(sequence.tokens)
            slots = sequence.table.slots(0, len(sequence.tokens))
            content = [
                self.memory[slot // self.block_size][slot % self.block_size] for slot in slots
            ]
            assert content == [sequence.history(end + 1) for end in range(len(slots))]

    @invariant()
    def the_index_is_as_in_the_model(self):
        if self.index_class is PrefixIndex:
            indexed = [block for block in range(self.pool.num_blocks) if block in self.index]
            assert indexed == sorted(self.block_of.values())
            assert len(self.index) == len(indexed)


class WeakHashMachine(CacheMachine):
    index_class = WeakIndex
    events: ClassVar = Counter()


@cache
def drive(machine):
    """Run the machine once in this process; what it did, by name."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=100, stateful_step_count=80, derandomize=True, database=None, deadline=None
        ),
    )
    return machine.events


def test_the_cache_agrees_with_its_model_after_every_step():
    drive(CacheMachine)


def test_a_hash_full_of_collisions_never_finds_wrong_content():
    drive(WeakHashMachine)


def test_ten_thousand_steps_were_executed_and_met_every_case():
    exact, weak = drive(CacheMachine), drive(WeakHashMachine)
    assert exact["steps"] + weak["steps"] >= 10_000
    for case in CASES:
        assert exact[case] >= 20, case
    assert weak["hit"] >= 100

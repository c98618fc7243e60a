"""Who computes how many tokens in the next step: continuous batching over one block pool.

Every step has a budget of tokens. Running sequences come first, in order of arrival: one token
each in decode, a chunk of the prompt in prefill. What is left admits waiting ones. When the
pool runs dry, a later sequence gives way: its blocks are freed and it waits, first in line, to
be computed again. The first running sequence never gives way, and any sequence alone fits into
the pool, so there is always progress.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..kv_cache import BlockPool, BlockTable, PrefixIndex
from .request import Sequence

__all__ = ["CacheCounts", "Scheduler", "Step"]


@dataclass
class Step:
    """What the next forward pass computes."""

    sequences: list[Sequence] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    """New tokens of each sequence."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Blocks to copy before anything is written."""


@dataclass
class CacheCounts:
    """What happened in the cache since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the cache at a request's first admission."""
    copied_blocks: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Tokens computed again, since preemption gave their blocks away and others took them."""
    peak_blocks: int = 0
    shared_blocks: int = 0
    """The most blocks that were held more than once at the same time."""
    held_slots: int = 0
    """Slots of held blocks, summed over steps."""
    unused_slots: int = 0
    """Those of them that hold no token."""

    @property
    def waste(self) -> float:
        """Share of the held cache memory that held no token, averaged over steps."""
        return self.unused_slots / self.held_slots if self.held_slots else 0.0


class Scheduler:
    """Orders sequences, takes their blocks and gives them back.

    Args:
        pool: The cache's blocks.
        index: Where full blocks are found by their tokens; ``None`` turns prefix caching off.
        max_num_seqs: The most sequences that run at the same time.
        max_num_batched_tokens: The most tokens of one step.
    """

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex | None,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.pool, self.index, self.block_size = pool, index, pool.block_size
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.counts = CacheCounts()
        self._free_rows = list(range(max_num_seqs))[::-1]

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.counts.prompt_tokens += len(sequence.token_ids)
        self.waiting.append(sequence)

    def schedule(self) -> Step:
        """Choose the next step's tokens and reserve their slots."""
        step = Step()
        budget = self.max_num_batched_tokens
        preempted = False
        for sequence in list(self.running):
            if sequence.row is None:
                continue  # gave way to an earlier one in this very step
            chunk = min(sequence.num_pending, budget)
            if chunk == 0:
                break
            preempted |= self._make_room(sequence, chunk)
            if sequence.row is None:
                continue
            self._reserve(step, sequence, chunk)
            budget -= chunk
        while budget and self.waiting and not preempted and self._admit(self.waiting[0]):
            sequence = self.waiting.popleft()
            chunk = min(sequence.num_pending, budget)
            self._reserve(step, sequence, chunk)
            budget -= chunk
        self._count(step)
        return step

    def complete(self, step: Step) -> list[Sequence]:
        """Note that a step was computed; returns the sequences that can sample now.

        Full blocks become findable here and not earlier: before, their content is not written.
        """
        ready = []
        for sequence, chunk in zip(step.sequences, step.num_tokens, strict=True):
            sequence.num_computed += chunk
            if self.index is not None:
                num_full = sequence.num_computed // self.block_size
                if num_full > len(sequence.block_hashes):
                    sequence.block_hashes.extend(sequence.token_ids)
                self.index.insert(sequence.block_hashes, sequence.table.blocks, num_full)
            if sequence.num_pending == 0:
                ready.append(sequence)
        return ready

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child`` run on from everything ``parent`` has computed, sharing its blocks."""
        child.table, child.block_hashes = parent.table.fork(), parent.block_hashes.fork()
        child.num_computed = parent.num_computed
        self._start(child, after=parent)

    def restart(self) -> None:
        """Let everything that runs give way: after half a step nobody knows what is computed."""
        for sequence in reversed(self.running.copy()):
            self._give_way(sequence)

    def distrust(self, sequence: Sequence) -> None:
        """Let nobody find a sequence's blocks: what is in them led to no result."""
        for block in sequence.table.blocks:
            self.pool.overwrite(block)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and give its blocks back."""
        if sequence.row is not None:
            self._stop(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.table.free()

    def check(self) -> None:
        """Prove that every block is free or held by the running sequences' tables."""
        self.pool.check(sequence.table.blocks for sequence in self.running)

    # --- one sequence ----------------------------------------------------------------------

    def _reserve(self, step: Step, sequence: Sequence, chunk: int) -> None:
        step.copies += sequence.table.append(chunk)
        step.sequences.append(sequence)
        step.num_tokens.append(chunk)

    def _admit(self, sequence: Sequence) -> bool:
        """Start a waiting sequence if a row and blocks for all its tokens are there."""
        rows = 1 if sequence.request.is_forked else sequence.request.params.n
        if self._rows_left() < rows:
            return False
        cached = self._match(sequence)
        needed = -(-len(sequence.token_ids) // self.block_size) - len(cached)
        idle = sum(self.pool.ref_count(block) == 0 for block in cached)
        # Running sequences will ask for a block now and then: leave them a few.
        spare = len(self.running)
        if self.running and not self.pool.can_allocate(needed + idle + spare):
            return False
        if self.index is not None:
            sequence.table.adopt_prefix(
                self.index, sequence.block_hashes, max_blocks=self._most_cached(sequence)
            )
        sequence.num_computed = sequence.table.num_tokens
        if sequence.request.num_cached_tokens is None:
            sequence.request.num_cached_tokens = sequence.num_computed
            self.counts.cached_tokens += sequence.num_computed
        self.counts.recomputed_tokens += max(0, sequence.num_lost - sequence.num_computed)
        sequence.num_lost = 0
        self._start(sequence)
        return True

    def _match(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the beginning of a sequence; its last token is always computed."""
        if self.index is None:
            return []
        sequence.block_hashes.extend(sequence.token_ids)
        return self.index.match(sequence.block_hashes, self._most_cached(sequence))

    def _most_cached(self, sequence: Sequence) -> int:
        return (len(sequence.token_ids) - 1) // self.block_size

    def _make_room(self, sequence: Sequence, chunk: int) -> bool:
        """Preempt until ``sequence`` can have its blocks, itself last; True if anyone gave way."""
        preempted = False
        while not self.pool.can_allocate(sequence.table.blocks_needed(chunk)):
            later = self.running[self.running.index(sequence) :]
            victim = min(reversed(later[1:] or later), key=self._cost)
            self._preempt(victim)
            preempted = True
            if victim is sequence:
                break
        return preempted

    def _cost(self, sequence: Sequence) -> float:
        """Tokens lost by preempting a sequence; one that would free no block is no victim."""
        alone = sum(self.pool.ref_count(block) == 1 for block in sequence.table.blocks)
        return min(alone * self.block_size, sequence.num_computed) if alone else float("inf")

    def _preempt(self, sequence: Sequence) -> None:
        self.counts.preemptions += 1
        sequence.num_lost = sequence.num_computed
        self._give_way(sequence)

    def _give_way(self, sequence: Sequence) -> None:
        self._stop(sequence)
        sequence.table.free()
        sequence.table = BlockTable(self.pool)  # another: its row is stale
        sequence.num_computed = 0
        self.waiting.appendleft(sequence)

    def _start(self, sequence: Sequence, after: Sequence | None = None) -> None:
        sequence.row = self._free_rows.pop()
        at = len(self.running) if after is None else self.running.index(after) + 1
        self.running.insert(at, sequence)

    def _stop(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        self._free_rows.append(sequence.row)
        sequence.row = None
        self.running.remove(sequence)

    def _rows_left(self) -> int:
        """Free rows that no running request still has to fork into."""
        promised = {
            sequence.request.request_id: sequence.request.params.n - 1
            for sequence in self.running
            if not sequence.request.is_forked
        }
        return len(self._free_rows) - sum(promised.values())

    def _count(self, step: Step) -> None:
        counts, size = self.counts, self.block_size
        counts.copied_blocks += len(step.copies)
        held = self.pool.num_blocks - self.pool.num_free
        counts.peak_blocks = max(counts.peak_blocks, held)
        references = sum(len(sequence.table.blocks) for sequence in self.running)
        if references > held:
            counts.shared_blocks = max(counts.shared_blocks, self._num_shared())
        counts.held_slots += held * size
        counts.unused_slots += sum(-sequence.table.num_tokens % size for sequence in self.running)

    def _num_shared(self) -> int:
        blocks = {block for sequence in self.running for block in sequence.table.blocks}
        return sum(self.pool.ref_count(block) > 1 for block in blocks)

"""Continuous batching: which sequences compute how many tokens in the next step.

Every step has a budget of tokens. Running sequences come first, in order of arrival: one token
each in decode, a chunk of the prompt in prefill. The rest of the budget admits waiting ones. When
the pool is exhausted, a later sequence is preempted: its blocks are freed, and it waits at the head
of the queue to be computed again. The first running sequence is never preempted, and any sequence
alone fits into the pool, so there is always progress.

A step may be scheduled while the one before is in flight::

    schedule N ─► launch N ─► schedule N+1 ─► launch N+1 ─► complete N ─► schedule N+2 ─► …

- A sequence that reaches its length with an unread token is not scheduled again.
- Nothing is preempted while a step is in flight: ``schedule`` returns None and asks to complete it.
- A sequence that ends keeps its row and its blocks until no step in flight computes it.
- Blocks enter the prefix index in ``complete``, when their tokens are known and their content is
  written. Of prompts with a common prefix that arrive together, the first computes it; the others
  are held back, and adopt it.

With speculation no step is in flight here: a decoding sequence also computes its draft, and samples
after each token of it (``ngram.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from ..kv_cache import BlockPool, BlockTable, PrefixIndex
from .chunks import ChunkSizer
from .ngram import NgramProposer
from .outputs import CacheCounts
from .prefix_groups import PrefixGrouper
from .request import Sequence, State
from .step import SchedulerOutput


class Scheduler:
    """Chooses each step's sequences and tokens, and allocates and frees their blocks.

    Args:
        pool: The cache's blocks.
        index: The prefix index; ``None`` turns prefix caching off.
        max_num_seqs: The most sequences that run at the same time.
        max_num_batched_tokens: The most tokens of one step.
        grouper: Finds common prefixes of a decode step; ``None``: each sequence reads its own.
    """

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex | None,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        grouper: PrefixGrouper | None = None,
    ) -> None:
        self.pool, self.index, self.block_size = pool, index, pool.block_size
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.chunks = ChunkSizer()
        self.grouper = grouper
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.ended: list[Sequence] = []
        """Finished sequences that a step in flight still computes."""
        self.counts = CacheCounts()
        self._free_rows = list(range(max_num_seqs))[::-1]
        self._all_decode = False  # whether all were decoding when last asked; a start resets it
        self._num_scheduled = 0
        self._num_held = 0  # first waiting ones whose next blocks a running sequence computes
        self._completed = -1  # number of the last completed step

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.counts.prompt_tokens += len(sequence.token_ids)
        self.waiting.append(sequence)

    def schedule(self, *, in_flight: bool = False, admits: bool = True) -> SchedulerOutput | None:
        """Choose the next step's tokens and reserve their slots.

        Args:
            in_flight: Whether a step is launched and not completed.
            admits: Whether waiting sequences may start.

        Returns:
            The step, empty if nothing can be computed now. ``None`` only with ``in_flight``: a
            running sequence would have to be preempted; complete the step in flight and call again.
        """
        only_decodes, budget = self._only_decodes(), self.max_num_batched_tokens
        beside = budget - len(self.running)
        if self.waiting or not only_decodes:
            beside = self._limit_prompts(only_decodes)
        if in_flight and not only_decodes and self._would_preempt(budget, beside):
            return None
        step, num_preemptions = SchedulerOutput(self._num_scheduled), self.counts.preemptions
        self._num_scheduled += 1
        if only_decodes:
            self._decode_all(step)
            budget -= len(step.sequences)
        else:
            spare = budget - len(self.running)  # for drafts: every sequence gets its one token
            for sequence in self.running.copy():
                if sequence.state is State.WAITING or sequence.num_tokens >= sequence.max_len:
                    continue  # preempted in this very step, or its last token is on its way
                chunk = sequence.num_tokens - sequence.num_computed
                if chunk != 1:
                    if chunk > beside // 2:
                        chunk = min(chunk, beside - self._kept_for_others(sequence, beside // 2))
                    beside -= chunk
                chunk = min(chunk, budget)
                if chunk == 0:
                    continue
                if not in_flight and not self._make_room(sequence, chunk):
                    continue
                draft: list[int] = []
                if chunk == 1 and sequence.proposer is not None:
                    draft = self._draft(sequence, sequence.proposer, min(spare, budget - 1))
                    spare -= len(draft)
                self._reserve(step, sequence, chunk, draft)
                budget -= chunk + len(draft)
        if admits and self.counts.preemptions == num_preemptions:
            self._admit_waiting(step, min(budget, beside))
        self._count(step)
        if self.grouper is not None:
            self.grouper.arrange(step, any_shared=self.pool.num_shared > 0)
        return step

    def complete(self, step: SchedulerOutput) -> None:
        """Index the full blocks of a step that was computed, before its tokens are appended."""
        size, index = self.block_size, self.index
        if index is not None:
            spans = zip(range(len(step.ends)), step.ends, step.num_tokens, strict=True)
            # Few single tokens fill a block: end % size is what lies past the last full one.
            for at in [at for at, end, chunk in spans if end % size < chunk]:
                sequence, num_full = step.sequences[at], step.ends[at] // size
                hashes = sequence.block_hashes
                if num_full > hashes.num_inserted and sequence.state is State.RUNNING:
                    known, accepted = sequence.token_ids, step.drafts.get(at)
                    hashes.extend(known + accepted if accepted else known)
                    index.insert(hashes, sequence.table.blocks, num_full)
        self._completed = step.number
        for sequence in self.ended.copy():
            if sequence.last_step <= self._completed:
                self._release(sequence)

    def fork(self, step: SchedulerOutput, parent: Sequence, child: Sequence) -> None:
        """Let ``child`` sample from the logits of ``parent``, and run on with its blocks."""
        child.table, child.block_hashes = parent.table.fork(), parent.block_hashes.fork()
        child.num_computed = parent.num_computed
        self._give_row(child, after=parent)
        step.sampled.append(child)
        step.logits_rows.append(step.sequences.index(parent))
        step.is_decode = False
        child.num_tokens, child.last_step = parent.num_tokens, step.number

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """Free all blocks and rows, and queue new sequences, given in the order of their arrival.

        Those of requests that had started go first.
        """
        self.pool.clear()
        if self.index is not None:
            self.index.repair()
        self.running, self.ended, self._free_rows = [], [], list(range(self.max_num_seqs))[::-1]
        self._all_decode, self._num_held, self._completed = False, 0, self._num_scheduled - 1
        self.waiting = deque(sorted(sequences, key=lambda s: s.request.num_cached_tokens is None))

    def evict_from_prefix_cache(self, sequence: Sequence) -> None:
        """Remove a sequence's blocks from the prefix index: the forward pass over them failed."""
        for block in sequence.table.blocks:
            self.pool.overwrite(block)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence in any state; its blocks are freed when no step in flight writes them."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
            self.ended.append(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.state, sequence.finish_reason = State.FINISHED, reason
        sequence.only_appends = False
        if sequence.request.is_finished:
            sequence.request.record("finished_time")
        if sequence.row >= 0 and sequence.last_step <= self._completed:
            self._release(sequence)

    def check(self) -> None:
        """Assert that every block is free or held by the tables of sequences that have a row."""
        holders = [*self.running, *self.ended]
        self.pool.check(sequence.table.blocks for sequence in holders)
        for sequence in self.running:
            num_tokens, num_blocks = sequence.num_computed, len(sequence.table.blocks)
            assert sequence.table.num_tokens >= num_tokens, sequence
            assert num_blocks == -(-num_tokens // self.block_size), sequence
        rows = sorted([*self._free_rows, *(sequence.row for sequence in holders)])
        assert rows == list(range(self.max_num_seqs)), f"rows are lost or held twice: {rows}"
        for sequence in self.waiting:
            assert sequence.state is State.WAITING, sequence
            assert not sequence.table.blocks, "a waiting sequence holds blocks"

    # --- a step of single tokens -------------------------------------------------------------

    def _only_decodes(self) -> bool:
        """Whether every running sequence can compute the one token that the device has."""
        if not self._all_decode:
            self._all_decode = all(s.is_decoding and s.proposer is None for s in self.running)
        return self._all_decode and self.pool.can_allocate(len(self.running))

    def _decode_all(self, step: SchedulerOutput) -> None:
        """Schedule one token of every running sequence: the fast path of most steps.

        Slots are reserved a block at a time, so few sequences need new ones in a step.
        """
        size, number = self.block_size, step.number
        sequences, ends = step.sequences, step.ends
        for sequence in self.running:
            end = sequence.num_tokens
            if end >= sequence.max_len:
                continue  # its last token is on its way
            table = sequence.table
            if end > table.num_tokens:
                step.copies += table.append(size - table.num_tokens % size)
                step.grown.append(sequence)
            sequence.num_computed, sequence.num_tokens = end, end + 1
            sequence.last_step = number
            sequences.append(sequence)
            ends.append(end)
        step.num_tokens = [1] * len(ends)
        step.sampled = sequences.copy()
        step.logits_rows = list(range(len(ends)))

    # --- any other step --------------------------------------------------------------------------

    def _limit_prompts(self, only_decodes: bool) -> int:
        """Return the most prompt tokens of the step, after one token of each decoding sequence."""
        num_waiting = min(len(self.waiting), self.max_num_seqs - len(self.running))
        num_decoding = len(self.running)
        if not only_decodes:
            num_decoding = sum([s.num_tokens - s.num_computed == 1 for s in self.running])
        beside = self.max_num_batched_tokens - num_decoding
        if not num_waiting and num_decoding == len(self.running):
            return beside
        return self.chunks.limit(self.running, beside, num_waiting)

    def _reserve(
        self, step: SchedulerOutput, sequence: Sequence, chunk: int, draft: SequenceOf[int] = ()
    ) -> None:
        """Reserve slots of a chunk and its draft; sample if it ends with the last known token."""
        chunk, at = chunk + len(draft), len(step.sequences)
        end = sequence.num_computed + chunk
        if end > sequence.table.num_tokens:
            step.copies += sequence.table.append(end - sequence.table.num_tokens)
            step.grown.append(sequence)
        sequence.num_computed = end
        step.sequences.append(sequence)
        step.num_tokens.append(chunk)
        step.ends.append(end)
        sequence.last_step = step.number
        if not sequence.is_decoding:
            step.is_decode = False
        if end < sequence.num_tokens:
            return
        sequence.num_tokens = end + 1
        step.sampled.append(sequence)
        step.logits_rows.append(at)
        if draft:
            step.is_decode = False
            step.drafts[at] = list(draft)
            step.sampled += [sequence] * len(draft)
            step.logits_rows += [at] * len(draft)

    def _kept_for_others(self, sequence: Sequence, most: int) -> int:
        """Return how many prompt tokens to reserve for prompts behind a long one, up to ``most``.

        Otherwise a short prompt would wait for all steps of the long one before it.
        """
        behind = self.running[self.running.index(sequence) + 1 :]
        pending = sum(s.num_pending for s in behind if s.num_pending > 1)
        if pending < most and len(self.waiting) > self._num_held:
            first = self.waiting[self._num_held]
            num_blocks = -(-len(first.token_ids) // self.block_size) + len(self.running)
            if _num_rows(first) <= self._rows_left() and self.pool.can_allocate(num_blocks):
                pending += len(first.token_ids)
        return min(pending, most)

    def _draft(self, sequence: Sequence, proposer: NgramProposer, most: int) -> list[int]:
        """Draft the next tokens, as many as fit without preempting a sequence."""
        if len(sequence.token_ids) == len(sequence.request.prompt_token_ids):
            return []  # without output: other samples may still fork from it
        draft = proposer.propose(min(most, sequence.max_len - sequence.num_tokens - 1))
        needed = sequence.table.blocks_needed(1 + len(draft))
        return draft if self.pool.can_allocate(needed + len(self.running)) else []

    def _admit_waiting(self, step: SchedulerOutput, budget: int) -> None:
        """Start waiting sequences, in their order, while rows, blocks and the budget last.

        A sequence whose next block is being computed by a running one is held back: it keeps its
        place in the queue, and adopts the block when that is done. Sequences behind it may pass, as
        long as rows and blocks for it are left. None is held for long: every step computes some of
        the prompt that it waits for.
        """
        rows, held, set_aside = self._rows_left() if self.waiting else 0, [], 0
        while budget and self.waiting:
            sequence = self.waiting[0]
            rows -= _num_rows(sequence)
            if rows < 0:
                break
            num_coming = self._adopt_prefix(sequence)
            table = sequence.table
            needed = table.blocks_needed(len(sequence.token_ids) - table.num_tokens)
            # Leave a few blocks for running sequences, which need one now and then.
            spare = len(self.running) + set_aside
            if num_coming:
                set_aside += needed - num_coming
                table.free()
                held.append(self.waiting.popleft())
            elif (self.running or self.ended) and not self.pool.can_allocate(needed + spare):
                table.free()
                break
            else:
                self._start(self.waiting.popleft())
                chunk = min(sequence.num_pending, budget)
                self._reserve(step, sequence, chunk)
                budget -= chunk
        self.waiting.extendleft(reversed(held))
        self._num_held = len(held)

    def _adopt_prefix(self, sequence: Sequence) -> int:
        """Give a waiting sequence the blocks of its longest cached prefix.

        Returns:
            How many of its next blocks are being computed by a running sequence.
        """
        if self.index is None:
            return 0
        hashes, table = sequence.block_hashes, sequence.table
        hashes.extend(sequence.token_ids)
        most = (len(sequence.token_ids) - 1) // self.block_size  # the last token is computed
        table.adopt_prefix(self.index, hashes, max_blocks=most)
        num_cached = len(table.blocks)
        for other in self.running if num_cached < most else ():
            coming = other.block_hashes
            if coming.num_inserted <= num_cached < len(coming):
                num_common = min(most, hashes.num_common(coming))
                if num_common > num_cached:
                    return num_common - num_cached
        return 0

    def _would_preempt(self, budget: int, beside: int) -> bool:
        """Whether the running sequences may need more blocks than are free."""
        if self.pool.can_allocate(len(self.running) + budget // self.block_size + 1):
            return False
        needed = 0
        for sequence in self.running:
            if sequence.num_tokens < sequence.max_len:
                chunk = sequence.num_pending
                needed += _blocks_needed(sequence, chunk if chunk == 1 else min(chunk, beside))
        return not self.pool.can_allocate(needed)

    def _make_room(self, sequence: Sequence, chunk: int) -> bool:
        """Preempt sequences until ``sequence`` fits; False if it had to be preempted itself."""
        while not self.pool.can_allocate(_blocks_needed(sequence, chunk)):
            later = self.running[self.running.index(sequence) :]
            victim = min(reversed(later[1:] or later), key=self._preemption_cost)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preemption_cost(self, sequence: Sequence) -> float:
        """Return the tokens lost by preempting a sequence; infinity if it would free no block."""
        alone = sum(self.pool.ref_count(block) == 1 for block in sequence.table.blocks)
        return min(alone * self.block_size, sequence.num_computed) if alone else float("inf")

    def _preempt(self, sequence: Sequence) -> None:
        self.counts.preemptions += 1
        sequence.num_lost = sequence.num_computed
        self.running.remove(sequence)
        self._release(sequence)
        sequence.table = BlockTable(self.pool)  # a new table marks its row as stale
        sequence.num_computed, sequence.num_tokens = 0, len(sequence.token_ids)
        sequence.state, sequence.is_decoding = State.WAITING, False
        self.waiting.appendleft(sequence)

    def _start(self, sequence: Sequence) -> None:
        """Start a waiting sequence at the end of its cached prefix."""
        sequence.num_computed, request = sequence.table.num_tokens, sequence.request
        if request.num_cached_tokens is None:
            request.num_cached_tokens = sequence.num_computed
            request.record("first_scheduled_time")
            self.counts.cached_tokens += sequence.num_computed
        self.counts.recomputed_tokens += max(0, sequence.num_lost - sequence.num_computed)
        sequence.num_lost = 0
        self._give_row(sequence)

    def _give_row(self, sequence: Sequence, after: Sequence | None = None) -> None:
        sequence.state, sequence.row = State.RUNNING, self._free_rows.pop()
        at = len(self.running) if after is None else self.running.index(after) + 1
        self.running.insert(at, sequence)
        self._all_decode = False

    def _release(self, sequence: Sequence) -> None:
        """Free the row and the blocks of a sequence that no longer runs."""
        if sequence.is_finished:
            self.ended.remove(sequence)
        self._free_rows.append(sequence.row)
        sequence.row = -1
        sequence.table.free()

    def _rows_left(self) -> int:
        """Return the number of free rows, less those for samples that have yet to fork."""
        promised = [_num_rows(s) - 1 for s in self.running if not s.is_decoding]
        return len(self._free_rows) - sum(promised)

    def _count(self, step: SchedulerOutput) -> None:
        counts, size, pool = self.counts, self.block_size, self.pool
        held = pool.num_blocks - pool.num_free
        counts.copied_blocks += len(step.copies)
        counts.peak_blocks = max(counts.peak_blocks, held)
        counts.shared_blocks = max(counts.shared_blocks, pool.num_shared)
        counts.held_slots += held * size
        counts.unused_slots += sum([-s.num_computed % size for s in self.running])


def _blocks_needed(sequence: Sequence, num_tokens: int) -> int:
    """Return how many new blocks a running sequence needs to have ``num_tokens`` tokens."""
    end, table = sequence.num_computed + num_tokens, sequence.table
    return table.blocks_needed(max(0, end - table.num_tokens))


def _num_rows(sequence: Sequence) -> int:
    """Return the rows that a waiting sequence takes: one for each sample, until it has forked."""
    request = sequence.request
    return 1 if len(request.sequences) == request.params.n else request.params.n

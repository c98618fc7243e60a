"""The scheduler without a model: which sequences run, wait and are preempted."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from pagetile import SamplingParams
from pagetile.engine.chunks import ChunkSizer
from pagetile.engine.request import Request, Sequence, State
from pagetile.engine.scheduler import Scheduler
from pagetile.kv_cache import BlockPool, BlockTable, PrefixIndex

BLOCK_SIZE = 4


class Steps:
    """A scheduler whose steps are computed by appending a token to each sequence that samples."""

    def __init__(self, num_blocks: int, *, sharing: bool = False, **options: Any) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.index = PrefixIndex(self.pool)
        options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, **options}
        self.scheduler = Scheduler(self.pool, self.index if sharing else None, **options)
        self.next_id = 0

    def add(
        self,
        num_tokens: int,
        max_new: int = 100,
        head: tuple[int, ...] = (),
        **options: Any,
    ) -> Any:
        params = SamplingParams(max_tokens=max_new, **options)
        prompt = [*head, *(1000 * self.next_id + at for at in range(len(head), num_tokens))]
        request = Request(self.next_id, None, tuple(prompt), params, 0)
        sequence = Sequence(
            request, 0, prompt, BlockTable(self.pool), self.index.block_hashes(),
            None, num_tokens + max_new, frozenset(),
        )  # fmt: skip
        request.sequences.append(sequence)
        self.next_id += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Any:
        step = self.scheduler.schedule()
        assert step is not None
        self.scheduler.check()
        self.scheduler.complete(step)
        for sequence in step.sampled:
            sequence.is_decoding = True
            sequence.token_ids.append(7)
            if len(sequence.token_ids) == sequence.max_len:
                self.scheduler.finish(sequence, "length")
        self.scheduler.check()
        return step


@pytest.mark.parametrize("seed", range(12))
def test_steps_that_only_decode_choose_what_any_other_step_would(seed: int) -> None:
    found = []
    for is_usual in (True, False):
        rng = random.Random(seed)
        steps = Steps(rng.choice([14, 30, 200]), sharing=True, max_num_seqs=4)
        scheduler, chosen, num_decode = steps.scheduler, [], 0
        if not is_usual:
            scheduler._only_decodes = lambda: False  # type: ignore[method-assign]
        for _ in range(120):
            if rng.random() < 0.2:
                steps.add(rng.randint(1, 20), rng.randint(1, 30), head=rng.choice([(), HEAD[:9]]))
            if scheduler.running and rng.random() < 0.03:
                scheduler.finish(rng.choice(scheduler.running), "abort")
            step = steps.step()
            num_decode += step.is_decode and len(step.sequences) > 1
            tables = [
                (s.request.request_id, s.num_computed, tuple(s.table.blocks))
                for s in (*step.sequences, *step.sampled)
            ]
            chosen.append((tables, step.num_tokens, step.ends, step.logits_rows, step.copies))
        found.append((chosen, replace(scheduler.counts)))
        assert num_decode > 5
    assert found[0] == found[1]


def test_tables_take_slots_by_the_block_and_say_which_grew() -> None:
    steps = Steps(64)
    first, second = steps.add(4), steps.add(6)
    steps.step()
    grown = [steps.step().grown for _ in range(6)]
    assert grown == [[first, second], [], [second], [], [first], []]
    assert (first.num_computed, first.table.num_tokens) == (10, 12)


def test_decode_comes_before_prefill_and_prompts_fill_the_budget() -> None:
    steps = Steps(64, max_num_batched_tokens=10)
    first, second = steps.add(7), steps.add(20)
    assert steps.step().num_tokens == [7, 3]
    assert steps.step().num_tokens == [1, 9]
    step = steps.step()
    assert step.sequences == [first, second]
    assert step.num_tokens == [1, 8]
    assert step.sampled == [first, second]


def test_short_prompts_do_not_wait_for_a_long_one_before_them() -> None:
    steps = Steps(256, max_num_batched_tokens=40)
    long = steps.add(400)
    assert steps.step().num_tokens == [40], "no other prompt waits"
    short, other = steps.add(15), steps.add(30)
    assert steps.step().num_tokens == [25, 15], "what the short one needs is left for it"
    assert steps.step().num_tokens == [20, 1, 19], "and half of a step at most"
    assert len(short.output_token_ids) == 2
    assert steps.step().num_tokens == [28, 1, 11]
    assert len(other.output_token_ids) == 1
    assert steps.step().num_tokens == [38, 1, 1], "decoding comes first"
    assert long.num_computed == 40 + 25 + 20 + 28 + 38


@pytest.mark.parametrize("why", ["no rows", "no blocks", "held"])
def test_a_long_prompt_leaves_nothing_to_those_that_cannot_start(why: str) -> None:
    options = {"max_num_seqs": 1} if why == "no rows" else {}
    num_blocks = 30 if why == "no blocks" else 256
    steps = Steps(num_blocks, max_num_batched_tokens=20, sharing=why == "held", **options)
    head = tuple(range(5000, 5100)) if why == "held" else ()
    steps.add(100, head=head)
    steps.step()
    steps.add(101, head=head)
    steps.step()  # finds out who is held
    assert steps.step().num_tokens == [20]


@pytest.mark.parametrize(("n", "num_tokens"), [(1, [4, 4]), (2, [8])])
def test_rows_that_a_running_prompt_will_fork_into_are_left_for_it(
    n: int, num_tokens: list[int]
) -> None:
    steps = Steps(256, max_num_seqs=4, max_num_batched_tokens=8)
    steps.add(30, n=3)  # has one row of four, and will take two more
    steps.step()
    steps.add(4, n=n)
    assert steps.step().num_tokens == num_tokens


def test_rows_of_samples_that_have_ended_are_free() -> None:
    steps = Steps(64, max_num_seqs=4)
    steps.add(4, n=3)
    steps.step()  # it decodes, and its other samples have no rows any more
    for _ in range(3):
        steps.add(4)
    steps.step()
    assert len(steps.scheduler.running) == 4


def test_the_victim_is_the_one_that_loses_the_fewest_tokens() -> None:
    steps = Steps(18)
    first, large, small, last = (steps.add(n, max_new=36) for n in (8, 16, 3, 12))
    seen = []
    for _ in range(60):
        later = [s for s in (large, small, last) if s.state is State.RUNNING]
        computed = {s: s.num_computed for s in later}
        num_preemptions = steps.scheduler.counts.preemptions
        steps.step()
        gone = [s for s in later if s.state is not State.RUNNING]
        if steps.scheduler.counts.preemptions == num_preemptions + 1 and len(later) > 1:
            assert gone == [min(later, key=lambda s: computed[s])]
            seen += gone
    assert first.num_lost == 0, "the first never gives way"
    assert seen


def test_a_sequence_that_would_free_no_block_is_no_victim() -> None:
    steps = Steps(8)
    first = steps.add(8)
    shared = steps.add(8, n=2)
    step = steps.scheduler.schedule()
    child = Sequence(
        shared.request, 1, list(shared.token_ids), BlockTable(steps.pool),
        steps.index.block_hashes(), None, shared.max_len, frozenset(),
    )  # fmt: skip
    shared.request.sequences.append(child)
    steps.scheduler.fork(step, shared, child)
    assert steps.scheduler.running == [first, shared, child], "samples of a prompt are neighbours"
    alone = steps.add(8)
    steps.scheduler.complete(step)
    assert (
        steps.scheduler._preemption_cost(shared)
        == steps.scheduler._preemption_cost(child)
        == float("inf")
    )
    for sequence in step.sampled:
        sequence.token_ids.append(7)
    steps.step()  # first, both forks and alone fill the pool to its last block but one
    assert steps.scheduler._preemption_cost(first) < float("inf")
    held = [steps.pool.ref_count(block) for block in shared.table.blocks]
    assert held[:2] == [2, 2]
    assert steps.scheduler._preemption_cost(shared) == BLOCK_SIZE, (
        "its own block counts, shared ones do not"
    )
    assert alone.state is State.WAITING


def test_victims_resume_before_what_waits_for_its_first_step() -> None:
    steps = Steps(8)
    victim = [steps.add(12, max_new=8) for _ in range(2)][1]
    late = steps.add(4, max_new=2)
    while not steps.scheduler.counts.preemptions:
        steps.step()
    assert list(steps.scheduler.waiting) == [victim, late]
    assert victim.num_computed == 0
    assert victim.num_lost > 12
    resumed = None
    while resumed is None:
        resumed = next((s for s in steps.step().sequences if s in (victim, late)), None)
    assert resumed is victim
    assert steps.scheduler.counts.recomputed_tokens > 12


def test_a_block_is_left_for_each_running_sequence() -> None:
    steps = Steps(8)
    running = [steps.add(4, max_new=5) for _ in range(2)]
    steps.step()
    assert steps.pool.num_free == 6
    late = steps.add(17)  # five blocks, and two must stay for those that run
    steps.step()
    assert late.state is not State.RUNNING
    while running[0].state is State.RUNNING:
        steps.step()
    steps.step()
    assert late.state is State.RUNNING
    assert not steps.scheduler.counts.preemptions


# --- a common beginning ------------------------------------------------------------------------

HEAD = tuple(range(-34, 0))  # eight blocks and two tokens


def test_prompts_that_arrive_together_compute_a_common_beginning_once() -> None:
    steps = Steps(64, sharing=True)
    sequences = [steps.add(40, head=HEAD) for _ in range(3)]
    assert steps.step().num_tokens == [40]
    step = steps.step()
    assert step.sequences == sequences
    assert step.num_tokens == [1, 8, 8]
    assert steps.scheduler.counts.cached_tokens == 2 * 32
    assert sequences[1].table.blocks[:8] == sequences[0].table.blocks[:8]


def test_later_prompts_pass_one_that_is_held_if_enough_is_left_for_it() -> None:
    steps = Steps(30, sharing=True, max_num_seqs=3)
    first, held, small = steps.add(40, head=HEAD), steps.add(40, head=HEAD), steps.add(8)
    fourth = steps.add(8)
    step = steps.step()
    assert step.sequences == [first, small]
    assert list(steps.scheduler.waiting) == [held, fourth], "a row is left for the one that is held"
    assert steps.step().sequences == [first, small, held]

    steps = Steps(19, sharing=True)
    first, held, large = steps.add(40, head=HEAD), steps.add(60, head=HEAD), steps.add(8)
    assert steps.step().sequences == [first]
    assert list(steps.scheduler.waiting) == [held, large], (
        "nine are free: seven for it, one for the first"
    )


@pytest.mark.parametrize("event", ["abort", "failure", "eviction"])
def test_a_held_prompt_goes_on_if_what_it_waits_for_is_never_indexed(event: str) -> None:
    steps = Steps(64, sharing=True)
    scheduler, first, second = steps.scheduler, steps.add(40, head=HEAD), steps.add(40, head=HEAD)
    step = scheduler.schedule()
    assert step is not None
    assert step.sequences == [first]
    if event == "failure":
        scheduler.restart([])
        first, second = steps.add(40, head=HEAD), steps.add(40, head=HEAD)
        assert steps.step().sequences == [first], "it is computed again, and the other held"
        assert steps.step().sequences == [first, second]
        return
    scheduler.finish(first, "abort")
    scheduler.complete(step)
    if event == "eviction":
        scheduler.evict_from_prefix_cache(first)
    assert steps.step().num_tokens == [40]
    assert second.request.num_cached_tokens == 0


def test_a_held_prompt_is_admitted_while_the_step_after_is_in_flight() -> None:
    steps = Steps(64, sharing=True)
    first, second = steps.add(40, head=HEAD), steps.add(40, head=HEAD)
    one = steps.scheduler.schedule()
    two = steps.scheduler.schedule(in_flight=True)
    assert one is not None
    assert two is not None
    assert (one.sequences, two.sequences) == ([first], [first]), "its content is not written yet"
    steps.scheduler.complete(one)
    first.token_ids.append(7)
    three = steps.scheduler.schedule(in_flight=True)
    assert three is not None
    assert (three.sequences, three.num_tokens) == ([first, second], [1, 8])


def test_a_prompt_is_not_held_for_another_salt_or_without_an_index() -> None:
    for sharing in (True, False):
        steps = Steps(64, sharing=sharing)
        steps.add(30, head=HEAD[:30])
        other = steps.add(30, head=HEAD[:30])
        if sharing:
            other.block_hashes = steps.index.block_hashes(cache_salt="other")
        assert steps.step().num_tokens == [30, 30]


def test_admission_matches_a_prefix_once(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, matched = Steps(64, sharing=True), []
    match = steps.index.match
    monkeypatch.setattr(steps.index, "match", lambda *args: matched.append(args) or match(*args))
    for _ in range(3):
        steps.add(20)
    steps.step()
    assert len(matched) == 3


@pytest.mark.parametrize("seed", range(2))
def test_nothing_starves_over_ten_thousand_random_steps(seed: int) -> None:
    rng = random.Random(seed)
    heads = [(), *[tuple(range(-60 * n, -60 * n + 60)) for n in (1, 2)]]
    steps = Steps(24, sharing=True, max_num_seqs=5, max_num_batched_tokens=16)
    waiting_since: dict[Any, int] = {}
    longest = num_finished = 0
    coming: list[int] = []
    adopt = steps.scheduler._adopt_prefix

    def watched(sequence: Any) -> int:
        coming.append(adopt(sequence))
        return coming[-1]

    steps.scheduler._adopt_prefix = watched  # type: ignore[method-assign]
    for now in range(10_000):
        if len(waiting_since) < 12 and rng.random() < 0.3:
            length = rng.randint(1, 60)
            head = rng.choice(heads)[: rng.randint(0, length)]
            sequence = steps.add(length, max_new=rng.randint(1, 30), head=head)
            waiting_since[sequence] = now
        for sequence in steps.step().sequences:
            longest = max(longest, now - waiting_since[sequence])
            waiting_since[sequence] = now
        for sequence in [s for s in waiting_since if s.is_finished]:
            del waiting_since[sequence]
            num_finished += 1
    assert steps.scheduler.counts.preemptions > 100
    assert num_finished > 1000
    assert sum(map(bool, coming)) > 10
    # Twelve sequences of at most 90 tokens: none waits for much more than all others' tokens.
    assert max([longest, *(10_000 - since for since in waiting_since.values())]) < 12 * 90


# --- chunks of prompts beside streams -------------------------------------------------------


def streams(*pending: int) -> list[Any]:
    steps = Steps(64)
    sequences = [steps.add(n + 4) for n in pending]
    for sequence, n in zip(sequences, pending, strict=True):
        sequence.num_computed = len(sequence.token_ids) - n
        sequence.request = replace(sequence.request, stream=True)
    return sequences


def test_chunks_are_as_long_as_the_stretch_of_a_step_allows() -> None:
    chunks = ChunkSizer(stretch=2.5, least=16)
    assert chunks.limit(streams(1), 8192) == 8192, "nothing is measured yet"
    for _ in range(50):
        chunks.record(0.004, num_decode=3, num_prompt=0)
        chunks.record(0.004 + 500 * 2e-5, num_decode=3, num_prompt=500)
    assert chunks.limit(streams(1), 8192) == pytest.approx(300, abs=1)
    assert chunks.limit(streams(1), 100) == 100
    assert chunks.limit(streams(5), 8192) == 8192, "the stream does not decode yet"
    assert chunks.limit([], 8192) == 8192
    for _ in range(200):
        chunks.record(0.0001, num_decode=3, num_prompt=0)
    assert chunks.limit(streams(1), 8192) == 16, "never less than is worth a step"


def test_chunks_grow_with_the_streams_that_wait() -> None:
    """Of 64 prompts at once the first may not delay the others for its own tokens."""
    chunks = ChunkSizer(stretch=2.5, least=16)
    for _ in range(50):
        chunks.record(0.002, num_decode=1, num_prompt=0)
        chunks.record(0.010, num_decode=64, num_prompt=0)
        chunks.record(0.002 + 500 * 2e-5, num_decode=1, num_prompt=500)
    alone, beside_many = (chunks.limit(streams(1), 8192, waiting) for waiting in (0, 63))
    assert alone == pytest.approx(2.5 * 100 - 100, abs=1)
    assert beside_many == pytest.approx(2.5 * 500 - 100, abs=1)
    assert chunks.limit(streams(*[1] * 64), 8192) == pytest.approx(750, abs=1)


@pytest.mark.parametrize("fixed", [0.0, 0.0005, 0.001, 0.006])
def test_what_a_mixed_step_costs_by_itself_is_not_taken_for_the_cost_of_tokens(
    fixed: float,
) -> None:
    """Otherwise a chunk that is too slow would shrink, and cost more a token, down to the least."""
    chunks, rng, num_prompt = ChunkSizer(stretch=2.5, least=32), random.Random(0), 500
    sizes = []
    for _ in range(400):
        chunks.record(0.002 * rng.uniform(0.98, 1.02), num_decode=1, num_prompt=0)
        seconds = (0.002 + fixed + num_prompt * 4e-6) * rng.uniform(0.98, 1.02)
        chunks.record(seconds, num_decode=1, num_prompt=num_prompt)
        num_prompt = min(rng.choice((9000, 9000, 150)), chunks.limit(streams(1), 8192))
        sizes.append(chunks.limit(streams(1), 8192))
    expected = max(0.003 - fixed, fixed) / 4e-6
    assert sorted(sizes[100:])[150] == pytest.approx(expected, rel=0.2)


def test_time_between_tokens_stays_within_the_stretch() -> None:
    """A machine of 2 ms a step and 30 µs a prompt token; long prompts arrive beside two streams."""
    steps = Steps(4000, max_num_seqs=16, max_num_batched_tokens=2048)
    chunks, rng = steps.scheduler.chunks, random.Random(0)
    live = [steps.add(8, max_new=3000) for _ in range(2)]
    for sequence in live:
        sequence.request.stream = True
    gaps = []
    for now in range(1500):
        if now % 40 == 20 and now > 100:
            steps.add(rng.randint(500, 3000), max_new=2)
        step = steps.step()
        num_decode = step.num_tokens.count(1)
        num_prompt = sum(step.num_tokens) - num_decode
        seconds = (2e-3 + 3e-5 * num_prompt) * rng.uniform(0.97, 1.03)
        chunks.record(seconds, num_decode, num_prompt)
        gaps.append(seconds)
    gaps = sorted(gaps[200:])  # the first long prompt is what is measured
    assert gaps[int(0.99 * len(gaps))] <= 2.5 * gaps[len(gaps) // 2]
    assert sum(sequence.is_finished for sequence in live) == 0

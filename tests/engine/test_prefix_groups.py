"""Sequences with the same first blocks are grouped in decode steps, which read these once."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace

import pytest

from pagetile import LLM, SamplingParams
from pagetile.engine.prefix_groups import MAX_GROUPS, PrefixGrouper, find_groups
from pagetile.ops.paged_attention import shared_prefixes


def _draw_tables(rng: random.Random) -> tuple[list[list[int]], list[int]]:
    """Block tables of a tree: each continues a part of another, or starts anew."""
    tables: list[list[int]] = []
    number = iter(range(10**6))
    for _ in range(rng.randint(1, 20)):
        other = rng.choice(tables) if tables and rng.random() < 0.7 else []
        head = other[: rng.randint(0, len(other))]
        tables.append(head + [next(number) for _ in range(rng.randint(1, 5))])
    return tables, [rng.randint(0, len(table)) for table in tables]


def _saved(groups: list) -> int:
    return sum((len(group.members) - 1) * group.num_blocks for group in groups)


def _best(tables: list[list[int]], limits: list[int], members: list[int], depth: int) -> int:
    """The most blocks that any division saves, by trying every depth."""
    by_block: dict[int, list[int]] = {}
    for at in members:
        if limits[at] > depth:
            by_block.setdefault(tables[at][depth], []).append(at)
    return sum(
        max((len(branch) - 1) * (depth + 1), _best(tables, limits, branch, depth + 1))
        for branch in by_block.values()
    )


@pytest.mark.parametrize("seed", range(200))
def test_groups_share_what_they_say_and_save_the_most(seed: int) -> None:
    tables, limits = _draw_tables(random.Random(seed))
    groups = find_groups(tables, limits)
    members = [at for group in groups for at in group.members]
    assert len(members) == len(set(members))
    for group in groups:
        assert len(group.members) > 1
        assert group.num_blocks <= min(limits[at] for at in group.members)
        assert len({tuple(tables[at][: group.num_blocks]) for at in group.members}) == 1
    assert _saved(groups) == _best(tables, limits, list(range(len(tables))), 0)


def test_a_chain_of_prefixes_is_divided_in_bounded_time() -> None:
    tables = [[*range(i + 1), 10**6 + i] for i in range(1000)]
    start = time.perf_counter()
    groups = find_groups(tables, [len(table) for table in tables])
    assert time.perf_counter() - start < 2
    assert _saved(groups) >= 999


def test_a_step_has_room_for_few_groups_and_keeps_those_that_save_the_most() -> None:
    grouper = PrefixGrouper(block_size=16, min_saved_tokens=0)
    tables = [[group, *range(100, 100 + group), 1000 + i] for group in range(12) for i in range(2)]
    order, groups = grouper._arrange(tables, [len(table) - 1 for table in tables])
    assert sorted(order) == list(range(24))
    assert groups is not None
    starts, lens = groups
    assert len(lens) == MAX_GROUPS == len(starts) - 1
    assert lens == [16 * blocks for blocks in (12, 11, 10, 9, 8, 7, 6)] + [0]
    assert starts == [0, 2, 4, 6, 8, 10, 12, 14, 24]


def test_the_block_that_a_step_writes_is_not_shared() -> None:
    """Also where the new token is the last of a block."""
    sequences = [SimpleNamespace(table=SimpleNamespace(blocks=[7, 2])) for _ in range(2)]
    for end, shared in ((32, 16), (31, 16), (17, 16), (33, 32)):
        found = PrefixGrouper(16, 1).find(sequences, [end, end])
        assert found is not None
        assert found[1].prefix_lens[0] == shared


def test_too_little_to_share_is_not_shared() -> None:
    tables, limits = [[1, 2], [1, 3], [4, 5]], [1, 1, 1]
    assert PrefixGrouper(16, 17)._arrange(tables, limits) == ([], None)
    order, groups = PrefixGrouper(16, 16)._arrange(tables, limits)
    assert order == [0, 1, 2]
    assert groups == ([0, 2, 2, 2, 2, 2, 2, 2, 3], [16, 0, 0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("num_blocks", [400, 24], ids=["roomy", "preempting"])
def test_tokens_are_the_same_where_prefixes_are_shared(
    num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(llm: LLM) -> list[list[tuple[int, ...]]]:
        rng = random.Random(3)
        head = [rng.randrange(200) for _ in range(40)]
        prompts = [head + [rng.randrange(200) for _ in range(rng.randint(1, 9))] for _ in range(5)]
        prompts += [[rng.randrange(200) for _ in range(20)] for _ in range(2)]
        params = [
            SamplingParams(
                max_tokens=rng.randint(5, 30), temperature=0.8, seed=i, ignore_eos=True,
                n=3 if i == 2 else 1, detokenize=False,
            )
            for i in range(len(prompts))
        ]  # fmt: skip
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.engine.check()
        return [[one.token_ids for one in output.outputs] for output in outputs]

    def make() -> LLM:
        return LLM(dtype="float32", num_blocks=num_blocks, block_size=8, max_num_seqs=12)

    expected = run(make())
    monkeypatch.setattr(shared_prefixes, "saves_time", lambda *_: True)
    llm = make()
    llm.engine.scheduler.grouper = PrefixGrouper(8, 1)
    steps = []
    schedule = llm.engine.scheduler.schedule

    def spy(**options: bool) -> object:
        step = schedule(**options)
        if step is not None and step.prefix_groups is not None:
            steps.append(step.prefix_groups)
        return step

    monkeypatch.setattr(llm.engine.scheduler, "schedule", spy)
    assert run(llm) == expected
    assert len(steps) > 5
    assert (llm.engine.counts.preemptions > 0) == (num_blocks == 24)

"""Drafts change how many tokens a step gives, and nothing else.

The tiny models of these tests seldom repeat themselves. Where drafts have to be accepted they come
from an oracle: the tokens of the request without speculation, some of them changed at random.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from benchmarks import speculation
from host_sampling import list_tokens, sample
from test_one_step_ahead import (
    BLOCK_SIZE,
    GREEDY,
    GROWING,
    Machine,
    alone,
    finish,
    is_same,
    make_engine,
)

from pagetile import LLM, RequestError, SamplingParams
from pagetile.engine import Engine
from pagetile.engine.ngram import NgramProposer
from pagetile.engine.output_processor import advance
from pagetile.engine.request import State
from pagetile.engine.sampler import Sampler
from pagetile.engine.sampling_rows import SamplingInput

PROMPT = (5, 6, 7, 8, 9)
DRAWN = SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True)


class Oracle:
    """Drafts the tokens that will be generated, each wrong with some probability."""

    def __init__(self, sequence: Any, wrong: float, rng: random.Random, most: int = 7) -> None:
        request = sequence.request
        # Past an end, too: what is drafted after it must be dropped.
        params = replace(request.params, stop=(), stop_token_ids=(), ignore_eos=True, max_tokens=24)
        output = alone(tuple(request.prompt_token_ids), params).outputs[sequence.index]
        self.expected = (*request.prompt_token_ids, *output.token_ids)
        self.sequence, self.wrong, self.rng, self.most = sequence, wrong, rng, most

    def propose(self, most: int) -> list[int]:
        start, most = len(self.sequence.token_ids), max(0, min(most, self.most))
        return [
            self.rng.randrange(96) if self.rng.random() < self.wrong else token_id
            for token_id in self.expected[start : start + most]
        ]


def with_oracle(engine: Engine, wrong: float = 0.0, seed: int = 0) -> Engine:
    make, rng = engine._new_sequence, random.Random(seed)

    def new(*arguments: Any) -> Any:
        sequence = make(*arguments)
        if sequence.proposer is not None:
            sequence.proposer = Oracle(sequence, wrong, rng)
        return sequence

    engine._new_sequence = new  # type: ignore[method-assign]
    return engine


def make_speculative(**options: Any) -> Engine:
    return make_engine(num_speculative_tokens=7, **options)


def count_steps(engine: Engine) -> Counter[str]:
    """Counts launched steps."""
    counts: Counter[str] = Counter()
    run = engine._runner.run

    def counted(step: Any, masks: Any) -> Any:
        counts["steps"] += 1
        counts["decode"] += step.is_decode
        return run(step, masks)

    engine._runner.run = counted  # type: ignore[method-assign]
    return counts


# --- drafts ------------------------------------------------------------------------------------


def test_a_draft_is_what_followed_the_longest_suffix() -> None:
    tokens = [1, 2, 3, 40, 9, 2, 3, 50, 1, 2, 3]
    assert NgramProposer(tokens, 2).propose(7) == [40, 9]  # three tokens match, not the latest two
    assert NgramProposer([2, 3, 40, 2, 3, 50, 2, 3], 7).propose(1) == [50]  # the latest of equals
    assert NgramProposer([1, 2, 3, 4], 7).propose(7) == []
    assert NgramProposer(tokens, 7).propose(0) == NgramProposer(tokens, 7).propose(-1) == []


def test_a_loop_is_drafted_to_the_end() -> None:
    assert NgramProposer([9, 4, 4, 4], 7).propose(7) == [4] * 7
    assert NgramProposer([9, 1, 2, 3, 1, 2, 3], 7).propose(5) == [1, 2, 3, 1, 2]


def test_drafts_are_those_of_a_plain_search() -> None:
    rng, tokens = random.Random(0), [1]
    proposer = NgramProposer(tokens, 7)

    def search() -> list[int]:
        n = len(tokens)
        for length in (4, 3, 2):
            for place in range(n - 1, length - 1, -1):
                if tokens[place - length : place] == tokens[n - length :]:
                    found = (tokens[place:] * 7)[:7]
                    return found
        return []

    num_found = 0
    for _ in range(300):
        tokens += [rng.randrange(7) for _ in range(rng.randint(1, 3))]
        if Counter(pairwise(tokens))[tokens[-2], tokens[-1]] > 16:
            continue  # more places than one look-up compares
        assert proposer._look_up(7) == search()
        num_found += bool(search())
    assert num_found > 100


def lengths_of(proposer: NgramProposer, tokens: list[int], accepted: list[int]) -> list[int]:
    """Lengths of drafts of which so many tokens are accepted, one after another."""
    lengths = []
    for num_accepted in accepted:
        tokens += [1, 2]  # which came before: something is drafted
        coming = proposer._look_up(7)
        lengths.append(len(proposer.propose(7)))
        tokens += coming[:num_accepted]
        if num_accepted < len(coming):
            tokens.append(-len(tokens))  # a token that never came
    return lengths


def test_drafts_follow_recent_acceptance() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 2
    lengths = lengths_of(NgramProposer(tokens, 7), tokens, [0, 0, 0, 0, 0, 7, 7, 7, 3, 7])
    assert lengths == [7, 3, 1, 0, 0, 0, 2, 5, 7, 5]


def test_a_token_that_would_have_been_accepted_brings_drafts_back() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 2
    lengths = lengths_of(NgramProposer(tokens, 1), tokens, [1, 0, 0, 1, 1])
    assert lengths == [1, 1, 0, 0, 1]


def test_a_draft_that_was_not_computed_says_nothing_about_length() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 3
    proposer = NgramProposer(tokens, 7)
    for _ in range(5):
        draft = proposer.propose(7)
        assert len(draft) == 7
        tokens += draft[:1]
    assert len(proposer.propose(2)) == 2  # as many as there is room for, whatever its length
    assert len(proposer.propose(7)) == 7


def test_text_that_hardly_repeats_gets_short_drafts() -> None:
    llm = LLM(num_blocks=32, dtype="float32", speculative="ngram")
    prompt = speculation.make_prompt(llm, 100)
    text = prompt + speculation.edit(prompt, share=0.6)
    with speculation.forced(llm, text):
        run = speculation.run_once(llm, prompt, 100)
    assert list(run.token_ids) == text[100:]
    counts = llm.engine.counts
    assert counts.drafts > 10
    assert counts.draft_tokens < 3 * counts.drafts


# --- the sampler -------------------------------------------------------------------------------


def test_rows_with_drafts_are_sampled_as_they_would_be_later() -> None:
    """Penalties, bad words, min_tokens and noise see the drafted tokens before."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 32, generator=generator)
    logits[:, 8] = 12.0  # an end, too early before the third drafted token
    logits[1, 6] = logits[5, 9] = 20.0  # the ends of bad words
    params = SamplingParams(
        temperature=1.0,
        min_tokens=5,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        top_k=20,
        logit_bias={7: 2.0},
        logprobs=2,
    )
    bad_words = ((3, 4, 9), (4, 6), (5,))
    draft, output = [4, 4, 9, 3, 4], [6, 3]

    def input_of(known: list[int]) -> SamplingInput:
        return SamplingInput(params, [1, 2, 3], known, 11, 0, (0, 8), bad_words)

    expected = [sample(logits[[n]], [input_of(output + draft[:n])])[0] for n in range(6)]
    assert [token.token_id == 8 for token in expected] == [False] * 3 + [True] * 3
    sampler = Sampler(3, 32, torch.device("cpu"))
    sampler.start([2], [input_of(output)])
    sampler.lengths[2] = 5
    rows = [2] * 6
    assumed = [draft[:n] for n in range(6)]
    results = sampler.sample(logits, torch.tensor(rows), rows, None, assumed)
    assert list_tokens(sampler.collect(results, rows)) == expected
    assert sampler.lengths.tolist() == [0, 0, 5], "the row does not advance"
    sampler.accept([2] * 5, draft)
    sampler.lengths[2] += 5
    results = sampler.sample(logits[5:], torch.tensor([2]), [2])
    assert list_tokens(sampler.collect(results, [2])) == expected[5:]


# --- one rule, one test ------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, DRAWN])
def test_accepted_tokens_come_together(params: SamplingParams) -> None:
    engine = with_oracle(make_speculative())
    counts = count_steps(engine)
    request_id = engine.add_request(PROMPT, replace(params, max_tokens=20))
    deltas = finish(engine)
    output = engine.take_output(request_id).outputs[0]
    assert output == alone(PROMPT, replace(params, max_tokens=20)).outputs[0]
    assert tuple(delta.token_id for delta in deltas) == output.token_ids
    assert counts["steps"] == 4  # 1 with the prompt, 8, 8 and 3
    assert engine.counts.draft_tokens == engine.counts.accepted_tokens == 16


def test_a_wrong_draft_costs_nothing_but_its_step() -> None:
    engine = with_oracle(make_speculative(), wrong=1.0)
    request_id = engine.add_request(PROMPT, DRAWN)
    finish(engine)
    assert engine.take_output(request_id).outputs == alone(PROMPT, DRAWN).outputs
    assert engine.counts.draft_tokens > 100
    assert engine.counts.accepted_tokens < 10


def test_without_a_draft_a_step_is_a_decode_step() -> None:
    engine = make_speculative()
    counts = count_steps(engine)
    engine.add_request(PROMPT, GREEDY)
    finish(engine)
    assert not engine.counts.drafts
    assert counts == {"steps": 12, "decode": 11}


@pytest.mark.parametrize("position", range(9))
def test_an_end_within_a_draft_drops_the_rest(position: int) -> None:
    free = alone(PROMPT, DRAWN).outputs[0].token_ids
    word = "".join(chr(32 + token_id) for token_id in free[position : position + 2])
    for params in (
        replace(DRAWN, max_tokens=position + 1, logprobs=1),
        replace(DRAWN, stop_token_ids=[free[position]], logprobs=1),
        replace(DRAWN, stop=[word], logprobs=1),
    ):
        engine = with_oracle(make_speculative())
        request_id = engine.add_request(PROMPT, params, stream=True)
        deltas = finish(engine)
        [output] = engine.take_output(request_id).outputs
        assert is_same(output, alone(PROMPT, params).outputs[0])
        assert [delta.token_id for delta in deltas] == list(output.token_ids)
        assert "".join(delta.text for delta in deltas) == output.text


def test_only_accepted_tokens_are_indexed() -> None:
    """And all full blocks of them, at once."""
    engine = with_oracle(make_speculative(), wrong=0.3)
    engine.add_request(PROMPT, replace(GREEDY, max_tokens=30))
    [sequence] = engine._requests[0].sequences
    num_tokens = 0
    while engine.has_unfinished:
        engine.step()
        held = [block for block in sequence.table.blocks if block in engine._index]
        num_tokens = len(sequence.token_ids)
        if sequence.state is State.RUNNING:
            assert len(held) == (num_tokens - 1) // BLOCK_SIZE
            assert len(sequence.table.blocks) == -(-(num_tokens - 1) // BLOCK_SIZE)
    engine.check()
    assert 0 < engine.counts.accepted_tokens < engine.counts.draft_tokens
    assert len(engine._index) == (num_tokens - 1) // BLOCK_SIZE
    prompt = (*PROMPT, *engine.take_output(0).outputs[0].token_ids[:24])
    request_id = engine.add_request(prompt, GREEDY)
    finish(engine)
    output = engine.take_output(request_id)
    assert output.num_cached_tokens == 28
    assert output.outputs == alone(prompt, GREEDY).outputs


def test_drafts_preempt_nobody() -> None:
    engine = with_oracle(make_speculative(num_blocks=8))
    ids = [engine.add_request(PROMPT[n:], replace(GREEDY, max_tokens=10)) for n in range(2)]
    finish(engine)
    assert engine.counts.accepted_tokens > 0
    assert engine.counts.preemptions == 0  # 4 blocks each
    for n, request_id in enumerate(ids):
        expected = alone(PROMPT[n:], replace(GREEDY, max_tokens=10))
        assert engine.take_output(request_id).outputs == expected.outputs


def test_drafts_leave_every_sequence_its_token() -> None:
    engine = with_oracle(make_speculative(max_num_seqs=4, max_num_batched_tokens=8))
    for n in range(4):
        engine.add_request(PROMPT[n:], replace(GREEDY, max_tokens=20))
    while engine.has_unfinished:
        running = {s: s.num_tokens for s in engine.scheduler.running if s.output_token_ids}
        engine.step()
        assert all(len(s.token_ids) > n for s, n in running.items())
    assert engine.counts.accepted_tokens > 10


def test_drafts_do_not_count_as_prompt_tokens() -> None:
    """The size of chunks beside streams goes by what prompt tokens take."""
    engine = with_oracle(make_speculative())
    for n in range(5):
        engine.add_request(PROMPT[n:], replace(GREEDY, max_tokens=20))
    finish(engine)
    chunks = engine.scheduler.chunks
    assert chunks._decode
    assert not chunks._fit.mean_y  # the prompts are too few to tell


def test_samples_of_a_prompt_are_drafted_one_by_one() -> None:
    engine = with_oracle(make_speculative(), wrong=0.2)
    params = replace(DRAWN, n=3, presence_penalty=0.7, logprobs=1)
    request_id = engine.add_request(PROMPT, params)
    finish(engine)
    outputs = engine.take_output(request_id).outputs
    assert all(map(is_same, outputs, alone(PROMPT, params).outputs))
    assert engine.counts.accepted_tokens > 10


def test_a_sequence_with_a_grammar_has_no_drafts() -> None:
    engine = with_oracle(make_speculative())
    request_id = engine.add_request(
        PROMPT, replace(DRAWN, ignore_eos=False, structured_outputs=GROWING)
    )
    other = engine.add_request(PROMPT, GREEDY)
    finish(engine)
    [output] = engine.take_output(request_id).outputs
    tokens = [token_id for token_id in output.token_ids if token_id != 2]
    assert tokens == sorted({*tokens})
    assert engine.take_output(other).outputs == alone(PROMPT, GREEDY).outputs
    assert engine.counts.draft_tokens == engine.counts.accepted_tokens == 9


def test_nan_in_a_draft_fails_the_sequence_where_it_would_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NaN in logits after a wrong draft has no effect."""
    for position, reason in ((2, "error"), (4, "length")):
        engine = with_oracle(make_speculative())
        forward = engine.model.forward

        def spoil(batch: Any, forward: Any = forward, position: int = position) -> torch.Tensor:
            logits = forward(batch)
            if len(logits) > 1:
                logits[position] = torch.nan
            return logits

        monkeypatch.setattr(engine.model, "forward", spoil)
        request_id = engine.add_request(PROMPT, replace(GREEDY, max_tokens=8))
        engine.step()
        [sequence] = engine._requests[request_id].sequences
        expected = list(sequence.proposer.expected)
        expected[len(PROMPT) + 4] ^= 1  # the fourth of the draft
        sequence.proposer.expected = tuple(expected)
        monkeypatch.setattr(sequence.proposer, "most", 5)
        engine.step()
        monkeypatch.setattr(engine.model, "forward", forward)
        finish(engine)
        [output] = engine.take_output(request_id).outputs
        assert output.finish_reason == reason
        assert len(output.token_ids) == (3 if reason == "error" else 8)


def test_an_interruption_amid_accepted_tokens_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = with_oracle(make_speculative())
    num_calls = 0

    def interrupted(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 6:
            raise KeyboardInterrupt
        return advance(*args)

    monkeypatch.setattr("pagetile.engine.core.advance", interrupted)
    request_id = engine.add_request(PROMPT, replace(GREEDY, max_tokens=20))
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.check()
    deltas = finish(engine)
    output = engine.take_output(request_id).outputs[0]
    assert output == alone(PROMPT, replace(GREEDY, max_tokens=20)).outputs[0]
    assert [delta.token_id for delta in deltas] == list(output.token_ids)[1:]


# --- all of it at once -------------------------------------------------------------------------


class SpeculativeMachine(Machine):
    """The random state machine of ``test_one_step_ahead``, with an oracle's drafts."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, num_speculative_tokens=7)
        with_oracle(self.engine, wrong=self.rng.choice([0.0, 0.1, 0.5]), seed=seed)


def test_whatever_happens_each_request_gets_what_it_gets_alone() -> None:
    preemptions = failures = accepted = rejected = 0
    for seed in range(3):
        machine = SpeculativeMachine(seed)
        for _ in range(70):
            machine.rng.choices([machine.add, machine.abort, machine.step], [4, 1, 14])[0]()
            machine.check()
        machine.finish()
        counts = machine.engine.counts
        preemptions += counts.preemptions
        failures += machine.num_failures
        accepted += counts.accepted_tokens
        rejected += counts.draft_tokens - counts.accepted_tokens
    assert min(preemptions, failures) > 5, "the machine mixes all of it"
    assert min(accepted, rejected) > 100


# --- LLM ---------------------------------------------------------------------------------------


def test_llm_copies_faster_and_says_the_same() -> None:
    prompt = "def add(a, b):\n    return a + b\n\n" * 3
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    plain = LLM(num_blocks=64, dtype="float32")
    drafted = LLM(num_blocks=64, dtype="float32", speculative="ngram", num_speculative_tokens=5)
    expected = plain.generate(prompt, params, use_tqdm=False)
    assert drafted.generate(prompt, params, use_tqdm=False)[0].outputs == expected[0].outputs
    counts = drafted.engine.counts
    assert counts.accepted_tokens > 24
    assert counts.draft_tokens <= 5 * counts.drafts


def test_the_benchmark_has_a_model_copy_with_edits() -> None:
    llm = LLM(num_blocks=16, dtype="float32", speculative="ngram")
    prompt = speculation.make_prompt(llm, 60)
    text = prompt + speculation.edit(prompt)
    with speculation.forced(llm, text):
        run = speculation.run_once(llm, prompt, 60)
    assert list(run.token_ids) == text[60:] != prompt
    assert run.num_steps < 25


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative": "eagle"}, "speculative='eagle': expected 'ngram' or None"),
        ({"speculative": "ngram", "num_speculative_tokens": 0}, "expected a whole number"),
        ({"speculative": "ngram", "num_speculative_tokens": 99}, "from 1 to 15"),
        ({"num_speculative_tokens": 3}, "=3: expected speculative='ngram' too"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        LLM(**options)

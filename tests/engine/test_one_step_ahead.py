"""A step is scheduled before the tokens of the one before it are known: nothing changes.

Each rule of ``scheduler.py`` has a test, and a random state machine mixes all events: arrivals,
forks, aborts, preemption, failures, ends by length, token and string. After every step the pool,
the index and the steps in flight are checked. A storm is the same machine with many requests, some
of them invalid and many aborted, in a pool with room for little more than one.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from pagetile import RequestError, SamplingParams
from pagetile.engine import Engine, kernel_steps
from pagetile.engine.cuda_graphs import StepGraphs
from pagetile.engine.detokenizer import Detokenizer
from pagetile.engine.structured_outputs import StructuredOutputsParams
from pagetile.engine.warming import run_made_up
from pagetile.kv_cache import BlockPool
from pagetile.kv_cache.storage import KVCache
from pagetile.models import load_model

BLOCK_SIZE = 4
MAX_LEN = 40
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class Letters:
    """A tokenizer of one character a token."""

    def encode(self, text: str, **options: Any) -> list[int]:
        return [ord(letter) - 32 for letter in text]

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return "".join(chr(32 + token_id) for token_id in token_ids)


def make_engine(
    num_blocks: int = 64, is_ahead: bool | None = True, num_layers: int = 3, **options: Any
) -> Engine:
    model = load_model(tiny_model("llama", num_hidden_layers=num_layers))
    cache = KVCache(model.layers, BlockPool(num_blocks, BLOCK_SIZE))
    for layer in (*cache.k, *cache.v):
        layer.fill_(torch.nan)  # unwritten memory spoils any row that reads it
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, **options}
    engine = Engine(
        model,
        cache,
        Letters(),
        max_model_len=min(MAX_LEN, cache.num_tokens),
        async_scheduling=is_ahead,
        **options,
    )
    engine.grammars.compile = lambda form: OddOnly  # type: ignore[assignment, method-assign]
    return engine


@pytest.fixture
def engine() -> Engine:
    return make_engine()


def finish(engine: Engine) -> list[Any]:
    deltas = []
    for _ in range(2000):
        if not engine.has_unfinished:
            break
        deltas += engine.step()
        engine.check()
    assert not engine.has_unfinished
    assert engine.pool.num_free == engine.pool.num_blocks
    return deltas


@cache
def quiet_engine(num_layers: int) -> Engine:
    """An engine with a large pool that runs a step after the other, and shares nothing."""
    return make_engine(is_ahead=False, enable_prefix_caching=False, num_layers=num_layers)


@cache
def alone(prompt: tuple[int, ...], params: SamplingParams, num_layers: int = 3) -> Any:
    """An undisturbed engine's output for a request alone."""
    engine = quiet_engine(num_layers)
    request_id = engine.add_request(prompt, params)
    finish(engine)
    return engine.take_output(request_id)


def is_same(output: Any, expected: Any) -> bool:
    """Compare text, tokens and reasons; log-probabilities up to rounding, and their number."""
    if replace(output, logprobs=None, cumulative_logprob=None) != replace(
        expected, logprobs=None, cumulative_logprob=None
    ):
        return False
    if output.logprobs is None or expected.logprobs is None:
        return output.logprobs is expected.logprobs
    found, wanted = (
        [[t.logprob, *t.top_logprobs] for t in o.logprobs.tokens] for o in (output, expected)
    )
    return len(found) == len(output.token_ids) and all(
        a == pytest.approx(b, abs=1e-4) for a, b in zip(found, wanted, strict=True)
    )


# --- one rule, one test ------------------------------------------------------------------------


def test_the_next_step_is_launched_before_tokens_are_read_and_turned_into_text(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []

    def note(owner: Any, name: str, event: str) -> None:
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: events.append(event) or call(*args))

    note(engine._runner, "run", "launch")
    note(engine._runner, "read", "read")
    note(Detokenizer, "append", "text")
    engine.add_request([5, 6, 7], replace(GREEDY, max_tokens=4), stream=True)
    finish(engine)
    ahead = ["launch", "read", "text"]
    assert events == ["launch", *ahead * 3, "read", "text"]


@pytest.mark.parametrize(
    ("is_ahead", "options", "most"),
    [
        (True, {}, 2),
        (False, {}, 1),
        (None, {}, 1),  # on a CPU
        (True, {"num_speculative_tokens": 3}, 1),
    ],
)
def test_steps_overlap_only_where_that_is_asked_for(
    is_ahead: bool | None, options: dict[str, Any], most: int
) -> None:
    engine, seen = make_engine(is_ahead=is_ahead, **options), []
    run = engine._runner.run

    def watched(step: Any, masks: Any) -> Any:
        seen.append(len(engine._in_flight) + 1)
        return run(step, masks)

    engine._runner.run = watched  # type: ignore[method-assign]
    request_id = engine.add_request([5, 6, 7], GREEDY)
    finish(engine)
    assert max(seen) == most
    assert engine.take_output(request_id).outputs == alone((5, 6, 7), GREEDY).outputs


def test_a_length_is_foreseen_and_costs_no_step_more() -> None:
    for is_ahead in (False, True):
        engine, computed = make_engine(is_ahead=is_ahead), []
        run = engine._runner.run

        def watched(step: Any, masks: Any, run: Any = run, computed: Any = computed) -> Any:
            computed.append(sum(step.num_tokens))
            return run(step, masks)

        engine._runner.run = watched  # type: ignore[method-assign]
        engine.add_request([5, 6, 7], replace(GREEDY, max_tokens=4))
        finish(engine)
        assert computed == [3, 1, 1, 1]


def test_the_token_after_an_end_is_dropped(engine: Engine) -> None:
    free = alone((5, 6, 7), GREEDY).outputs[0].token_ids
    stop = replace(GREEDY, stop_token_ids=[free[4]], logprobs=1)
    request_id = engine.add_request([5, 6, 7], stop)
    deltas = finish(engine)
    [output] = engine.take_output(request_id).outputs
    cut = free.index(free[4]) + 1
    assert output.token_ids == free[:cut]
    assert [delta.token_id for delta in deltas] == list(free[:cut])
    assert len(output.logprobs) == cut
    assert is_same(output, alone((5, 6, 7), stop).outputs[0])


def test_blocks_of_an_ended_sequence_wait_for_the_step_that_writes_them(engine: Engine) -> None:
    free = alone((5, 6, 7), GREEDY).outputs[0].token_ids
    request_id = engine.add_request([5, 6, 7], replace(GREEDY, stop_token_ids=[free[2]]))
    engine.add_request([9, 9], replace(GREEDY, max_tokens=30))
    while not engine.is_finished(request_id):
        engine.step()
    [sequence] = engine._requests[request_id].sequences
    [launched] = engine._in_flight
    assert sequence in launched.step.sequences
    assert all(engine.pool.ref_count(block) for block in sequence.table.blocks)
    assert sequence.table.blocks
    engine.step()
    assert not sequence.table.blocks
    finish(engine)


def test_blocks_are_found_by_known_tokens_only(engine: Engine) -> None:
    engine.add_request([5, 6, 7], replace(GREEDY, max_tokens=30))
    [sequence] = engine._requests[0].sequences
    num_full = 0
    while engine.has_unfinished:
        engine.step()
        held = [block for block in sequence.table.blocks if block in engine._index]
        # The last known token is not computed by a step that was read.
        assert len(held) <= (len(sequence.token_ids) - 1) // BLOCK_SIZE
        num_full = max(num_full, len(held))
    assert num_full == 7


def test_nothing_is_preempted_while_a_step_is_in_flight() -> None:
    engine, seen = make_engine(num_blocks=10), []
    preempt = engine.scheduler._preempt

    def watched(sequence: Any) -> None:
        seen.append(len(engine._in_flight))
        assert sequence.num_tokens == len(sequence.token_ids)
        preempt(sequence)

    engine.scheduler._preempt = watched  # type: ignore[method-assign]
    prompts = [(5, 6, 7), (8, 9), (10, 11, 12, 13)]
    ids = [engine.add_request(prompt, replace(GREEDY, max_tokens=20)) for prompt in prompts]
    finish(engine)
    assert seen
    assert not any(seen)
    for request_id, prompt in zip(ids, prompts, strict=True):
        expected = alone(prompt, replace(GREEDY, max_tokens=20))
        assert engine.take_output(request_id).outputs == expected.outputs


def test_forks_sample_in_the_step_that_computes_the_prompt(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=9, ignore_eos=True)
    request_id = engine.add_request([5, 6, 7, 8, 9], params)
    deltas = engine.step()
    assert [delta.index for delta in deltas] == [0, 1, 2]
    finish(engine)
    outputs = engine.take_output(request_id).outputs
    assert all(map(is_same, outputs, alone((5, 6, 7, 8, 9), params).outputs))
    assert len({output.token_ids for output in outputs}) == 3


def test_an_abort_leaves_what_was_returned(engine: Engine) -> None:
    request_id = engine.add_request([5, 6, 7], GREEDY)
    other = engine.add_request([8, 9], GREEDY)
    deltas = [delta for _ in range(3) for delta in engine.step()]
    engine.abort(request_id)
    engine.check()
    deltas += finish(engine)
    [output] = engine.take_output(request_id).outputs
    returned = [delta.token_id for delta in deltas if delta.request_id == request_id]
    assert list(output.token_ids) == returned
    assert output.token_ids == alone((5, 6, 7), GREEDY).outputs[0].token_ids[:3]
    assert engine.take_output(other).outputs == alone((8, 9), GREEDY).outputs


def test_an_abort_of_all_leaves_nothing_in_flight(engine: Engine) -> None:
    request_id = engine.add_request([5, 6, 7], GREEDY)
    engine.step()
    assert engine._in_flight
    engine.abort(request_id)
    assert not engine.has_unfinished
    assert engine.pool.num_free == engine.pool.num_blocks


@pytest.mark.parametrize("where", ["launch", "read"])
def test_a_failure_in_flight_loses_and_doubles_nothing(engine: Engine, where: str) -> None:
    name = {"launch": "run", "read": "read"}[where]
    whole, num_calls = getattr(engine._runner, name), 0

    def sometimes(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 4 == 3:
            raise RuntimeError("once")
        return whole(*args)

    setattr(engine._runner, name, sometimes)
    params = replace(GREEDY, logprobs=1, temperature=0.9, seed=5, n=2)
    request_id, deltas, failures = engine.add_request([5, 6, 7], params), [], 0
    while engine.has_unfinished:
        try:
            deltas += engine.step()
        except RuntimeError:
            failures += 1
        engine.check()
    outputs = engine.take_output(request_id).outputs
    assert failures > 2
    assert all(map(is_same, outputs, alone((5, 6, 7), params).outputs))
    for output in outputs:
        found = [delta.token_id for delta in deltas if delta.index == output.index]
        assert tuple(found) == output.token_ids


@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_a_failed_launch_is_waited_for_before_its_memory_is_used_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, num_in_flight: int
) -> None:
    """The memory that it has copied into so far belongs to no step that will be read."""
    events = []
    run, restart, wait = engine._runner.run, engine.scheduler.restart, engine._runner.wait
    monkeypatch.setattr(engine._runner, "wait", lambda: events.append("wait") or wait())
    monkeypatch.setattr(
        engine.scheduler, "restart", lambda new: events.append("restart") or restart(new)
    )

    def fail(*args: Any) -> Any:
        if len(engine._in_flight) == num_in_flight:
            raise RuntimeError("once")
        return run(*args)

    engine.add_request([5, 6, 7], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", fail)
        with pytest.raises(RuntimeError, match="once"):
            engine.step()
    assert events == ["wait", "restart"]
    finish(engine)
    assert engine.take_output(0).outputs == alone((5, 6, 7), GREEDY).outputs


def test_blocks_of_a_step_that_failed_are_never_found(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys were not written: a prompt that reused them would read stale content."""
    prompt = tuple(range(5, 26))
    with monkeypatch.context() as patch:

        def fail(step: Any) -> torch.Tensor:
            raise RuntimeError("once")

        patch.setattr(engine.model, "forward", fail)
        failed = engine.add_request(prompt, GREEDY)
        with pytest.raises(RuntimeError, match="once"):
            engine.step()
    engine.abort(failed)
    request_id = engine.add_request(prompt, GREEDY)
    finish(engine)
    output = engine.take_output(request_id)
    assert output.num_cached_tokens == 0
    assert output.outputs == alone(prompt, GREEDY).outputs


def test_blocks_that_led_to_nan_are_never_found(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, forward = tuple(range(5, 26)), engine.model.forward
    with monkeypatch.context() as patch:

        def spoil(step: Any) -> torch.Tensor:
            return forward(step) * torch.nan

        patch.setattr(engine.model, "forward", spoil)
        failed = engine.add_request(prompt, GREEDY)
        engine.step()
    assert engine.take_output(failed).outputs[0].finish_reason == "error"
    finish(engine)
    request_id = engine.add_request(prompt, GREEDY)
    finish(engine)
    assert engine.take_output(request_id).num_cached_tokens == 0


GROWING = StructuredOutputsParams(grammar="of OddOnly, whatever it says")


class OddOnly:
    """A grammar that allows tokens larger than the one before, or the end."""

    def __init__(self) -> None:
        self.last = -1

    def fill_mask(self, mask: Any) -> None:
        mask[:] = 0
        for token_id in range(self.last + 1, 96):
            mask[token_id // 32] |= (1 << token_id % 32) - ((token_id % 32 == 31) << 32)
        mask[2 // 32] |= 1 << 2  # the end

    def accept(self, token_id: int) -> None:
        self.last = token_id

    def find_error(self) -> str:
        return ""


def test_a_prompt_to_be_scored_gets_its_blocks_while_small_ones_keep_coming() -> None:
    engine = make_engine(num_blocks=10)
    few = replace(GREEDY, max_tokens=3)
    scored = None
    for number in range(60):
        engine.add_request([3 + number], few)
        engine.add_request([3 + number, 4], few)
        engine.step()
        engine.check()
        if number == 5:  # it takes 8 of the 10 blocks
            scored = engine.add_request([*range(3, 33)], replace(few, prompt_logprobs=1))
    assert engine.is_finished(scored)
    finish(engine)


def step_that_fails(engine: Engine) -> None:
    def fail(*args: Any) -> Any:
        raise Injected

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._runner, "run", fail)
        with pytest.raises(Injected):
            engine.step()


@pytest.mark.parametrize("is_ahead", [False, True])
def test_what_ended_in_a_step_that_failed_is_still_told(is_ahead: bool) -> None:
    engine = make_engine(is_ahead=is_ahead)
    scored = engine.add_request([5, 6, 7], replace(GREEDY, prompt_logprobs=1), generates=False)
    victim = engine.add_request([8, 9], GREEDY)
    step_that_fails(engine)
    engine.abort(victim)
    engine.take_output(victim)
    assert engine.has_unfinished
    assert [(d.request_id, d.finish_reason) for d in engine.step()] == [(scored, "length")]
    assert not engine.has_unfinished


def test_a_request_gets_no_delta_of_an_earlier_one_of_its_name(engine: Engine) -> None:
    def start(generates: bool) -> None:
        params = replace(GREEDY, prompt_logprobs=1)
        engine.add_request([5, 6, 7], params, request_id="x", generates=generates)

    start(generates=False)
    other = engine.add_request([8, 9], GREEDY)
    step_that_fails(engine)
    engine.take_output("x")
    engine.abort(other)
    assert not engine.has_unfinished
    start(generates=True)
    deltas = [delta for delta in finish(engine) if delta.request_id == "x"]
    assert [delta.finish_reason for delta in deltas] == [None] * 11 + ["length"]


def test_a_grammar_sees_each_token_before_it_restricts_the_next(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=12, structured_outputs=GROWING)
    request_id = engine.add_request([5, 6, 7], params)
    other = engine.add_request([8, 9], GREEDY)
    finish(engine)
    for output in engine.take_output(request_id).outputs:
        tokens = [token_id for token_id in output.token_ids if token_id != 2]
        assert tokens == sorted({*tokens})
    assert engine.take_output(other).outputs == alone((8, 9), GREEDY).outputs


# --- all of it at once -------------------------------------------------------------------------


class Injected(Exception):
    """A failure that the state machine injects."""


class Machine:
    """Runs an engine through random events and keeps the results that it should give."""

    num_layers = 3
    lengths = (3, 9, 15)
    longest = 8
    """Tokens of a prompt, without the common beginning."""
    failing = 0.06
    """Part of the steps that fail."""
    compared = 1.0
    """Part of the undisturbed requests that are compared with a run alone."""

    def __init__(self, seed: int, **options: Any) -> None:
        self.rng = random.Random(seed)
        self.engine = make_engine(
            num_layers=self.num_layers, **{**self.choose_options(), **options}
        )
        self.asked: dict[Any, tuple[tuple[int, ...], SamplingParams]] = {}
        self.live: list[Any] = []
        self.texts: dict[tuple[Any, int], str] = {}
        self.tokens: dict[tuple[Any, int], list[int]] = {}
        self.aborted: set[Any] = set()
        self.written: dict[int, list[tuple[Any, list[int]]]] = {}
        self.is_failing, self.num_failures = "", 0
        engine = self.engine
        run, read, forward = engine._runner.run, engine._runner.read, engine.model.forward

        def watched(step: Any, masks: Any) -> Any:
            self.fail_if("before")
            launched = run(step, masks)
            self.written[id(launched)] = [
                (s, s.table.blocks[(end - n) // BLOCK_SIZE : -(-end // BLOCK_SIZE)])
                for s, n, end in zip(step.sequences, step.num_tokens, step.ends, strict=True)
            ]
            self.fail_if("after")
            return launched

        def watched_read(launched: Any) -> Any:
            self.fail_if("read")
            return read(launched)

        def watched_forward(batch: Any) -> Any:
            logits = forward(batch)
            self.fail_if("forward")
            return logits

        engine._runner.run = watched  # type: ignore[method-assign]
        engine._runner.read = watched_read  # type: ignore[method-assign]
        engine.model.forward = watched_forward  # type: ignore[method-assign]

    def choose_options(self) -> dict[str, Any]:
        rng = self.rng
        return {
            "num_blocks": rng.choice([10, 12, 20]),
            "is_ahead": rng.random() < 0.8,
            "max_num_batched_tokens": rng.choice([8, 12, 64]),
            "enable_prefix_caching": rng.random() < 0.8,
        }

    def choose_more(self) -> dict[str, Any]:
        """More sampling parameters of a request."""
        return {}

    def fail_if(self, where: str) -> None:
        if self.is_failing == where:
            self.is_failing, self.num_failures = "", self.num_failures + 1
            raise Injected

    def add(self) -> None:
        rng = self.rng
        head = rng.choice([(), (11, 12, 13, 14, 15, 16, 17, 18, 19)])
        prompt = head + tuple(rng.randrange(3, 96) for _ in range(rng.randint(1, self.longest)))
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.9]),
            seed=rng.randrange(5),
            top_k=rng.choice([0, 0, 8]),
            top_p=rng.choice([1.0, 0.8]),
            presence_penalty=rng.choice([0.0, 0.0, 0.7]),
            min_tokens=rng.choice([0, 0, 3]),
            logprobs=rng.choice([None, None, 2]),
            prompt_logprobs=rng.choice([None, None, None, 1]),
            n=rng.choice([1, 1, 3]),
            stop=rng.choice([(), (), ("a", "Q7"), ("zz",)]),
            stop_token_ids=rng.choice([(), (30, 40, 50, 60, 70, 80)]),
            ignore_eos=rng.random() < 0.5,
            max_tokens=rng.choice(self.lengths),
        )
        params = replace(params, **self.choose_more())
        stream = rng.random() < 0.5
        request_id = self.engine.add_request(prompt, params, stream=stream)
        self.asked[request_id] = prompt, params
        self.live.append(request_id)

    def abort(self) -> None:
        self.live = [i for i in self.live if not self.engine.is_finished(i)]
        if self.live:
            request_id = self.rng.choice(self.live)
            self.engine.abort(request_id)
            self.aborted.add(request_id)

    def step(self) -> None:
        if self.rng.random() < self.failing:
            self.is_failing = self.rng.choice(["before", "after", "read", "forward"])
        try:
            deltas = self.engine.step()
        except Injected:
            deltas = []
        self.is_failing = ""
        for delta in deltas:
            key = delta.request_id, delta.index
            self.texts[key] = self.texts.get(key, "") + delta.text
            if delta.token_id is not None:
                self.tokens.setdefault(key, []).append(delta.token_id)

    def check(self) -> None:
        self.engine.check()
        for launched in self.engine._in_flight:
            for sequence, blocks in self.written[id(launched)]:
                held = set(sequence.table.blocks)
                assert held.issuperset(blocks), "a step in flight writes what others may take"

    def finish(self) -> None:
        for _ in range(3000 + len(self.asked)):
            if not self.engine.has_unfinished:
                break
            self.step()
            self.check()
        engine = self.engine
        assert not engine.has_unfinished
        assert engine.pool.num_free == engine.pool.num_blocks
        for request_id, (prompt, params) in self.asked.items():
            request = engine._requests[request_id]
            output = engine.take_output(request_id)
            assert output.finished
            reasons = {one.finish_reason for one in output.outputs}
            assert ("abort" in reasons) == (request_id in self.aborted)
            assert reasons <= {"stop", "length", "abort", "error"}
            if self.rng.random() >= self.compared:
                continue
            expected = alone(prompt, params, self.num_layers)
            for one in output.outputs:
                key = request_id, one.index
                wanted = expected.outputs[one.index]
                if one.finish_reason == "error":
                    assert "its prompt's scores failed: Injected" in one.error
                    continue
                assert tuple(self.tokens.get(key, ())) == one.token_ids
                if one.finish_reason == "abort":
                    assert request_id in self.aborted
                    assert one.token_ids == wanted.token_ids[: len(one.token_ids)]
                    assert len(one.logprobs or one.token_ids) == len(one.token_ids)
                    continue
                assert is_same(one, wanted), (prompt, params, one, wanted)
                if request.stream or params.stop:
                    assert self.texts[key] == one.text
                if params.prompt_logprobs is not None:
                    found, scores = (o.prompt_logprobs.tokens[1:] for o in (output, expected))
                    assert len(found) == len(prompt) - 1
                    assert [t.logprob for t in found] == pytest.approx(
                        [t.logprob for t in scores], abs=1e-4
                    )


@pytest.mark.parametrize(
    "group", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))]
)
def test_whatever_happens_each_request_gets_what_it_gets_alone(group: int) -> None:
    preemptions = failures = late = 0
    for seed in range(6 * group, 6 * group + 6):
        machine = Machine(seed)
        for _ in range(70):
            machine.rng.choices([machine.add, machine.abort, machine.step], [4, 1, 14])[0]()
            machine.check()
            late += bool(machine.engine.scheduler.ended)
        machine.finish()
        preemptions += machine.engine.counts.preemptions
        failures += machine.num_failures
    assert min(preemptions, failures, late) > 5, "the machine mixes all of it"


class Tight(Machine):
    """As few rows, blocks and tokens a step as there can be, and prompts as long as a sequence."""

    num_layers = 1
    longest = MAX_LEN - 10
    failing = 0.02

    def choose_options(self) -> dict[str, Any]:
        rng = self.rng
        self.num_rows = rng.choice([1, 2, 3, 3])
        return {
            "num_blocks": rng.choice([10, 11]),
            "is_ahead": rng.random() < 0.7,
            "max_num_seqs": self.num_rows,
            "max_num_batched_tokens": rng.choice([self.num_rows, 4, 64]),
            "enable_prefix_caching": rng.random() < 0.8,
            "num_speculative_tokens": rng.choice([0, 0, 3]),
        }

    def choose_more(self) -> dict[str, Any]:
        num_samples, length = self.rng.choice([1, self.num_rows]), self.rng.choice([1, 2, 9, None])
        return {"n": num_samples, "max_tokens": length, "min_tokens": 0}


def test_the_smallest_rooms_lose_nothing() -> None:
    preemptions = 0
    for seed in range(8):
        machine = Tight(seed)
        for _ in range(50):
            machine.rng.choices([machine.add, machine.abort, machine.step], [4, 1, 14])[0]()
            machine.check()
        machine.finish()
        preemptions += machine.engine.counts.preemptions
    assert preemptions > 3


class Replayed(StepGraphs):
    """Replaces graphs where nothing can be recorded: runs a step on its static inputs again."""

    large_ones_wait = False

    def __init__(self, step: Any, clear: Any, sizes: list[int], pool: Any = None) -> None:
        super().__init__(step, clear, sizes, pool=0)
        self.num_replayed = self.num_refused = 0

    def ensure(self, size: int, *form: bool) -> bool:
        is_recorded = super().ensure(size, *form)
        self.num_refused += not is_recorded
        return is_recorded

    def _record(self, size: int, *form: bool) -> None:
        self._clear(size)
        if self.large_ones_wait and size > self.sizes[0]:
            self.reasons[(size, *form)] = "it waits"
            return
        self._recorded[(size, *form)] = self._step(size, *form)  # type: ignore[assignment]

    def replay(self, size: int, *form: bool) -> Any:
        assert (size, *form) in self._recorded
        self.num_replayed += 1
        return self._step(size, *form)


class KernelMachine(Machine):
    """Steps are laid out and sampled by kernels, in padded sizes, as on a GPU.

    Host memory is used in turn as there, and a step's tokens are read a step later.
    """

    num_layers = 1

    def choose_options(self) -> dict[str, Any]:
        options = {**super().choose_options(), "max_num_seqs": 6}
        return options | ({"max_num_batched_tokens": 64} if Replayed.large_ones_wait else {})

    def choose_more(self) -> dict[str, Any]:
        """Some are sampled by kernels, some by torch code."""
        forms = [
            {}, {"repetition_penalty": 1.3}, {"logit_bias": {50: 4.0, 2: -9.0}}, {"min_p": 0.1},
            {"allowed_token_ids": [*range(3, 96, 2)]}, {"bad_words": ["ab", "Q", "%&"]},
            {"logprobs": 30},
        ]  # fmt: skip
        return self.rng.choice(forms)

    def use_kernels(self) -> None:
        kernels = self.engine._runner.use_kernels()
        kernels.make_graphs(self.engine.scheduler.max_num_batched_tokens)


@pytest.mark.interpret
@pytest.mark.parametrize("large_ones_wait", [False, True])
def test_steps_by_kernels_give_each_request_what_it_gets_alone(
    monkeypatch: pytest.MonkeyPatch, large_ones_wait: bool
) -> None:
    monkeypatch.setattr(kernel_steps, "StepGraphs", Replayed)
    monkeypatch.setattr(Replayed, "large_ones_wait", large_ones_wait)
    failures = preemptions = 0
    replayed, refused = Counter[str](), Counter[str]()
    for seed in range(3):
        machine = KernelMachine(seed, is_ahead=True)
        machine.use_kernels()
        for _ in range(90):
            machine.rng.choices([machine.add, machine.abort, machine.step], [4, 1, 14])[0]()
            machine.check()
        machine.finish()
        kernels = machine.engine._runner.kernels
        for name in ("graphs", "prompt_graphs"):
            replayed[name] += getattr(kernels, name).num_replayed
            refused[name] += getattr(kernels, name).num_refused
        failures += machine.num_failures
        preemptions += machine.engine.counts.preemptions
    assert min(replayed["graphs"], replayed["prompt_graphs"]) > 30
    assert [refused[name] > 3 for name in replayed] == [large_ones_wait] * 2
    assert min(failures, preemptions) > 2


class Storm(Machine):
    """Many short requests for a pool of nine blocks, as many as one of them may need."""

    num_layers = 1
    lengths = (3, 4, 6)
    failing = 0.01
    compared = 0.1

    def choose_options(self) -> dict[str, Any]:
        return {"num_blocks": 9, "max_num_batched_tokens": 24}

    def add_invalid(self) -> None:
        engine = self.engine
        num_waiting, num_free = len(engine.scheduler.waiting), engine.pool.num_free
        wrong: list[tuple[Any, SamplingParams]] = [
            ([], GREEDY),
            ([5, 96], GREEDY),
            ([5, -1], GREEDY),
            ([5.5], GREEDY),
            ([7] * 36, GREEDY),
            ([7] * 400, replace(GREEDY, max_tokens=1)),
            ([5], replace(GREEDY, n=9)),
            ([5], replace(GREEDY, stop_token_ids=[96])),
            ([5], replace(GREEDY, logit_bias={96: 1.0})),
        ]
        with pytest.raises(RequestError):
            engine.add_request(*self.rng.choice(wrong))
        assert len(engine._requests) == len(self.asked)
        assert len(engine.scheduler.waiting) == num_waiting
        assert engine.pool.num_free == num_free

    def run(self, num_requests: int) -> None:
        rng, scheduler, num_invalid = self.rng, self.engine.scheduler, 0
        for number in range(num_requests):
            if number % 10 == 9:
                self.add_invalid()
                num_invalid += 1
            else:
                self.add()
            if rng.random() < 0.36:
                self.abort()
            while len(scheduler.waiting) > 12 or rng.random() < 0.5:
                self.step()
                self.check()
        self.finish()
        assert len(self.asked) + num_invalid == num_requests
        assert len(self.aborted) >= num_requests // 4
        assert scheduler.counts.preemptions > num_requests // 20
        assert scheduler.counts.cached_tokens > num_requests
        assert self.num_failures


@pytest.mark.parametrize("num_requests", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_storm_loses_no_block_and_leaves_no_request_unanswered(num_requests: int) -> None:
    Storm(num_requests).run(num_requests)


def test_warming_up_leaves_no_trace(engine: Engine) -> None:
    """The steps that a GPU records before the first request are run here explicitly."""
    run_made_up(engine, 300)
    engine.check()
    assert engine.pool.num_free == engine.pool.num_blocks
    assert not len(engine._index)
    assert engine.counts.prompt_tokens == engine.counts.peak_blocks == 0
    assert engine.add_request([5, 6, 7], GREEDY) == 0
    finish(engine)
    assert engine.take_output(0).outputs == alone((5, 6, 7), GREEDY).outputs

"""Ctrl-C at any line of a call: the next call gets what an undisturbed one gets."""

from __future__ import annotations

import linecache
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from test_one_step_ahead import GROWING, alone, finish, is_same, make_engine
from tiny_models import tiny_model

import pagetile
from pagetile import LLM, SamplingParams

FILES = tuple(str(Path(pagetile.__file__).parent / name) for name in ("engine", "kv_cache"))
PROMPTS = ["abcdefgh", "abcdefgh, too", "xy", "what is longer than a step may be"]
PARAMS = [
    SamplingParams(temperature=0.9, seed=1, n=3, max_tokens=9, stop=["Q7", "a"], logprobs=1),
    SamplingParams(temperature=0, max_tokens=9, prompt_logprobs=1, presence_penalty=0.5),
    SamplingParams(temperature=0, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=2, max_tokens=6, bad_words=["ab"], min_tokens=2),
]


@contextmanager
def interrupted(after: int) -> Iterator[list[str]]:
    """Raise KeyboardInterrupt after so many lines of these files; yields where that was."""
    where, num_left = list[str](), after

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal num_left
        file, line = frame.f_code.co_filename, frame.f_lineno
        if event == "call":
            return trace if file.startswith(FILES) and not where else None
        # Python lets no signal in between the body of a ``with`` and its exit.
        if event == "line" and not linecache.getline(file, line).lstrip().startswith("with "):
            num_left -= 1
            if num_left < 0 and not where:
                where.append(f"{Path(file).name}:{line}")
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield where
    except KeyboardInterrupt:
        assert where
    finally:
        sys.settrace(before)


def make_llm(**options: Any) -> LLM:
    """An LLM of one layer, and of as few blocks as make sequences give way to each other."""
    llm = LLM(tiny_model("llama", num_hidden_layers=1), num_blocks=8)
    llm.engine = make_engine(
        num_blocks=10, num_layers=1, max_num_seqs=4, max_num_batched_tokens=16, **options
    )
    return llm


def generate(llm: LLM) -> Any:
    return [
        (one.text, one.token_ids, one.finish_reason, one.stop_reason, len(one.logprobs or ()))
        for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        for one in output.outputs
    ]


def stream(llm: LLM) -> Any:
    texts: dict[Any, str] = {}
    for delta in llm.stream(PROMPTS, PARAMS):
        key = delta.request_id, delta.index
        texts[key] = texts.get(key, "") + delta.text
    return texts


@pytest.mark.parametrize("call", [generate, stream])
@pytest.mark.parametrize(
    "options", [{"is_ahead": True}, {"is_ahead": False}, {"num_speculative_tokens": 3}]
)
def test_an_interruption_at_any_line_leaves_an_llm_as_good_as_new(
    call: Callable[[LLM], Any], options: dict[str, Any]
) -> None:
    llm, rng = make_llm(**options), random.Random(call.__name__)
    expected = call(llm)
    assert llm.engine.counts.preemptions
    places = set()
    for _ in range(12):
        with interrupted(int(10 ** rng.uniform(2, 4))) as where:
            call(llm)
        places.update(where)
        assert call(llm) == expected, where
        llm.engine.check()
        assert not llm.engine.has_unfinished, where
        assert not llm.engine._requests, where
        assert llm.engine.pool.num_free == llm.engine.pool.num_blocks, where
    assert len(places) > 6


@pytest.mark.parametrize(
    "options", [{"is_ahead": True}, {"is_ahead": False}, {"num_speculative_tokens": 3}]
)
def test_an_interruption_at_any_line_leaves_requests_as_they_were(options: dict[str, Any]) -> None:
    """Of one who steps an engine by hand, and goes on."""
    engine, rng = make_engine(num_blocks=12, num_layers=1, **options), random.Random(0)
    asked = [
        (tuple(rng.randrange(3, 90) for _ in range(rng.randint(1, 20))), rng.choice(PARAMS))
        for _ in range(20)
    ]
    for number, (prompt, params) in enumerate(asked):
        with interrupted(int(10 ** rng.uniform(0, 3.3))):
            engine.add_request(prompt, params, request_id=number, stream=number % 3 == 0)
            for _ in range(4):
                engine.step()
        if number not in engine._requests:
            engine.add_request(prompt, params, request_id=number)
    finish(engine)
    for number, (prompt, params) in enumerate(asked):
        outputs = engine.take_output(number).outputs
        assert all(map(is_same, outputs, alone(prompt, params, 1).outputs))


def test_an_interruption_at_any_line_loses_no_token_of_a_grammar() -> None:
    engine, rng = make_engine(num_layers=1, is_ahead=True), random.Random(0)
    params = SamplingParams(seed=1, structured_outputs=GROWING)
    for number in range(10):
        with interrupted(int(10 ** rng.uniform(2, 3.3))):
            engine.add_request([5, 6], params, request_id=number)
            for _ in range(4):
                engine.step()
    finish(engine)
    outputs = {engine.take_output(number).outputs[0].token_ids for number in [*engine._requests]}
    assert [len(tokens) > 3 for tokens in outputs] == [True]


def test_a_request_interrupted_at_any_line_of_its_start_is_served_or_unknown() -> None:
    engine, prompt, params = make_engine(num_layers=1), (5, 6, 7), replace(PARAMS[2], max_tokens=3)
    for number in range(500):
        with interrupted(number) as where:
            engine.add_request(prompt, params, request_id=number)
        if not where:
            break
    assert 10 < number < 499
    finish(engine)
    expected = alone(prompt, params, 1).outputs
    for request_id in [*engine._requests]:
        assert all(map(is_same, engine.take_output(request_id).outputs, expected)), request_id


def test_a_sequence_interrupted_at_any_line_of_its_end_has_ended() -> None:
    engine, prompt = make_engine(num_layers=1, is_ahead=False), (5, 6, 7)
    tokens = alone(prompt, replace(PARAMS[2], max_tokens=4), 1).outputs[0].token_ids
    params = replace(PARAMS[2], stop_token_ids=[tokens[1]])
    expected = alone(prompt, params, 1).outputs
    for number in range(0, 3000, 2):
        engine.add_request(prompt, params, request_id=number)
        for _ in range(tokens.index(tokens[1])):
            engine.step()
        with interrupted(number) as where:
            engine.step()
        finish(engine)
        assert all(map(is_same, engine.take_output(number).outputs, expected)), where
        if not where:
            break
    assert 100 < number < 2998

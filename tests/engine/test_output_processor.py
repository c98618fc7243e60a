"""Where a sequence ends: each test runs a known number of steps, so none can hang."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_one_step_ahead import GREEDY, MAX_LEN, alone, make_engine

from pagetile import SamplingParams
from pagetile.engine.output_processor import fail

PROMPT = (5, 6, 7)


def run(params: SamplingParams, most_steps: int, is_ahead: bool) -> tuple[list[Any], Any]:
    """The deltas of so many steps, and the output, which must be finished by then."""
    engine = make_engine(is_ahead=is_ahead)
    request_id = engine.add_request(PROMPT, params)
    deltas = [delta for _ in range(most_steps) for delta in engine.step()]
    assert engine.is_finished(request_id), f"it goes on after {len(deltas)} tokens"
    assert not engine.has_unfinished
    engine.check()
    return deltas, engine.take_output(request_id).outputs[0]


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("stop", [(), ("no such text",)])
@pytest.mark.parametrize("max_tokens", [1, 2, 12, None])
def test_a_sequence_ends_with_the_token_that_reaches_its_length(
    max_tokens: int | None, stop: tuple[str, ...], is_ahead: bool
) -> None:
    """In the path without stop strings, and in the one where each token becomes text at once."""
    length = max_tokens or MAX_LEN - len(PROMPT)
    params = replace(GREEDY, max_tokens=max_tokens, stop=stop)
    deltas, output = run(params, length, is_ahead)
    assert [delta.finish_reason for delta in deltas] == [None] * (length - 1) + ["length"]
    assert len(output.token_ids) == length
    assert output.finish_reason == "length"


def test_the_deltas_of_a_sequence_that_fails_are_its_text() -> None:
    """Text that might have begun a stop string comes with the error."""
    letters = "".join(chr(32 + token_id) for token_id in alone(PROMPT, GREEDY).outputs[0].token_ids)
    engine = make_engine(is_ahead=False)
    request_id = engine.add_request(PROMPT, replace(GREEDY, stop=(letters[1:4] + "\0",)))
    deltas = [delta for _ in range(4) for delta in engine.step()]
    sequence = engine.scheduler.running[0]
    assert "".join(delta.text for delta in deltas) == letters[0]
    last = fail(sequence, "no token is left")
    assert (last.text, last.finish_reason) == (letters[1:4], "error")
    assert sequence.detokenizer is not None
    assert sequence.detokenizer.text == letters[:4]
    engine.abort(request_id)


@pytest.mark.parametrize("stop", [(), ("no such text",)])
def test_include_stop_str_in_output_keeps_the_text_of_a_stop_token(stop: tuple[str, ...]) -> None:
    """As in vLLM, whether each token becomes text at once or all at the end."""
    free = alone(PROMPT, GREEDY).outputs[0]
    num_tokens = free.token_ids.index(free.token_ids[4]) + 1
    params = replace(GREEDY, stop=stop, stop_token_ids=[free.token_ids[4]])
    texts = [
        run(replace(params, include_stop_str_in_output=is_kept), num_tokens, False)[1].text
        for is_kept in (False, True)
    ]
    assert texts == [free.text[: num_tokens - 1], free.text[:num_tokens]]


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("kind", ["end of text", "stop token", "stop string"])
def test_a_sequence_ends_with_the_token_that_says_so(
    kind: str, is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step ahead it is computed once more, and that result is dropped."""
    free = alone(PROMPT, replace(GREEDY, logprobs=1)).outputs[0]
    last, letter = free.token_ids[4], chr(32 + free.token_ids[4])
    num_tokens = free.token_ids.index(last) + 1
    params = replace(GREEDY, logprobs=1, ignore_eos=False)
    if kind == "stop token":
        params = replace(params, stop_token_ids=[last])
    elif kind == "stop string":
        params = replace(params, stop=[letter])
    else:
        monkeypatch.setattr("pagetile.models.paged_model._find_eos", lambda model: (last,))
    deltas, output = run(params, num_tokens, is_ahead)
    assert [delta.token_id for delta in deltas] == list(free.token_ids[:num_tokens])
    assert [delta.finish_reason for delta in deltas] == [None] * (num_tokens - 1) + ["stop"]
    assert output.token_ids == free.token_ids[:num_tokens]
    assert output.text == free.text[: num_tokens - 1]
    assert len(output.logprobs) == num_tokens
    expected = {"end of text": None, "stop token": last, "stop string": letter}
    assert output.stop_reason == expected[kind]


@pytest.mark.parametrize("is_ahead", [False, True])
def test_min_tokens_put_off_every_kind_of_end(is_ahead: bool) -> None:
    """The end-of-text token may be one that also stops, with and without ``ignore_eos``."""
    for ignore_eos in (False, True):
        first = alone(PROMPT, replace(GREEDY, ignore_eos=ignore_eos)).outputs[0].token_ids[0]
        params = replace(
            GREEDY, ignore_eos=ignore_eos, stop_token_ids=[2, first], stop=chr(32 + first),
            min_tokens=6,
        )  # fmt: skip
        _, output = run(params, GREEDY.max_tokens, is_ahead)
        assert len(output.token_ids) >= 6
        assert not {2, first} & {*output.token_ids[:6]}
        assert output.stop_reason in (None, 2, first, chr(32 + first))
        _, output = run(replace(params, stop_token_ids=[]), GREEDY.max_tokens, is_ahead)
        assert output.token_ids[0] == first, "its text would stop it"
        assert len(output.token_ids) >= 6

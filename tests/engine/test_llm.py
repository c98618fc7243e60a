"""The behaviour of LLM that its documentation promises."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import math
import pickle
import re
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from test_detokenizer import byte_fallback
from tiny_models import REFUSED, tiny_model
from transformers import AutoModelForCausalLM

from pagetile import (
    LLM,
    AsyncLLM,
    OutOfBlocksError,
    RequestError,
    SamplingParams,
    UnsupportedError,
    demo,
    engine,
)
from pagetile.engine import step
from pagetile.engine.input_processor import InputProcessor
from pagetile.engine.outputs import CacheCounts, RequestOutput
from pagetile.engine.text_decoder import TextDecoder
from pagetile.engine.warming import run_made_up

GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = ["def add(a, b):\n", "import os\n", "class Stack:\n    def __init__(self):\n", "x ="]


@pytest.fixture(
    scope="module", params=["cpu", "one step ahead", pytest.param("cuda", marks=pytest.mark.gpu)]
)
def llm(request: pytest.FixtureRequest) -> LLM:
    device, is_ahead = ("cpu", True) if request.param == "one step ahead" else (request.param, None)
    return LLM(
        dtype="float32", device=device, num_blocks=256, max_num_seqs=8, async_scheduling=is_ahead
    )


@pytest.fixture(autouse=True)
def _no_block_leaks(request: pytest.FixtureRequest):
    """For tests that share an engine; others run once, not once for each engine."""
    if "llm" not in request.fixturenames:
        yield
        return
    llm = request.getfixturevalue("llm")
    yield
    llm.engine.check()
    assert llm.engine.pool.num_free == llm.engine.pool.num_blocks
    assert not llm.engine.has_unfinished


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.prompt for output in together] == PROMPTS
    for prompt, output in zip(PROMPTS, together, strict=True):
        [alone] = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert alone.outputs == output.outputs


def test_the_demo_checkpoint_continues_python(llm: LLM) -> None:
    [output] = llm.generate(
        "for i in range(", SamplingParams(temperature=0, max_tokens=40), use_tqdm=False
    )
    assert ":\n" in output.outputs[0].text


def test_token_ids_are_prompts_too(llm: LLM) -> None:
    token_ids = llm.engine.inputs.encode(PROMPTS[0])
    [text], [ids] = (llm.generate(p, GREEDY, use_tqdm=False) for p in (PROMPTS[0], token_ids))
    assert ids.prompt is None
    assert ids.outputs == text.outputs


def test_streamed_text_joins_to_the_generated_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=40, n=2)
    expected = llm.generate(PROMPTS, params, use_tqdm=False)
    texts: dict[tuple[int, int], str] = {}
    for delta in llm.stream(PROMPTS, params):
        key = delta.request_id, delta.index
        texts[key] = texts.get(key, "") + delta.text
    assert texts == {(i, o.index): o.text for i, out in enumerate(expected) for o in out.outputs}


def test_leaving_a_stream_early_gives_its_blocks_back(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    stream.close()


def test_a_seed_gives_the_same_tokens_in_any_company(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=11, max_tokens=20, n=2)
    [alone] = llm.generate(PROMPTS[1], params, use_tqdm=False)
    others = [replace(GREEDY, max_tokens=5 + i) for i in range(len(PROMPTS))]
    crowd = llm.generate([*PROMPTS, PROMPTS[1]], [*others, params], use_tqdm=False)
    assert [o.token_ids for o in crowd[-1].outputs] == [o.token_ids for o in alone.outputs]
    assert alone.outputs[0].token_ids != alone.outputs[1].token_ids


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_samples_that_fork_beside_prompts_that_go_on_have_their_own_parameters(device: str) -> None:
    """The step samples no more sequences than before, and all of those have started before."""
    llm = LLM(dtype="float32", device=device, num_blocks=256, max_num_batched_tokens=128)
    prompts = [[5 + n] * 300 for n in range(4)]
    params = [SamplingParams(n=2, seed=n, max_tokens=12, ignore_eos=True) for n in range(4)]

    def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
        return [[sample.token_ids for sample in output.outputs] for output in outputs]

    together = tokens(llm.generate(prompts, params, use_tqdm=False))
    pairs = zip(prompts, params, strict=True)
    alone = [llm.generate(prompt, own, use_tqdm=False)[0] for prompt, own in pairs]
    assert tokens(alone) == together


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    [free] = llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)
    stop = free.outputs[0].text[9:12]
    [cut] = llm.generate(PROMPTS[2], replace(GREEDY, stop=stop), use_tqdm=False)
    assert cut.outputs[0].text == free.outputs[0].text[: free.outputs[0].text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)


def test_a_stop_token_ends_the_output_but_not_before_min_tokens(llm: LLM) -> None:
    [free] = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    stop = free.outputs[0].token_ids[3]
    first = free.outputs[0].token_ids.index(stop)
    [cut] = llm.generate(PROMPTS[0], replace(GREEDY, stop_token_ids=[stop]), use_tqdm=False)
    assert cut.outputs[0].token_ids == free.outputs[0].token_ids[: first + 1]
    assert cut.outputs[0].stop_reason == stop
    late = replace(GREEDY, stop_token_ids=[stop], min_tokens=10)
    [output] = llm.generate(PROMPTS[0], late, use_tqdm=False)
    assert len(output.outputs[0].token_ids) >= 10
    assert stop not in output.outputs[0].token_ids[:10]


def test_a_stop_token_is_no_text_even_if_text_is_made_early(llm: LLM) -> None:
    [free] = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    stop = replace(GREEDY, stop_token_ids=[free.outputs[0].token_ids[5]])
    [whole] = llm.generate(PROMPTS[0], stop, use_tqdm=False)
    assert whole.outputs[0].finish_reason == "stop"
    assert "".join(delta.text for delta in llm.stream(PROMPTS[0], stop)) == whole.outputs[0].text


def test_the_last_delta_of_each_sample_says_what_ended_it(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=1, temperature=1.0, max_tokens=12, ignore_eos=True)
    [free] = llm.generate(PROMPTS[0], params, use_tqdm=False)
    stops = [sample.token_ids[3 + sample.index] for sample in free.outputs[:3]]
    params = replace(params, stop_token_ids=stops, logprobs=1)
    request_id, found = llm.engine.add_request(PROMPTS[0], params, stream=True), {}
    while llm.engine.has_unfinished:
        for delta in llm.engine.step():
            if delta.finish_reason is not None:
                found[delta.index] = delta.stop_reason
    output = llm.engine.take_output(request_id)
    assert found == {sample.index: sample.stop_reason for sample in output.outputs}
    assert set(found.values()) & set(stops)
    for sample in output.outputs:
        total = sum(
            token[i].logprob for i, token in zip(sample.token_ids, sample.logprobs, strict=True)
        )
        assert sample.cumulative_logprob == pytest.approx(total)


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    [output] = llm.generate(PROMPTS[0], replace(GREEDY, logprobs=2, max_tokens=4), use_tqdm=False)
    [sample] = output.outputs
    assert len(sample.logprobs) == 4
    for token_id, entry in zip(sample.token_ids, sample.logprobs, strict=True):
        assert next(iter(entry)) == token_id, "the token comes first"
        (first, second) = entry.values()
        assert (first.rank, second.rank) == (1, 2), "a greedy token is the likeliest"
        assert first.logprob >= second.logprob
    own = [entry[i].logprob for i, entry in zip(sample.token_ids, sample.logprobs, strict=True)]
    assert math.isclose(sample.cumulative_logprob, sum(own))
    assert (
        "".join(
            entry[i].decoded_token
            for i, entry in zip(sample.token_ids, sample.logprobs, strict=True)
        )
        == sample.text
    )
    assert pickle.loads(pickle.dumps(sample)).logprobs == list(sample.logprobs)


def test_a_prompt_is_scored_as_transformers_scores_it(llm: LLM) -> None:
    params = replace(GREEDY, prompt_logprobs=2, max_tokens=3)
    plain, scored = llm.generate(PROMPTS[:1] * 2, [replace(params, prompt_logprobs=None), params])
    assert plain.prompt_logprobs is None
    assert plain.outputs == scored.outputs, "scoring leaves no trace"
    ids = torch.tensor([scored.prompt_token_ids])
    with torch.no_grad():
        logits = llm.engine.model._model(ids.to(llm.engine.model.device)).logits.cpu()
    exact = logits.double().log_softmax(-1)[0]
    first, *others = scored.prompt_logprobs
    assert first is None
    for token_id, entry, expected in zip(ids[0, 1:].tolist(), others, exact, strict=False):
        rank = int((expected >= expected[token_id]).sum())
        assert entry[token_id].rank == rank
        assert entry[token_id].logprob == pytest.approx(expected[token_id].item(), abs=1e-4)
        assert set(entry) == {token_id, *expected.topk(2).indices.tolist()}


def test_a_stream_s_first_delta_has_the_prompt_s_logprobs(llm: LLM) -> None:
    scored = replace(GREEDY, n=2, temperature=1.0, prompt_logprobs=2, max_tokens=3, seed=1)
    params = [scored, GREEDY]
    with_scores, _ = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    deltas = list(llm.stream(PROMPTS[:2], params))
    assert [d.request_id for d in deltas if d.prompt_logprobs is not None] == [0]
    [own] = [d for d in deltas if d.prompt_logprobs is not None]
    assert own is next(d for d in deltas if d.request_id == 0)
    assert own.prompt_logprobs == with_scores.prompt_logprobs


def test_a_prompt_whose_scores_fail_fails_alone(llm: LLM, monkeypatch) -> None:
    def fail(*_):
        raise ValueError("no scores today")

    monkeypatch.setattr("pagetile.engine.prompt_logprobs._score", fail)
    params = [GREEDY, replace(GREEDY, prompt_logprobs=0, n=2)]
    good, bad = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert good.outputs[0].finish_reason in ("stop", "length")
    for index in range(2):
        assert bad.outputs[index].finish_reason == "error"
        assert "no scores today" in bad.outputs[index].error
    llm.engine.check()


def test_a_request_that_is_aborted_before_it_is_scored_is_done(llm: LLM) -> None:
    request_id = llm.engine.add_request(PROMPTS[0], replace(GREEDY, prompt_logprobs=0))
    assert llm.engine.has_unfinished
    llm.engine.abort(request_id)
    assert not llm.engine.has_unfinished
    output = llm.engine.take_output(request_id)
    assert [sample.finish_reason for sample in output.outputs] == ["abort"]
    assert output.prompt_logprobs is None


@pytest.mark.parametrize("options", [{}, {"prompt_logprobs": 0}])
def test_a_request_that_is_aborted_before_it_forks_has_all_its_samples(
    llm: LLM, options: dict[str, Any]
) -> None:
    engine = llm.engine
    request_id = engine.add_request(PROMPTS[0], SamplingParams(n=3, **options))
    expected = [(index, "abort") for index in range(3)]
    deltas = engine.abort(request_id)
    assert [(delta.index, delta.finish_reason) for delta in deltas] == expected
    assert engine.abort(request_id) == []
    outputs = engine.take_output(request_id).outputs
    assert [(sample.index, sample.finish_reason) for sample in outputs] == expected
    assert not engine.has_unfinished
    engine.check()


def test_a_prompt_that_is_only_scored_has_all_its_samples(llm: LLM) -> None:
    engine = llm.engine
    params = SamplingParams(n=2, prompt_logprobs=0)
    request_id = engine.add_request(PROMPTS[0], params, generates=False)
    ends = [(delta.index, delta.finish_reason) for delta in engine.step()]
    assert ends == [(0, "length"), (1, "length")]
    assert len(engine.take_output(request_id).outputs) == 2
    assert not engine.has_unfinished


def test_metrics_tell_when_a_request_was_served(llm: LLM) -> None:
    before = time.time()
    outputs = llm.generate(PROMPTS[:2], replace(GREEDY, max_tokens=4), use_tqdm=False)
    after = time.time()
    for metrics in (output.metrics for output in outputs):
        times = (
            metrics.arrival_time,
            metrics.first_scheduled_time,
            metrics.first_token_time,
            metrics.finished_time,
        )
        assert sorted(times) == list(times)
        assert len(set(times)) == 4
        assert before - 0.1 < times[0]
        assert times[-1] < after + 0.1
        assert metrics.time_in_queue == times[1] - times[0]


def test_output_ends_at_the_longest_sequence(llm: LLM) -> None:
    small = LLM(dtype="float32", max_model_len=20, num_blocks=4)
    [output] = small.generate(
        PROMPTS[0], replace(GREEDY, max_tokens=None, ignore_eos=True), use_tqdm=False
    )
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 20
    assert output.outputs[0].finish_reason == "length"


def test_a_bias_chooses_and_rules_out_tokens(llm: LLM) -> None:
    [free] = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    first = free.outputs[0].token_ids[0]
    never = replace(GREEDY, logit_bias={first: -100})
    assert first not in llm.generate(PROMPTS[0], never, use_tqdm=False)[0].outputs[0].token_ids
    always = replace(GREEDY, logit_bias={7: 100}, logprobs=0)
    [output] = llm.generate(PROMPTS[0], always, use_tqdm=False)[0].outputs
    assert output.token_ids == (7,) * GREEDY.max_tokens
    assert output.cumulative_logprob < -20, "the model's own, which would not say so"
    with pytest.raises(RequestError, match="logit_bias has token id 99999, expected 0 to"):
        llm.generate(PROMPTS[0], replace(GREEDY, logit_bias={99999: 1}), use_tqdm=False)


TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# {{ name or 'assistant' }}:{% endif %}"
)


def test_a_conversation_is_written_down_by_its_template(llm: LLM) -> None:
    question = {"role": "user", "content": "def f(x):"}
    begun = [question, {"role": "assistant", "content": "return"}]
    options = {"use_tqdm": False, "chat_template": TEMPLATE}
    outputs = llm.chat([[question], begun], GREEDY, **options)
    outputs += llm.chat(begun, GREEDY, continue_final_message=True, **options)
    outputs += llm.chat([question], GREEDY, add_generation_prompt=False, **options)
    asked = "# user: def f(x):\n# assistant:"
    answered = f"{asked} return"
    texts = [asked, f"{answered}\n# assistant:", answered, "# user: def f(x):\n"]
    for output, text in zip(outputs, texts, strict=True):
        token_ids = llm.engine.tokenizer.encode(text, add_special_tokens=False)
        assert output.prompt_token_ids == tuple(token_ids)
        assert output.outputs == llm.generate(token_ids, GREEDY, use_tqdm=False)[0].outputs
    [named] = llm.chat(
        [question], GREEDY, use_tqdm=False, chat_template=TEMPLATE,
        chat_template_kwargs={"name": "model"},
    )  # fmt: skip
    assert llm.engine.tokenizer.decode(named.prompt_token_ids).endswith("# model:")


def test_tools_and_calls_are_given_to_the_template(llm: LLM) -> None:
    template = (
        "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}|{% endfor %}"
    )
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": 7}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    options = {"use_tqdm": False, "chat_template": template}
    [output] = llm.chat(messages, GREEDY, tools=tools, **options)
    assert llm.engine.tokenizer.decode(output.prompt_token_ids) == "f;system:be|assistant:7|tool:x|"
    with pytest.raises(RequestError, match="does not offer tools"):
        llm.chat(messages, GREEDY, tools=tools, use_tqdm=False, chat_template=TEMPLATE)


@pytest.mark.parametrize(
    ("messages", "template", "message"),
    [
        ("hello", TEMPLATE, "messages is 'hello', expected a list of messages"),
        ([], TEMPLATE, "messages is "),
        ([[]], TEMPLATE, "conversation 0 is empty"),
        ([[{"role": "user", "content": "x"}], "y"], TEMPLATE, "conversation 1 is 'y', expected"),
        ([{"content": "x"}], TEMPLATE, "conversation 0 has {'content': 'x'}, expected a message"),
        ([{"role": "user", "content": "x"}], "{{ raise_exception('no, no') }}", "no, no"),
        ([{"role": "user", "content": "x"}], None, "the tokenizer has no chat template"),
        ([{"role": "user", "content": 3}], TEMPLATE, "messages.0 has content 3, expected text"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            TEMPLATE,
            "conversation 0: messages.0 has content [{'type': 'image_url'}], expected text",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}],
            TEMPLATE,
            "messages.0.tool_calls.0.function.arguments is not a JSON object",
        ),
    ],
    ids=str,
)
def test_a_bad_conversation_is_refused(
    llm: LLM, messages: Any, template: str | None, message: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        llm.chat(messages, GREEDY, use_tqdm=False, chat_template=template)


BAD_PROMPTS = {
    "no tokens": [],
    "no text": "",
    "an id past the vocabulary": [5, 4096],
    "a negative id": [5, -1],
    "no room for a token": [5] * 2048,
    "no integers": [0.5],
    "half a character": "x\udcff",
    "bytes": b"abc",
    "truth values": [True, False],
    "truth values of torch": torch.tensor([True, False]),
    "a number": np.array(3),
    "a dictionary": {3: 1},
}


@pytest.mark.parametrize("prompt", BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_a_bad_prompt_is_named_before_anything_starts(llm: LLM, prompt: list | str) -> None:
    prompts = [PROMPTS[0], prompt]
    with pytest.raises(RequestError, match="prompt 1: the prompt"):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished


def test_a_prompt_that_the_pool_can_never_hold_is_refused() -> None:
    small = LLM(dtype="float32", num_blocks=4, block_size=4)
    with pytest.raises(RequestError, match="has 20 tokens, expected fewer than max_model_len=16"):
        small.generate([7] * 20, GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="what 4 blocks of 4 hold: shorten it, or use more"):
        small.generate([7] * 20, GREEDY, use_tqdm=False)
    short = LLM(dtype="float32", num_blocks=40, block_size=4, max_model_len=16)
    with pytest.raises(RequestError, match="max_model_len=16, of the model or of this LLM"):
        short.generate([7] * 20, GREEDY, use_tqdm=False)
    with pytest.raises(
        OutOfBlocksError, match="fewer than max_model_len=64: use at least 16 blocks"
    ):
        LLM(dtype="float32", num_blocks=4, block_size=4, max_model_len=64)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0},
        {"temperature": math.nan},
        {"temperature": -1.0},
        {"stop": ""},
        {"stop": [""]},
    ],
    ids=str,
)
def test_bad_sampling_params_are_refused_when_made(bad: dict) -> None:
    with pytest.raises(RequestError, match=next(iter(bad))):
        SamplingParams(**bad)


def test_more_samples_than_sequences_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="n=9 is more than max_num_seqs=8"):
        llm.generate(PROMPTS[0], replace(GREEDY, n=9), use_tqdm=False)


def test_an_unknown_option_names_the_nearest_known_one() -> None:
    with pytest.raises(TypeError, match=r"LLM has no option 'max_seqs'; did you mean max_num_seqs"):
        LLM(max_seqs=4)
    with pytest.raises(TypeError, match=r"no option 'zzz': see help\(LLM\)"):
        LLM(zzz=1)
    with pytest.raises(TypeError, match="no option 'max_new_tokens'; did you mean max_tokens"):
        SamplingParams(max_new_tokens=3)


def test_without_transformers_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'pagetile\[engine\]'"):
        LLM()


def test_a_bad_request_fails_alone_while_others_run(llm: LLM) -> None:
    engine = llm.engine
    expected = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    ids = [engine.add_request(PROMPTS[0], GREEDY)]
    engine.step()
    with pytest.raises(RequestError):
        engine.add_request([99999], GREEDY)
    ids += [engine.add_request(prompt, GREEDY) for prompt in PROMPTS[1:]]
    while engine.has_unfinished:
        engine.step()
    assert [engine.take_output(i).outputs for i in ids] == [e.outputs for e in expected]


def test_a_row_of_nan_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, forward = llm.engine, llm.engine.model.forward
    expected = llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)

    def break_the_second(step):
        logits = forward(step).clone()
        if logits.shape[0] == 2:
            logits[1] = torch.nan
        return logits

    monkeypatch.setattr(engine.model, "forward", break_the_second)
    if engine._runner.kernels is not None:  # graphs would replay the model's own forward
        monkeypatch.setattr(engine._runner.kernels, "prompt_graphs", None)
    good, bad = llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
    assert good.outputs == expected[0].outputs
    assert bad.outputs[0].finish_reason == "error"
    assert "NaN" in bad.outputs[0].error or "nan" in bad.outputs[0].error


def test_an_aborted_request_gives_its_blocks_back(llm: LLM) -> None:
    engine = llm.engine
    gone = engine.add_request(PROMPTS[0], replace(GREEDY, n=3, temperature=1.0))
    kept = engine.add_request(PROMPTS[1], GREEDY)
    waiting = engine.add_request(PROMPTS[2], GREEDY)
    engine.abort(waiting)
    for _ in range(3):
        engine.step()
    engine.abort(gone)
    engine.check()
    while engine.has_unfinished:
        engine.step()
    assert engine.take_output(gone).outputs[2].finish_reason == "abort"
    assert engine.take_output(waiting).outputs[0].finish_reason == "abort"
    assert engine.take_output(kept).outputs[0].finish_reason == "length"


def test_salted_requests_share_no_prefix(llm: LLM) -> None:
    prompt = list(range(100, 164))

    def cached(salt: str | None) -> int:
        request_id = llm.engine.add_request(prompt, GREEDY, cache_salt=salt)
        while llm.engine.has_unfinished:
            llm.engine.step()
        return llm.engine.take_output(request_id).num_cached_tokens

    assert cached("a") == 0
    assert cached("a") == 48, "the last full block is computed for its logits"
    assert cached("b") == 0
    assert cached(None) == 0


def test_prompts_may_be_dictionaries_with_a_cache_salt(llm: LLM) -> None:
    text = PROMPTS[0]
    token_ids = llm.engine.inputs.encode(text)
    expected = llm.generate([text, token_ids], GREEDY, use_tqdm=False)
    prompts = [{"prompt": text}, {"prompt_token_ids": token_ids, "cache_salt": None}]
    found = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [(o.prompt, o.outputs) for o in found] == [(o.prompt, o.outputs) for o in expected]
    deltas = llm.stream({"prompt": text}, GREEDY)
    assert "".join(delta.text for delta in deltas) == expected[0].outputs[0].text

    def cached(salt: str) -> int:
        prompt = {"prompt_token_ids": range(200, 264), "cache_salt": salt}
        return llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens

    assert [cached("a"), cached("a"), cached("b")] == [0, 48, 0]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "x", "multi_modal_data": 1, "priority": 0}, "'multi_modal_data', 'priority'"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "'prompt' and 'prompt_token_ids'"),
        ({"cache_salt": "a"}, "neither text nor token ids"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt=''"),
        ({"prompt": "x", "cache_salt": 5}, "cache_salt=5"),
        ({"prompt": [1]}, "'prompt' is list, expected text"),
        ({"prompt_token_ids": "x"}, "'prompt_token_ids' is str, expected a list of token ids"),
    ],
    ids=str,
)
def test_a_bad_dictionary_is_refused(llm: LLM, prompt: dict, message: str) -> None:
    with pytest.raises(RequestError, match=f"prompt 1: the prompt.*{re.escape(message)}"):
        llm.generate(["x =", prompt], GREEDY, use_tqdm=False)


def test_float16_weights_run_in_float32_on_a_cpu(tmp_path: Path) -> None:
    tiny_model("llama", dtype=torch.float16).save_pretrained(tmp_path)
    small = LLM(tmp_path, num_blocks=16)
    assert small.engine.model.dtype == small.engine.cache.dtype == torch.float32


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_cannot_be_exact_is_refused_at_load(family: str) -> None:
    with pytest.raises(UnsupportedError):
        LLM(tiny_model(family), num_blocks=16)


@pytest.mark.parametrize(
    "bad",
    [
        {"device": "foo"},
        {"enable_prefix_caching": "no"},
        {"enforce_eager": 3},
        {"num_blocks": 2.5},
        {"num_blocks": True},
        {"num_blocks": "8"},
        {"block_size": 16.0},
        {"max_num_seqs": 1 << 17},
        {"max_num_batched_tokens": 0},
        {"memory_fraction": "x"},
        {"seed": 0.5},
        {"max_model_len": "64"},
        {"max_model_len": 64.5},
        {"kv_cache_dtype": [1]},
        {"generation_config": "huggingface"},
    ],
    ids=str,
)
def test_a_bad_argument_is_named(bad: dict) -> None:
    [(name, value)] = bad.items()
    with pytest.raises(RequestError, match=f"^{name}={re.escape(repr(value))}: expected "):
        LLM(**bad)


def test_a_loaded_model_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model, moves = tiny_model("llama"), []
    monkeypatch.setattr(type(model), "to", lambda self, *where: moves.append(where))
    LLM(model, num_blocks=8)
    assert not moves
    LLM(model, num_blocks=8, device="cpu")
    assert moves == [("cpu",)]


def test_a_tokenizer_may_come_from_elsewhere(llm: LLM, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo.path(), dtype="float32")
    [expected] = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    for tokenizer in (demo.path(), str(demo.path()), llm.engine.tokenizer):
        loaded = LLM(model, tokenizer=tokenizer, num_blocks=8)
        [found] = loaded.generate(PROMPTS[0], GREEDY, use_tqdm=False)
        assert found.outputs[0].text == expected.outputs[0].text
    other = Path(shutil.copytree(demo.path(), tmp_path / "without"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).unlink()
    without = LLM(other, num_blocks=8)
    assert without.engine.tokenizer is None
    with pytest.raises(RequestError, match=r"stop=\('x',\) but there is no tokenizer"):
        without.generate([[5, 6]], SamplingParams(stop="x"), use_tqdm=False)
    assert LLM(other, tokenizer=demo.path(), num_blocks=8).engine.inputs.encode("x =")


def test_the_first_word_after_a_prompt_keeps_its_space() -> None:
    """Decoded alone, Llama 2's tokens begin without one: ``def f():`` would lose its indent."""
    tokenizer = byte_fallback()
    llm = LLM(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer=tokenizer, num_blocks=8)
    word = tokenizer.convert_tokens_to_ids("▁the")
    params = SamplingParams(max_tokens=2, allowed_token_ids=[word], logprobs=0)
    [output] = llm.generate("the", params, use_tqdm=False)
    [sample] = output.outputs
    assert sample.text == " the the"
    assert output.prompt + sample.text == tokenizer.decode([*output.prompt_token_ids, word, word])
    tokens = [each[word].decoded_token for each in sample.logprobs]
    assert "".join(tokens) == sample.text
    assert "".join(delta.text for delta in llm.stream("the", params)) == sample.text


@pytest.mark.parametrize("tokenizer", [5, "no/such/directory", object], ids=str)
def test_a_bad_tokenizer_is_named(tokenizer: object, tmp_path: Path) -> None:
    for bad in (tokenizer, tmp_path):
        with pytest.raises(RequestError, match=re.escape(f"tokenizer={bad!r}: ")):
            LLM(tokenizer=bad)


@pytest.fixture
def greedy_checkpoint(tmp_path: Path) -> Path:
    """The shipped checkpoint, recommending greedy decoding in its generation_config.json."""
    path = Path(shutil.copytree(demo.path(), tmp_path / "greedy"))
    recommended = {"temperature": 0.0, "top_k": 20, "max_new_tokens": 9, "do_sample": True}
    (path / "generation_config.json").write_text(json.dumps(recommended))
    return path


def test_a_checkpoint_s_sampling_defaults_apply(greedy_checkpoint: Path) -> None:
    model = LLM(greedy_checkpoint, num_blocks=16)
    params = SamplingParams(temperature=0.0, top_k=20, max_tokens=9)
    assert model.get_default_sampling_params() == params
    [expected] = model.generate(PROMPTS[0], params, use_tqdm=False)
    [found] = model.generate(PROMPTS[0], use_tqdm=False)
    assert found.outputs == expected.outputs
    [given] = model.generate(PROMPTS[0], SamplingParams(max_tokens=3), use_tqdm=False)
    assert len(given.outputs[0].token_ids) <= 3

    async def generate() -> tuple[int, ...]:
        async with AsyncLLM(model) as served:
            outputs = [output async for output in served.generate(PROMPTS[0])]
        return tuple(outputs[-1].outputs[0].token_ids)

    assert asyncio.run(generate()) == tuple(expected.outputs[0].token_ids)


def test_vllm_s_sampling_defaults_may_be_asked_for(greedy_checkpoint: Path) -> None:
    model = LLM(greedy_checkpoint, num_blocks=16, generation_config="vllm")
    assert model.get_default_sampling_params() == SamplingParams()
    assert LLM(num_blocks=16).get_default_sampling_params() == SamplingParams()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is a JSON list"),
        ('{"top_p": 3}', "top_p=3: expected"),
        ('{"temperature": "x"}', "temperature='x': expected"),
        ('{"top_k": true}', "top_k=True: expected"),
    ],
)
def test_a_bad_generation_config_is_named(greedy_checkpoint: Path, text: str, message: str) -> None:
    (greedy_checkpoint / "generation_config.json").write_text(text)
    with pytest.raises(RequestError, match=rf"generation_config.json.*{re.escape(message)}"):
        LLM(greedy_checkpoint)


def test_a_model_in_training_stays_so() -> None:
    model = tiny_model("llama")
    model.train()
    model.lm_head.eval()
    [output] = LLM(model, num_blocks=8).generate([5, 6], GREEDY, use_tqdm=False)
    assert model.training
    assert not model.lm_head.training
    model.eval()
    [expected] = LLM(model, num_blocks=8).generate([5, 6], GREEDY, use_tqdm=False)
    assert output.outputs == expected.outputs


def test_changed_weights_ask_for_a_reset_of_prefixes() -> None:
    model, prompt = tiny_model("llama"), list(range(5, 45))
    llm, params = LLM(model, num_blocks=40), replace(GREEDY, ignore_eos=True)
    llm.generate(prompt, params, use_tqdm=False)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    stream = llm.stream(prompt, params)
    next(stream)
    with pytest.raises(RequestError, match="requests are running"):
        llm.reset_prefix_cache()
    stream.close()
    llm.reset_prefix_cache()
    [output] = llm.generate(prompt, params, use_tqdm=False)
    assert output.num_cached_tokens == 0
    [expected] = LLM(model, num_blocks=40).generate(prompt, params, use_tqdm=False)
    assert output.outputs == expected.outputs


def test_a_finished_stream_computes_no_further_steps(llm: LLM) -> None:
    """A caller that has read the last delta blocks no other stream and takes none of its tokens."""
    short = replace(GREEDY, max_tokens=1)
    first = llm.stream(PROMPTS[0], short)
    assert next(first).finish_reason == "length"
    second = llm.stream(PROMPTS[1], GREEDY)
    deltas = [next(second)]
    assert list(first) == []
    deltas += second
    assert [delta.token_id for delta in deltas] == list(
        llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    )


def test_a_streams_last_delta_waits_for_no_other_request(llm: LLM) -> None:
    for _ in range(5):
        stream = llm.stream(PROMPTS[0], replace(GREEDY, max_tokens=1))
        next(stream)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(llm.generate, PROMPTS[1], GREEDY, use_tqdm=False)
            assert list(stream) == []
            assert len(other.result()[0].outputs[0].token_ids) == GREEDY.max_tokens


def test_generating_within_a_step_is_refused(llm: LLM) -> None:
    def again() -> None:
        llm.engine.on_step = None
        llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)

    llm.engine.on_step = again
    with pytest.raises(RequestError, match="other requests are running"):
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)


def test_threads_take_turns(llm: LLM) -> None:
    def run(prompt: str) -> tuple[int, ...]:
        return llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda prompt: [run(prompt) for _ in range(3)], PROMPTS))
    assert together == [3 * [run(prompt)] for prompt in PROMPTS]


def test_a_prompt_is_turned_into_tokens_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, texts = InputProcessor.encode, []

    def counted(self: Any, prompt: Any) -> list[int]:
        texts.append(prompt)
        return encode(self, prompt)

    monkeypatch.setattr(InputProcessor, "encode", counted)
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    list(llm.stream(PROMPTS, GREEDY))
    assert texts == PROMPTS * 2


def test_numpy_s_integers_are_whole_numbers() -> None:
    size = np.uint8(16)
    llm = LLM(num_blocks=size, block_size=size, max_num_seqs=size, max_model_len=size, seed=size)
    [output] = llm.generate([7] * 5, replace(GREEDY, max_tokens=None), use_tqdm=False)
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 16


def test_more_blocks_than_memory_are_refused() -> None:
    with pytest.raises(OutOfBlocksError, match=r"num_blocks=10,000,000,000,000 .* use at most"):
        LLM(num_blocks=10**13)


def test_a_step_has_a_token_for_each_of_many_sequences() -> None:
    engine = LLM(num_blocks=8, max_num_seqs=3000).engine
    assert engine.scheduler.max_num_batched_tokens == 3000


@pytest.mark.parametrize("make", [tuple, np.array, torch.tensor, lambda ids: list(np.array(ids))])
def test_one_prompt_may_be_any_sequence_of_token_ids(llm: LLM, make: Callable) -> None:
    params = replace(GREEDY, max_tokens=6)
    expected = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    for prompts in (make([5, 6, 7]), [make([5, 6, 7])]):
        found = llm.generate(prompts, params, use_tqdm=False)
        assert [output.outputs for output in found] == [output.outputs for output in expected]


@pytest.mark.parametrize("params", [{"n": 1}, [None], [{"n": 1}], 5, SamplingParams], ids=str)
def test_other_things_than_sampling_params_are_refused(llm: LLM, params: object) -> None:
    with pytest.raises(RequestError, match="sampling_params is "):
        llm.generate("x =", params, use_tqdm=False)


SMALL_POOL = {"dtype": "float32", "num_blocks": 40, "block_size": 4, "max_model_len": 64}
FORKING = [("def add(a, b):\n", 2), ("import os\n", 1), ([9] * 30, 3)]


@pytest.fixture(scope="module")
def unbroken() -> list[RequestOutput]:
    """The output of an engine in which no step fails."""
    params = [replace(GREEDY, n=n) for _, n in FORKING]
    return LLM(**SMALL_POOL).generate([prompt for prompt, _ in FORKING], params, use_tqdm=False)


@pytest.mark.parametrize("where", ["_runner.run", "model.forward", "scheduler.complete"])
def test_a_step_that_fails_changes_no_token(
    where: str, unbroken: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step fails anywhere, even while it copies shared blocks; all is computed again."""
    llm = LLM(**SMALL_POOL, max_num_batched_tokens=24, max_num_seqs=8)
    ids = [llm.engine.add_request(prompt, replace(GREEDY, n=n)) for prompt, n in FORKING]
    owner, _, name = where.partition(".")
    whole, times = getattr(getattr(llm.engine, owner), name), itertools.count()

    def half(*args: object) -> object:
        before = next(times) % 4
        if before == 1:
            raise RuntimeError("once")
        result = whole(*args)
        if before == 3:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(getattr(llm.engine, owner), name, half)
    failures = 0
    for _ in range(500):
        try:
            llm.engine.step()
        except (RuntimeError, KeyboardInterrupt):
            failures += 1
        llm.engine.check()
    assert not llm.engine.has_unfinished
    found = [llm.engine.take_output(request_id) for request_id in ids]
    assert failures > 9
    assert [output.outputs for output in found] == [output.outputs for output in unbroken]


def test_a_prompt_may_be_an_iterator_and_may_change_later(llm: LLM) -> None:
    expected = llm.generate([[3, 4, 5]], GREEDY, use_tqdm=False)[0].outputs
    assert llm.generate([iter([3, 4, 5])], GREEDY, use_tqdm=False)[0].outputs == expected
    prompt = [3, 4, 5]
    stream = llm.stream([prompt], GREEDY)
    prompt.clear()
    assert [delta.token_id for delta in stream] == list(expected[0].token_ids)


def test_a_request_that_is_refused_leaves_nothing(llm: LLM) -> None:
    with pytest.raises(RequestError, match="cache_salt=5"):
        llm.engine.add_request("x =", cache_salt=5)
    for ask in (llm.engine.take_output, llm.engine.is_finished):
        with pytest.raises(RequestError, match="there is no request 999999"):
            ask(999999)


class Moody:
    """A tokenizer that cannot decode a few times."""

    def __init__(self, tokenizer: Any, fails: Callable[[list[int]], bool]) -> None:
        self._tokenizer, self._fails = tokenizer, fails

    def decode(self, token_ids: list[int], **options: Any) -> str:
        if self._fails(token_ids):
            raise ValueError("no such byte")
        return self._tokenizer.decode(token_ids, **options)


@pytest.mark.parametrize("stream", [False, True])
def test_a_sequence_without_text_fails_alone(
    llm: LLM, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [output.outputs for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    bad = expected[1][0].token_ids[3]
    assert all(bad not in outputs[0].token_ids for outputs in (expected[0], *expected[2:]))
    moody = Moody(llm.engine.tokenizer, lambda token_ids: bad in token_ids)
    monkeypatch.setattr(llm.engine, "_decoder", TextDecoder(moody))
    if stream:
        deltas = list(llm.stream(PROMPTS, GREEDY))
        ends = {delta.request_id: delta for delta in deltas if delta.finish_reason}
        assert [ends[at].finish_reason for at in range(4)] == ["length", "error"] + ["length"] * 2
        assert "no such byte" in ends[1].error
    else:
        found = [output.outputs for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        assert found[0] == expected[0]
        assert found[2:] == expected[2:]
        assert found[1][0].finish_reason == "error"
        assert "no such byte" in found[1][0].error


def test_a_sequence_that_comes_back_to_its_row_has_other_blocks() -> None:
    """The prompts are equal: the preempted one finds the other's blocks and resumes at once."""
    twice = "def fibonacci(n):\n    if n < 2:\n        return n\n    return fib"
    prompts = ["import os\n", twice, twice, "class Stack:\n    def __init__(self):\n"]
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)

    def run(num_blocks: int) -> list[list[int]]:
        model = LLM(dtype="float32", block_size=8, num_blocks=num_blocks, max_model_len=96)
        outputs = model.generate(prompts, params, use_tqdm=False)
        assert model.engine.counts.preemptions or num_blocks == 400
        return [list(output.outputs[0].token_ids) for output in outputs]

    assert run(12) == run(22) == run(400)


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_tokens_that_preemption_had_computed_again_are_counted(enable_prefix_caching: bool) -> None:
    small = LLM(
        dtype="float32", block_size=4, num_blocks=40, enable_prefix_caching=enable_prefix_caching
    )
    run, computed = small.engine._runner.run, []

    def watched(step: Any, masks: Any) -> Any:
        computed.extend(step.num_tokens)
        return run(step, masks)

    small.engine._runner.run = watched  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    outputs = small.generate(PROMPTS, params, use_tqdm=False)
    once = sum(len(out.prompt_token_ids) + 60 - 1 for out in outputs)  # the last is not computed
    counts = small.engine.counts
    assert counts.recomputed_tokens == sum(computed) - (once - counts.cached_tokens) > 0


def test_an_open_stream_is_not_disturbed(llm: LLM) -> None:
    alone = [delta.text for delta in llm.stream("import os\n", GREEDY)]
    stream = llm.stream("import os\n", GREEDY)
    found = [next(stream).text]
    with pytest.raises(RequestError, match="open stream"):
        llm.generate("x =", GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="open stream"):
        llm.stream("x =", GREEDY)
    assert found + [delta.text for delta in stream] == alone
    assert llm.generate("x =", GREEDY, use_tqdm=False)[0].outputs[0].text


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_is_not_copied(llm: LLM, make: Any) -> None:
    with pytest.raises(TypeError, match=r"^an LLM cannot be copied or pickled: load another, in "):
        make(llm)


def test_warming_up_leaves_no_trace():
    llm, other = (LLM(num_blocks=256, max_model_len=512) for _ in range(2))
    run_made_up(llm.engine, 1500)
    llm.engine.check()
    assert not llm.engine.has_unfinished
    assert llm.engine.counts == CacheCounts()
    assert llm.engine.pool.num_free == 256
    params = SamplingParams(seed=3, max_tokens=8)
    [expected] = other.generate("import os\n", params, use_tqdm=False)
    [result] = llm.generate("import os\n", params, use_tqdm=False)
    assert result.outputs == expected.outputs
    assert result.num_cached_tokens == 0


def test_the_path_from_generate_to_a_token_is_short() -> None:
    """Lists the engine's files with functions that run, their lines, and those of the functions.

    ``step.py`` is counted as well: it has no functions, but records that the others pass on.
    """
    llm = LLM(dtype="float32", device="cpu", num_blocks=64)
    lines: dict[str, set[int]] = {}

    def watch(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and Path(code.co_filename).parent == Path(engine.__file__).parent:
            lines.setdefault(code.co_filename, set()).update(
                line for *_, line in code.co_lines() if line
            )

    params = SamplingParams(temperature=0.8, seed=1, max_tokens=8, ignore_eos=True)
    sys.setprofile(watch)
    try:
        llm.generate(["import os\n", "x = "], params, use_tqdm=False)
    finally:
        sys.setprofile(None)
    num_lines = sum(map(len, lines.values()))
    counted = [*map(Path, lines), Path(step.__file__)]
    files = {path.name: path.read_text().count("\n") for path in counted}
    page = (Path(__file__).parents[2] / "docs/engine.md").read_text()
    assert set(re.findall(r"^\| `(\w+\.py)`", page, re.MULTILINE)) == files.keys()
    assert len(files) <= 14, files
    assert sum(files.values()) <= 2600, files
    assert num_lines <= 908, num_lines

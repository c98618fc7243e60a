"""Structured output and calls of tools: the output always has the requested form."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter

import openai
import pydantic
import pytest

from pagetile import SamplingParams
from pagetile.engine.structured_outputs import StructuredOutputsParams
from pagetile.errors import RequestError

from .random_forms import random_form
from .test_chat import MESSAGES, WEATHER
from .test_completions import stream

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"enum": ["x", "y"]},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
LONG = {"max_tokens": 200, "seed": 3}


def text_of(post, **fields):
    status, body = post("/v1/completions", prompt="x = ", **{**LONG, **fields})
    assert status == 200, body
    [choice] = body["choices"]
    assert choice["finish_reason"] == "stop", choice
    return choice["text"]


@pytest.mark.parametrize("seed", range(5))
def test_each_form_is_followed(post, seed):
    def get(**form):
        return text_of(post, structured_outputs=form, seed=seed)

    found = json.loads(get(json=SCHEMA))
    assert found["b"] in "xy"
    assert 0 <= found["a"] <= 99
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", get(regex="[a-f]{3}-[0-9]{2}"))
    assert get(choice=["yes", 'n"o', "ünï"]) in ("yes", 'n"o', "ünï")
    assert get(grammar='root ::= "ab" | "c" tail\ntail ::= "d" | "e"') in ("ab", "cd", "ce")
    assert get(grammar='start: "x" /[0-9]{2}/')[0] == "x"


def test_a_form_that_becomes_too_complex_is_named(post):
    """It can be compiled, and fails when the allowed tokens are looked for."""
    form = {"regex": "a{1000000}"}
    status, body = post("/v1/completions", prompt="x", max_tokens=5, structured_outputs=form)
    error = body["error"]
    assert (status, error["code"]) == (400, "no_token_left")
    assert "structured_outputs is too complex (lexer error: too many expr" in error["message"]
    assert "\n" not in error["message"]


def test_json_without_white_space(post, llm):
    spaces = llm.engine.tokenizer.encode(" ", add_special_tokens=False)
    likely = {str(token_id): 30.0 for token_id in spaces}
    spaced, dense = (
        text_of(
            post, structured_outputs={"json": SCHEMA, "disable_any_whitespace": is_dense},
            logit_bias=likely,
        )
        for is_dense in (False, True)
    )  # fmt: skip
    assert json.loads(spaced).keys() == json.loads(dense).keys() == {"a", "b"}
    assert " " in spaced
    assert " " not in dense


def test_white_space_of_json_is_one_space_or_one_line_break_with_an_indentation(post, llm):
    vocabulary = llm.engine.tokenizer.get_vocab().values()
    blank = [i for i in vocabulary if (text := llm.engine.token_text.text(i)) and not text.strip()]
    text = text_of(
        post, structured_outputs={"json": SCHEMA}, logit_bias={str(i): 30.0 for i in blank}
    )
    gaps = re.findall(r"\s+", text)
    assert len(gaps) == 8
    assert all(re.fullmatch(r" |\n[ \t]{0,16}", gap) for gap in gaps), gaps


def test_a_tool_without_parameters_is_called_with_none(post):
    tools = [{"type": "function", "function": {"name": "stop"}}]
    for choice in ("required", {"type": "function", "function": {"name": "stop"}}):
        body = {"messages": MESSAGES, "tools": tools, "tool_choice": choice, **LONG}
        body["parallel_tool_calls"] = False
        message = post("/v1/chat/completions", **body)[1]["choices"][0]["message"]
        [call] = message["tool_calls"]
        assert call["function"] == {"name": "stop", "arguments": "{}"}


def test_an_error_of_a_schema_names_the_field_that_has_it(post):
    bad = {"type": "nonsense"}
    format_ = {"type": "json_schema", "json_schema": {"name": "s", "schema": bad}}
    tool = {"type": "function", "function": {"name": "f", "parameters": bad}}
    for path, fields, name in (
        ("/v1/completions", {"prompt": "x", "response_format": format_}, "response_format"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": bad}},
         "structured_outputs"),
        ("/v1/chat/completions", {"messages": MESSAGES, "response_format": format_},
         "response_format"),
        ("/v1/chat/completions",
         {"messages": MESSAGES, "tools": [tool], "tool_choice": "required"}, "tools"),
    ):  # fmt: skip
        status, body = post(path, **fields)
        assert (status, body["error"]["param"]) == (400, name)
        assert body["error"]["message"].startswith(f"{name} cannot be compiled: ")


def test_response_formats(post):
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    assert json.loads(text_of(post, response_format=schema)).keys() == {"a", "b"}
    body = {"messages": MESSAGES, **LONG, "response_format": schema}
    message = post("/v1/chat/completions", **body)[1]["choices"][0]["message"]
    assert json.loads(message["content"]).keys() == {"a", "b"}
    body = {"messages": MESSAGES, "max_tokens": 12, "response_format": {"type": "json_object"}}
    content = post("/v1/chat/completions", **body)[1]["choices"][0]["message"]["content"]
    assert content.lstrip()[0] == "{"


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "((("},
        {"json": {"type": "nonsense"}},
        {"json": "{"},
        {"grammar": "start: nowhere"},
        {"grammar": "root ::= nowhere"},
        {"choice": []},
        {"regex": "a", "choice": ["b"]},
        {},
        {"regex": "x" * 70_000},
    ],
    ids=lambda form: str(form)[:40],
)
def test_a_form_that_cannot_be_compiled_is_a_400(post, form):
    status, body = post("/v1/completions", prompt="x", structured_outputs=form)
    assert status == 400, body
    assert "structured_outputs" in body["error"]["message"]


def test_forms_run_beside_each_other_and_beside_free_text(llm):
    forms = [None, StructuredOutputsParams(regex="[0-9]{12}"), StructuredOutputsParams(json=SCHEMA)]
    params = [
        SamplingParams(seed=i, max_tokens=80, structured_outputs=forms[i % 3]) for i in range(12)
    ]
    together = llm.generate(["y = "] * 12, params, use_tqdm=False)
    for number, output in enumerate(together):
        [alone] = llm.generate("y = ", params[number], use_tqdm=False)
        assert alone.outputs[0].text == output.outputs[0].text
        if number % 3 == 1:
            assert re.fullmatch("[0-9]{12}", output.outputs[0].text)


def test_samples_of_one_prompt_walk_by_themselves(llm):
    form = StructuredOutputsParams(regex="[0-9]{8}")
    params = SamplingParams(n=4, seed=1, max_tokens=40, structured_outputs=form)
    [output] = llm.generate("z = ", params, use_tqdm=False)
    texts = [sample.text for sample in output.outputs]
    assert all(re.fullmatch("[0-9]{8}", text) for text in texts)
    assert len(set(texts)) > 1


def outcomes_of_random_forms(llm, numbers, max_tokens):
    """How many outputs are whole, cut off by max_tokens, failed, or were refused; all are checked.

    Half of the outputs end as soon as their form lets them, so that few are cut off.
    """
    counts, asked, checks = Counter(), [], []
    for number in numbers:
        kind, form, find_flaw = random_form(number)
        start = time.monotonic()
        try:
            made = StructuredOutputsParams(**{kind: form}, disable_any_whitespace=number % 2 == 0)
            llm.engine.grammars.compile(made)
        except RequestError:
            counts[kind, "refused"] += 1
            assert time.monotonic() - start < 5, form
            continue
        params = SamplingParams(seed=number, max_tokens=max_tokens, structured_outputs=made,
                                logit_bias={0: 12} if number % 4 < 2 else None)  # fmt: skip
        asked.append(params)
        checks.append((number, kind, find_flaw))
    outputs = llm.generate(["x = "] * len(asked), asked, use_tqdm=False)
    for (number, kind, find_flaw), output in zip(checks, outputs, strict=True):
        [sample] = output.outputs
        if sample.finish_reason == "stop":
            assert find_flaw(sample.text) is None, (number, sample.text, find_flaw(sample.text))
        counts[kind, sample.finish_reason] += 1
    return counts


def test_random_forms_are_followed_or_refused(llm):
    counts = outcomes_of_random_forms(llm, range(45), max_tokens=100)
    assert counts["json", "stop"] > 8
    assert counts["regex", "stop"] > 8
    assert counts["json", "error"] + counts["regex", "error"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 10_000, 1000))
def test_10_000_random_forms_are_followed_or_refused(llm, start):
    counts = outcomes_of_random_forms(llm, range(start, start + 1000), max_tokens=400)
    assert counts["json", "error"] + counts["regex", "error"] <= 5


@pytest.mark.parametrize(
    "form",
    [
        {"json": {"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 9}},
        {"json": {"items": {"type": "integer", "minimum": -1e30, "maximum": -1e29}}},
        {"json": {"type": "integer", "minimum": 2**53 + 1}},
        {"json": '{"minimum": NaN}'},
        {"json": {"allOf": [{"type": "integer"}, {"enum": [1, 1e300]}]}},
        {"json": {"type": "number", "const": 2**60 + 1}},
        {"json": {"const": {"a": [2**63]}}},
        {"grammar": 'start: %json {"type": "integer", "minimum": -1e30, "maximum": -1e29}'},
        {"grammar": "start: %json /* */ {}"},
        {"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
        {"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "items": {"$ref": "#/$defs/a"}}},
        {"json": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.25}},
        {"json": {"type": "number", "minimum": -3.5, "exclusiveMaximum": -3}},
        {"regex": "[^\\s\\S]"},
    ],
    ids=str,
)
def test_forms_that_the_compiler_gets_wrong_are_refused(llm, form):
    """Such bounds would end the process: llguidance 1.9 negates the smallest integer."""
    with pytest.raises(RequestError, match="structured_outputs"):
        llm.engine.grammars.compile(StructuredOutputsParams(**form))


def test_a_long_chain_of_references_does_not_end_the_process(llm):
    rules = "".join(f"r{number}: r{number + 1}\n" for number in range(4500))
    schema = {
        "$defs": {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}]} for n in range(1300)},
        "$ref": "#/$defs/0",
    }
    schema["$defs"]["1300"] = {"type": "null"}
    for form in ({"grammar": f'start: r0\n{rules}r4500: "a"'}, {"json": schema}):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**form))
        [output] = llm.generate("x = ", params, use_tqdm=False)
        assert output.outputs[0].text in ("a", "null")


def test_contradictions_are_refused():
    with pytest.raises(RequestError, match=r"is not JSON.*Give its model_json_schema\(\)$"):
        StructuredOutputsParams(json=pydantic.BaseModel)
    form = StructuredOutputsParams(regex="a")
    with pytest.raises(RequestError, match="min_tokens"):
        SamplingParams(structured_outputs=form, min_tokens=3)
    with pytest.raises(RequestError, match="expected Structured"):
        SamplingParams(structured_outputs={"regex": "a"})


# --- calls of tools ----------------------------------------------------------------------------

OTHER = {
    "type": "function",
    "function": {
        "name": "roll",
        "parameters": {
            "type": "object",
            "properties": {"dice": {"$ref": "#/$defs/n"}},
            "required": ["dice"],
            "additionalProperties": False,
            "$defs": {"n": {"type": "integer", "minimum": 1, "maximum": 6}},
        },
    },
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "roll"}}])
def test_forced_calls_always_parse(http, post, choice, seed):
    body = {"messages": MESSAGES, "tools": [WEATHER, OTHER], "tool_choice": choice, "seed": seed,
            "max_tokens": 300, "parallel_tool_calls": False}  # fmt: skip
    status, answer = post("/v1/chat/completions", **body)
    assert status == 200, answer
    [given] = answer["choices"]
    assert given["finish_reason"] == "tool_calls"
    [call] = given["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "roll":
        assert 1 <= arguments["dice"] <= 6
    else:
        assert choice == "required"
        assert arguments["city"] in ("Rome", "Oslo")
    pieces = [
        piece
        for chunk in stream(http, "/v1/chat/completions", **body)
        for piece in chunk["choices"][0]["delta"].get("tool_calls", ())
    ]
    joined = "".join(piece["function"]["arguments"] for piece in pieces)
    assert json.loads(joined) == arguments
    assert pieces[0]["function"]["name"] == call["function"]["name"]


def test_tools_through_the_openai_client(url):
    async def main():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            answer = await client.chat.completions.create(
                model="pagetile-demo", messages=MESSAGES, tools=[WEATHER], tool_choice="required",
                max_tokens=300, seed=1,
            )  # fmt: skip
            message = answer.choices[0].message
            told = [
                {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
                for call in message.tool_calls
            ]
            again = await client.chat.completions.create(
                model="pagetile-demo", messages=[*MESSAGES, message, *told], tools=[WEATHER],
                max_tokens=4,
            )  # fmt: skip
            schema = {"name": "s", "schema": SCHEMA, "strict": True}
            formed = await client.chat.completions.create(
                model="pagetile-demo", messages=MESSAGES, max_tokens=200,
                response_format={"type": "json_schema", "json_schema": schema},
            )  # fmt: skip
            return message, again, formed

    message, again, formed = asyncio.run(main())
    assert message.tool_calls[0].function.name == "weather"
    assert again.usage.completion_tokens <= 4
    assert json.loads(formed.choices[0].message.content).keys() == {"a", "b"}

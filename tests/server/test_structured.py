"""Structured output and calls of tools: the output always has the requested form."""

from __future__ import annotations

import asyncio
import json
import random
import re

import openai
import pytest

from pagetile import SamplingParams
from pagetile.engine.structured_outputs import StructuredOutputsParams
from pagetile.errors import RequestError

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


def random_schema(draw, depth=0):
    kind = draw.choice(
        ("integer", "boolean", "enum", "string", "array", "object")[: 6 if depth < 2 else 4]
    )
    if kind == "enum":
        return {"enum": [draw.choice("abc"), draw.randint(0, 9)]}
    if kind == "string":
        return {"type": "string", "pattern": f"^[a-z]{{1,{draw.randint(1, 5)}}}$"}
    if kind == "array":
        return {"type": "array", "items": random_schema(draw, depth + 1), "maxItems": 2}
    if kind == "object":
        names = draw.sample("pqrst", draw.randint(1, 3))
        properties = {name: random_schema(draw, depth + 1) for name in names}
        return {"type": "object", "properties": properties, "required": names,
                "additionalProperties": False}  # fmt: skip
    return {"type": kind, **({"minimum": 0, "maximum": 999} if kind == "integer" else {})}


def test_random_schemas_are_followed_or_refused(llm):
    jsonschema = pytest.importorskip("jsonschema")
    draw = random.Random(4)
    schemas = [random_schema(draw) for _ in range(60)]
    params = [
        SamplingParams(seed=i, max_tokens=300, structured_outputs=StructuredOutputsParams(json=s))
        for i, s in enumerate(schemas)
    ]
    outputs = llm.generate(["x = "] * 60, params, use_tqdm=False)
    for schema, output in zip(schemas, outputs, strict=True):
        assert output.outputs[0].finish_reason == "stop"
        jsonschema.validate(json.loads(output.outputs[0].text), schema)


def test_contradictions_are_refused():
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

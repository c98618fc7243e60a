"""``/v1/responses`` through the ``openai`` client, and what it refuses."""

from __future__ import annotations

import json

import openai
import pytest

from pagetile.errors import GenerationError
from pagetile.server.response_items import ResponseItems
from pagetile.server.tool_parsers import Call

from .test_structured import SCHEMA

ASKED = {"model": "pagetile-demo", "temperature": 0, "max_output_tokens": 12}


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_a_text_has_the_answer_of_the_same_conversation(client):
    response = client.responses.create(
        **ASKED, input="x = 1", instructions="Write Python.", metadata={"run": "7"}, store=False
    )
    chat = client.chat.completions.create(
        model="pagetile-demo",
        temperature=0,
        max_tokens=12,
        messages=[
            {"role": "system", "content": "Write Python."},
            {"role": "user", "content": "x = 1"},
        ],
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == 12
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.metadata == {"run": "7"}
    assert response.temperature == 0
    assert response.instructions == "Write Python."


def test_stop_and_ignore_eos_are_vllms(client):
    whole = client.responses.create(**ASKED, input="x = 1").output_text
    asked = {"stop": whole[4], "ignore_eos": True}
    stopped = client.responses.create(**ASKED, input="x = 1", extra_body=asked)
    assert stopped.output_text == whole.partition(whole[4])[0]
    assert stopped.status == "completed"


def test_messages_with_parts_are_the_same_as_text(client):
    parts = [{"type": "input_text", "text": "x "}, {"type": "input_text", "text": "= 1"}]
    plain = client.responses.create(**ASKED, input="x = 1")
    in_parts = client.responses.create(**ASKED, input=[{"role": "user", "content": parts}])
    assert in_parts.output_text == plain.output_text
    # The output can be sent back as it came.
    question = {"role": "user", "content": "x = 1"}
    more = {"role": "user", "content": "go on"}
    again = client.responses.create(**ASKED, input=[question, *plain.output, more])
    assert again.usage.input_tokens > plain.usage.input_tokens


LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def test_log_probabilities_are_those_of_the_chat_whole_and_streamed(client):
    messages = [{"role": "user", "content": "x = 1"}]
    chat = client.chat.completions.create(
        model="pagetile-demo", temperature=0, max_tokens=12, messages=messages,
        logprobs=True, top_logprobs=2,
    )  # fmt: skip
    wanted = [(e.token, e.logprob) for e in chat.choices[0].logprobs.content]
    response = client.responses.create(**ASKED, **LOGPROBS, input="x = 1")
    [item] = response.output
    found = item.content[0].logprobs
    assert [e.token for e in found] == [token for token, _ in wanted]
    assert [e.logprob for e in found] == pytest.approx([p for _, p in wanted], abs=1e-4)
    assert all(len(e.top_logprobs) == 2 for e in found)
    assert "".join(e.token for e in found) == response.output_text
    events = list(client.responses.create(**ASKED, **LOGPROBS, input="x = 1", stream=True))
    streamed = [
        e for event in events if event.type == "response.output_text.delta" for e in event.logprobs
    ]
    assert [e.token for e in streamed] == [e.token for e in found]
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert [e.logprob for e in done.logprobs] == [e.logprob for e in streamed]
    plain = client.responses.create(**ASKED, input="x = 1")
    assert plain.output[0].content[0].logprobs == []


WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a place.",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string", "pattern": "^[a-z]{1,8}$"}},
        "required": ["place"],
        "additionalProperties": False,
    },
    "strict": None,
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_forced_call_is_an_item_of_the_output(client, choice):
    asked = {"model": "pagetile-demo", "input": "x = 1", "temperature": 0, "tools": [WEATHER],
             "tool_choice": choice, "parallel_tool_calls": False}  # fmt: skip
    response = client.responses.create(**asked)
    [call] = response.output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments).keys() == {"place"}
    assert response.output_text == ""
    assert response.tools[0].name == "weather"
    events = list(client.responses.create(**asked, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    num_deltas = kinds.count("function_call_arguments.delta")
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        *["function_call_arguments.delta"] * num_deltas,
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == events[-3].arguments == call.arguments
    assert events[-1].response.output[0].arguments == call.arguments
    # The call and its result can be sent back.
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    question = {"role": "user", "content": "x = 1"}
    again = client.responses.create(**ASKED, input=[question, *response.output, result])
    assert again.output[0].type == "message"


def test_text_and_calls_of_an_answer_become_items_in_order():
    entries = {7: {"token": "a"}, 8: {"token": "b"}, 9: {"token": "c"}}
    ids = iter(range(9))
    items = ResponseItems(
        lambda kind: f"{kind}-{next(ids)}", lambda tokens: [entries[i] for i in tokens]
    )
    events = items.add("Yes.", [7], [])
    events += items.add("", [8], [Call(0, "f", "{", "call-0")])
    events += items.add("", [9], [Call(0, None, "}"), Call(1, "g", "{}", "call-1")])
    events += items.finish("completed")
    assert [(kind, fields["output_index"]) for kind, fields in events] == [
        ("output_item.added", 0),
        ("content_part.added", 0),
        ("output_text.delta", 0),
        ("output_item.added", 1),
        ("function_call_arguments.delta", 1),
        ("function_call_arguments.delta", 1),
        ("function_call_arguments.done", 1),
        ("output_item.done", 1),
        ("output_item.added", 2),
        ("function_call_arguments.delta", 2),
        ("output_text.delta", 0),
        ("output_text.done", 0),
        ("content_part.done", 0),
        ("output_item.done", 0),
        ("function_call_arguments.done", 2),
        ("output_item.done", 2),
    ]
    message, first, second = items.output
    assert message["content"][0]["text"] == "Yes."
    assert message["content"][0]["logprobs"] == list(entries.values())
    assert (first["name"], first["arguments"], first["call_id"]) == ("f", "{}", "call-0")
    assert (second["name"], second["arguments"], second["status"]) == ("g", "{}", "completed")


def test_a_stream_has_the_events_of_the_api_in_order(client):
    whole = client.responses.create(**ASKED, input="x = 1")
    events = list(client.responses.create(**ASKED, input="x = 1", stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    num_deltas = kinds.count("output_text.delta")
    assert num_deltas > 1
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * num_deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-4].text == events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == 12


def test_text_formats_are_followed(client):
    form = {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}
    asked = {"model": "pagetile-demo", "input": "x = 1", "max_output_tokens": 200}
    response = client.responses.create(**asked, text={"format": form})
    assert response.status == "completed"
    assert json.loads(response.output_text).keys() == {"a", "b"}
    events = list(client.responses.create(**asked, text={"format": form}, stream=True))
    assert events[-1].type == "response.completed"
    assert json.loads(events[-1].response.output_text).keys() == {"a", "b"}
    asked["max_output_tokens"] = 12
    response = client.responses.create(**asked, text={"format": {"type": "json_object"}})
    assert response.output_text.lstrip()[0] == "{"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("store", True),
        ("previous_response_id", "resp_1"),
        ("tools", [{"type": "web_search"}]),
        ("background", True),
        ("n", 2),
        ("input", []),
        ("input", ""),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        ("input", [{"type": "function_call_output", "output": "x"}]),
        ("input", [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]),
        ("top_logprobs", 2),
        ("include", ["reasoning.encrypted_content"]),
        ("tool_choice", {"type": "function", "name": "f"}),
        ("tools.0.strict", True),
        ("max_output_tokens", 0),
        ("temperature", -1.0),
        ("top_p", 7.0),
        ("metadata", {"k": "v" * 513}),
        ("metadata", {str(i): "v" for i in range(17)}),
        ("text", {"format": {"type": "grammar"}}),
        ("text", {"verbosity": "low"}),
        ("text.format", {"type": "json_schema", "name": "s", "schema": {"type": "nonsense"}}),
    ],
)
def test_an_unsupported_field_is_a_400_that_names_it(post, field, value):
    given = {"text": {"format": value}} if field == "text.format" else {field: value}
    if field == "tools.0.strict":
        given = {"tools": [{**WEATHER, "strict": True}]}
    status, body = post("/v1/responses", **{"input": "x", **given})
    assert status == 400, body
    assert body["error"]["message"].startswith(field), body


def test_an_input_that_is_too_long_is_named_as_input(post):
    status, body = post("/v1/responses", input="x" * 4_000_000)
    assert status == 400, body
    assert body["error"]["param"] == "input"
    assert "messages" not in body["error"]["message"]


def test_a_failure_in_the_middle_of_a_stream_is_an_event(client, monkeypatch):
    from pagetile.engine.request_stream import RequestStream

    async def fail(self):
        raise GenerationError("a step failed")

    monkeypatch.setattr(RequestStream, "result", fail)
    events = list(client.responses.create(**ASKED, input="x = 1", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "a step failed"


def test_a_stream_that_the_server_aborts_ends_as_failed(client, async_llm):
    # Long enough that the abort comes before its end.
    schema = {"type": "string", "pattern": "^[a-z]{900}$"}
    form = {"type": "json_schema", "name": "s", "schema": schema}
    asked = {"model": "pagetile-demo", "input": "x = 1", "text": {"format": form}}
    events = []
    for event in client.responses.create(**asked, stream=True):
        events.append(event)
        if event.type == "response.created":
            for request_id in list(async_llm._streams):
                async_llm.abort(request_id)
    assert events[-1].type == "response.failed"
    assert "aborted" in events[-1].response.error.message
    assert events[-1].response.output[0].status == "incomplete"

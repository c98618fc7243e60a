from __future__ import annotations

import json

import httpx2
import pytest

from pagetile.server import ServerConfig

from .conftest import serving
from .test_completions import stream

MESSAGES = [{"role": "user", "content": "def add(a, b):"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def test_an_answer_and_its_stream(http, post):
    asked = {"messages": MESSAGES, "max_tokens": 20, "temperature": 0, "logprobs": True,
             "top_logprobs": 2}  # fmt: skip
    status, body = post("/v1/chat/completions", **asked)
    assert status == 200
    [choice] = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    content = choice["logprobs"]["content"]
    assert len(content) == 20
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    joined = b"".join(bytes(entry["bytes"]) for entry in content)
    assert joined.decode("utf-8", "replace") == choice["message"]["content"]
    chunks = stream(http, "/v1/chat/completions", **asked)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert text == choice["message"]["content"]
    streamed = [
        e for c in chunks for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert [e["token"] for e in streamed] == [e["token"] for e in content]
    found = [e["logprob"] for e in streamed]  # the second time, the prompt's keys were cached
    assert found == pytest.approx([e["logprob"] for e in content], abs=1e-4)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_samples_of_a_stream_are_numbered(http, post):
    asked = {"messages": MESSAGES, "max_tokens": 8, "seed": 1, "n": 3}
    whole = post("/v1/chat/completions", **asked)[1]["choices"]
    chunks = stream(http, "/v1/chat/completions", **asked)
    for choice in whole:
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        text = "".join(c["delta"].get("content", "") for c in own)
        assert text == choice["message"]["content"]


def test_an_answer_of_another_server_can_be_sent_back(post):
    """vLLM's answers have fields for reasoning, null for most models."""
    answer = {"role": "assistant", "content": "Hello.", "tool_calls": [], "function_call": None}
    for more in ({"reasoning": None, "reasoning_content": None}, {"reasoning": "A greeting."}):
        messages = [{"role": "user", "content": "Hi"}, {**answer, **more}] * 2
        status, body = post("/v1/chat/completions", messages=messages[:3], max_tokens=1)
        assert status == 200, body


def test_content_in_parts_is_content_in_one(post):
    parts = [{"type": "text", "text": "def add"}, {"type": "text", "text": "(a, b):"}]
    texts = [
        post("/v1/chat/completions", messages=[{"role": "user", "content": content}],
             max_tokens=8, temperature=0)[1]["choices"][0]["message"]["content"]
        for content in ("def add(a, b):", parts)
    ]  # fmt: skip
    assert texts[0] == texts[1]


def test_the_assistants_words_can_be_continued(post):
    messages = [*MESSAGES, {"role": "assistant", "content": "return a"}]
    asked = {"messages": messages, "max_tokens": 4, "temperature": 0}
    _, body = post("/v1/chat/completions", **asked, continue_final_message=True,
                   add_generation_prompt=False, echo=True)  # fmt: skip
    assert body["choices"][0]["message"]["content"].startswith("return a")
    plain = post("/v1/chat/completions", **asked)[1]
    assert plain["usage"]["prompt_tokens"] > body["usage"]["prompt_tokens"]


REFUSED = {
    "an unknown role": (
        {"messages": [{"role": "king", "content": "x"}]},
        "messages.0.role: expected one of 'system', 'developer', 'user', 'assistant', 'tool', "
        "not 'king'",
    ),
    "no role": ({"messages": [{"content": "x"}]}, "messages.0.role: this field is required"),
    "a number": (
        {"messages": [{"role": "user", "content": 5}]},
        "messages.0.content: expected a string, or a list of text parts: "
        '{"type": "text", "text": "..."}, not 5',
    ),
    "an image": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
        "messages.0.content.0.type: expected 'text', not 'image_url'",
    ),
    "no messages": ({"messages": []}, "messages: expected at least 1, not 0"),
    "no content": ({"messages": [{"role": "user"}]}, "messages.0.content: this field is required"),
    "no schema": (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema: this field is required",
    ),
    "no function": ({"tools": [{"type": "function"}]}, "tools.0.function: this field is required"),
    "a function's name": (
        {"tools": [{"type": "function", "function": {"name": "f f"}}]},
        "tools.0.function.name: String should match pattern",
    ),
    "a choice without a name": (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {}}},
        "tool_choice.function.name: this field is required",
    ),
    "a call that is not JSON": (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}],
                }
            ]
        },
        "arguments",
    ),
    "top_logprobs alone": ({"top_logprobs": 2}, "logprobs=true"),
    "tool_choice alone": ({"tool_choice": "auto"}, "needs tools"),
    "an unknown tool": (
        {
            "tools": [WEATHER],
            "tool_choice": {"type": "function", "function": {"name": "other"}},
        },
        "other",
    ),
    "two tools of one name": ({"tools": [WEATHER, WEATHER]}, "same name"),
    "functions": ({"functions": []}, "functions"),
    "a template": ({"chat_template": "{{ 1 }}"}, "trust-request-chat-template"),
    "tokenize": ({"chat_template_kwargs": {"tokenize": True}}, "tokenize"),
    "messages again": ({"chat_template_kwargs": {"messages": []}}, "messages"),
    "reasoning_effort": ({"reasoning_effort": "high"}, "reasoning_effort"),
    "store": ({"store": True}, "store"),
    "audio": ({"modalities": ["audio"]}, "modalities"),
    "both lengths": ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    "echo alone": ({"echo": True}, "continue_final_message"),
    "best_of": ({"best_of": 2}, "best_of"),
    "a huge n": ({"n": 2**40}, "at most 128"),
    "a long conversation": ({"messages": MESSAGES * 5000}, "at most 4096"),
    "a long message": ({"messages": [{"role": "user", "content": "x" * 10**5}]}, "max_model_len"),
}


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_tools_that_the_template_does_not_offer_are_refused_with_advice_that_helps(
    async_llm, choice
):
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    body = {"messages": MESSAGES, "tools": [WEATHER], "tool_choice": choice, "max_tokens": 4}
    with serving(async_llm, ServerConfig(chat_template=template)) as url:
        response = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=30)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools")
    assert "--chat-template" in error["message"]
    assert "required" not in error["message"]  # a forced call is refused, too


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_that_cannot_be_served_is_a_400_with_the_reason(http, async_llm, name):
    fields, words = REFUSED[name]
    text = json.dumps({"messages": MESSAGES, **fields})
    headers = {"content-type": "application/json"}
    response = http.post("/v1/chat/completions", content=text, headers=headers)
    assert response.status_code == 400, response.text
    assert words in response.json()["error"]["message"]
    assert async_llm.num_requests == 0

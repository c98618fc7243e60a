from __future__ import annotations

import json

import pytest

from pagetile.server.tool_parsers import HermesParser, Llama3JsonParser, choose_parser

ADD = '{"name": "add", "arguments": {"a": 1, "b": "</x>"}}'
HERMES = f"Let me see.\n<tool_call>\n{ADD}\n</tool_call>\n<tool_call>{ADD}</tool_call>"
LLAMA = ADD.replace("arguments", "parameters")


def parse(parser, text, size):
    said, calls = "", []
    for start in range(0, len(text), size):
        found = parser.feed(text[start : start + size])
        said, calls = said + found.text, calls + found.calls
    found = parser.finish()
    return said + found.text, calls + found.calls


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("kind", "text", "said", "count"),
    [
        (HermesParser, HERMES, "Let me see.", 2),
        (HermesParser, "a < b <tool b  \n", "a < b <tool b  \n", 0),
        (HermesParser, "<tool_call>{broken</tool_call> x", "<tool_call>{broken</tool_call> x", 0),
        (HermesParser, f"<tool_call>{ADD}", "", 1),
        (HermesParser, '<tool_call>{"name": "other"}</tool_call>',
         '<tool_call>{"name": "other"}</tool_call>', 0),
        (Llama3JsonParser, LLAMA, "", 1),
        (Llama3JsonParser, f"<|python_tag|>{LLAMA}; {LLAMA}", "", 2),
        (Llama3JsonParser, "Hello {x}", "Hello {x}", 0),
        (Llama3JsonParser, '{"name": "other"}', '{"name": "other"}', 0),
        (Llama3JsonParser, "{ not json", "{ not json", 0),
        (Llama3JsonParser, "", "", 0),
    ],
)  # fmt: skip
def test_calls_are_found_however_the_text_is_cut(kind, text, said, count, size):
    found, calls = parse(kind(["add"]), text, size)
    assert (found, len(calls)) == (said, count)
    for number, call in enumerate(calls):
        assert (call.index, call.name) == (number, "add")
        assert json.loads(call.arguments) == {"a": 1, "b": "</x>"}


def test_the_template_tells_the_parser():
    assert choose_parser("auto", "{{ '<tool_call>' }}") is HermesParser
    assert choose_parser("auto", "<|python_tag|>") is Llama3JsonParser
    assert choose_parser("auto", "plain") is None
    assert choose_parser("none", "<tool_call>") is None

"""``langchain-openai``."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

langchain_openai = pytest.importorskip(
    "langchain_openai", reason="make test-clients installs langchain-openai"
)


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


@pytest.fixture
def chat(url):
    return langchain_openai.ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model="pagetile-demo", temperature=0, max_tokens=300,
        max_retries=0,
    )  # fmt: skip


def test_invoke_counts_tokens(chat):
    answer = chat.invoke("x = 1", max_tokens=7)
    assert answer.usage_metadata["output_tokens"] == 7
    assert answer.response_metadata["finish_reason"] == "length"


def test_a_stream_is_the_whole_answer(chat):
    asked = {"input": "x = 1", "max_tokens": 40}
    pieces = list(chat.stream(**asked, stream_usage=True))
    assert len(pieces) > 10
    assert "".join(piece.content for piece in pieces) == chat.invoke(**asked).content
    assert sum(p.usage_metadata["output_tokens"] for p in pieces if p.usage_metadata) == 40


def test_a_batch_answers_as_single_calls_do(chat):
    prompts = [f"x = {number}" for number in range(6)]
    together = [answer.content for answer in chat.batch(prompts, max_tokens=8)]
    assert together == [chat.invoke(prompt, max_tokens=8).content for prompt in prompts]


@pytest.mark.parametrize("choice", ["Weather", "any"])
def test_tools_that_must_be_called(chat, choice):
    [call] = (
        chat.bind_tools([Weather], tool_choice=choice, parallel_tool_calls=False)
        .invoke("Rome?")
        .tool_calls
    )
    assert call["name"] == "Weather"
    assert Weather.model_validate(call["args"])


def test_a_tools_answer_goes_back(chat):
    bound = chat.bind_tools([Weather], tool_choice="Weather")
    asked = bound.invoke("Rome?")
    told = {"role": "tool", "tool_call_id": asked.tool_calls[0]["id"], "content": "sunny"}
    answer = chat.invoke([{"role": "user", "content": "Rome?"}, asked, told], max_tokens=5)
    assert answer.usage_metadata["output_tokens"] == 5


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat, method):
    found = chat.with_structured_output(Weather, method=method).invoke("Rome?")
    assert isinstance(found, Weather)


def test_json_mode(chat):
    found = chat.with_structured_output(None, method="json_mode").invoke("Rome? In JSON.")
    assert isinstance(found, dict)

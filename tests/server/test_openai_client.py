"""The server through the ``openai`` package, the most common client."""

from __future__ import annotations

import asyncio

import openai
import pytest

from .test_chat import MESSAGES


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_models(client):
    assert [model.id for model in client.models.list()] == ["pagetile-demo"]
    assert client.models.retrieve("pagetile-demo").id == "pagetile-demo"


def test_completions(client):
    asked = {"model": "pagetile-demo", "prompt": "def f(", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**asked, logprobs=2)
    assert whole.usage.completion_tokens == 12
    assert len(whole.choices[0].logprobs.tokens) == 12
    text = "".join(c.choices[0].text for c in client.completions.create(**asked, stream=True))
    assert text == whole.choices[0].text


def test_chat(client):
    asked = {"model": "pagetile-demo", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=1)
    assert len(whole.choices[0].logprobs.content) == 12
    options = {"stream_options": {"include_usage": True, "include_obfuscation": False}}
    chunks = list(client.chat.completions.create(**asked, stream=True, **options))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 12


def test_an_answer_can_be_sent_back(client):
    answer = client.chat.completions.create(model="pagetile-demo", messages=MESSAGES, max_tokens=4)
    messages = [*MESSAGES, answer.choices[0].message, {"role": "user", "content": "go on"}]
    again = client.chat.completions.create(
        model="pagetile-demo", messages=messages, max_completion_tokens=4
    )
    assert again.usage.completion_tokens <= 4


def test_vllms_extensions_go_through_extra_body(client):
    found = client.completions.create(
        model="pagetile-demo",
        prompt="def f(",
        max_tokens=4,
        extra_body={"top_k": 1, "return_token_ids": True, "ignore_eos": True},
    )
    assert len(found.choices[0].token_ids) == 4


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.completions.create(model="pagetile-demo", prompt="x", top_p=7)
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        client.completions.create(model="gpt-5", prompt="x")


def test_async_streams_side_by_side(url):
    async def main():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:

            async def one(number):
                text = ""
                chunks = await client.chat.completions.create(
                    model="pagetile-demo",
                    messages=[{"role": "user", "content": f"x = {number}"}],
                    max_tokens=16,
                    temperature=0,
                    stream=True,
                )
                async for chunk in chunks:
                    text += chunk.choices[0].delta.content or ""
                return text

            together = await asyncio.gather(*map(one, range(12)))
            alone = [await one(number) for number in (0, 5)]
            return together, alone

    together, alone = asyncio.run(main())
    assert [together[0], together[5]] == alone

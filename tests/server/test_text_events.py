"""Events of which only the text changes, joined deltas, and their way between threads."""

import asyncio
import json
import threading
import time

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetile import SamplingParams
from pagetile.engine.engine_thread import Mailbox
from pagetile.engine.outputs import Delta
from pagetile.engine.request_stream import RequestStream
from pagetile.server.generation import Added, TextEvents, event_of, join, write_text

from .conftest import opened, serving
from .test_completions import PROMPT

MODELS = ('a "model"', "\0text\0", "ü")


def completion(index, text, model="m"):
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
    return {"id": "cmpl-1", "created": 1, "model": model, "choices": [choice]}


@given(st.text(), st.sampled_from(MODELS), st.integers(0, 2))
def test_an_event_is_what_json_dumps_makes_of_it(text, model, index):
    events = TextEvents(lambda i, t: completion(i, t, model), 3)
    assert events.of(index, text) == event_of(completion(index, text, model))
    delta = Delta("r", index, text, 5, None)
    assert events.encode([delta]) == (events.of(index, text).encode() if text else b"")


def test_text_that_comes_together_is_one_event_a_sample():
    events = TextEvents(completion, 2)
    deltas = [Delta("r", 0, "a", 1, None), Delta("r", 1, "x", 2, None), Delta("r", 0, "b", 3, None)]
    expected = events.of(0, "ab") + events.of(1, "x")
    assert events.encode(deltas) == expected.encode()
    end = Delta("r", 1, "z", 4, "length")
    assert events.encode([*deltas, end]) is events.encode([end]) is None


def test_joined_deltas_lose_no_token_and_keep_the_end():
    deltas = [
        Delta("r", 1, "x", 7, None),
        Delta("r", 0, "a", 1, None),
        Delta("r", 1, "", None, "error"),
        Delta("r", 0, "b", 2, "stop"),
    ]
    assert join(deltas) == [Added(1, "x", [7], "error"), Added(0, "ab", [1, 2], "stop")]


# --- from the engine's thread to the loop ---------------------------------------------------


def stream_of(name="r", **params):
    return RequestStream(
        name, None, (1,), SamplingParams(**params), is_streamed=True, generates=True,
        on_close=lambda stream: None,
    )  # fmt: skip


def news(stream, text, now=1.0, output=None):
    return (stream, [Delta(stream.request_id, 0, text, 5, None)], output, now)


def test_steps_that_come_while_the_loop_is_busy_are_delivered_together_and_in_order(monkeypatch):
    async def main():
        loop = asyncio.get_running_loop()
        wake_ups, wake = [], loop.call_soon_threadsafe
        monkeypatch.setattr(
            loop, "call_soon_threadsafe", lambda *call: (wake_ups.append(call), wake(*call))
        )
        mailbox, streams = Mailbox(loop), [stream_of("a"), stream_of("b")]
        mailbox.post([news(streams[0], "1", 5.0), news(streams[1], "x", 5.0)])
        mailbox.post([news(streams[0], "2", 6.0)])
        mailbox.post([news(streams[1], "y", 7.0), news(streams[0], "3", 7.0)])
        assert len(wake_ups) == 1
        found = [[delta.text for delta in await stream.take()] for stream in streams]
        assert found == [["1", "2", "3"], ["x", "y"]]
        assert [stream.first_token for stream in streams] == [5.0, 5.0]
        mailbox.post([news(streams[0], "4")])
        assert len(wake_ups) == 2
        assert [delta.text for delta in await streams[0].take()] == ["4"]

    asyncio.run(main())


def test_a_stream_that_cannot_take_its_news_fails_alone():
    async def main():
        def fails(deltas):
            raise OSError("the connection is gone")

        mailbox, streams = Mailbox(asyncio.get_running_loop()), [stream_of("a"), stream_of("b")]
        waiting = asyncio.ensure_future(streams[0].take())
        await asyncio.sleep(0)
        streams[0].on_deltas = fails
        mailbox.post([news(streams[0], "1"), news(streams[1], "x")])
        assert [delta.text for delta in await streams[1].take()] == ["x"]
        with pytest.raises(OSError, match="the connection is gone"):
            await waiting
        assert streams[0].is_closed

    asyncio.run(main())


def test_nothing_is_lost_between_two_threads():
    async def main():
        mailbox, stream = Mailbox(asyncio.get_running_loop()), stream_of()
        texts = [f"{number} " for number in range(3000)]
        poster = threading.Thread(
            target=lambda: [mailbox.post([news(stream, text)]) for text in texts]
        )
        poster.start()
        found = []
        while len(found) < len(texts):
            found += [delta.text for delta in await asyncio.wait_for(stream.take(), 10)]
        poster.join()
        assert found == texts

    asyncio.run(main())


def test_a_closed_loop_gets_nothing():
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)
    loop.close()
    mailbox.post([])
    assert not mailbox._steps


def test_deltas_go_past_take_only_while_it_waits():
    async def main():
        stream, direct = stream_of(), []
        accepts = True

        def on_deltas(deltas):
            if accepts:
                direct.extend(delta.text for delta in deltas)
            return accepts

        stream.on_deltas = on_deltas
        stream.put(*news(stream, "1")[1:3], 1.0)  # nothing waits yet
        assert direct == []
        assert [delta.text for delta in await stream.take()] == ["1"]
        waiting = asyncio.ensure_future(stream.take())
        await asyncio.sleep(0)
        for text in "23":
            stream.put(*news(stream, text)[1:3], 1.0)
        await asyncio.sleep(0)
        assert direct == ["2", "3"]
        assert not waiting.done()
        accepts = False
        stream.put(*news(stream, "4")[1:3], 1.0)
        accepts = True
        stream.put(*news(stream, "5")[1:3], 1.0)  # "4" has not been read: it must not be overtaken
        assert [delta.text for delta in await waiting] == ["4", "5"]
        assert direct == ["2", "3"]
        stream.close()
        assert stream.on_deltas is None

    asyncio.run(main())


def test_the_end_of_a_sample_and_what_the_connection_refuses_are_left_to_the_reader():
    async def main():
        stream, written, is_open = stream_of(), [], True
        write_text(
            stream, TextEvents(completion, 1), lambda data: is_open and not written.append(data)
        )
        waiting = asyncio.ensure_future(stream.take())
        await asyncio.sleep(0)
        stream.put(*news(stream, "a")[1:3], 1.0)
        is_open = False
        stream.put(*news(stream, "b")[1:3], 1.0)
        assert [delta.text for delta in await waiting] == ["b"]
        assert written == [event_of(completion(0, "a")).encode()]
        write_text(stream, None, written.append)
        is_open, waiting = True, asyncio.ensure_future(stream.take())
        await asyncio.sleep(0)
        stream.put([Delta("r", 0, "c", 5, "length")], None, 1.0)
        assert [delta.finish_reason for delta in await waiting] == ["length"]

    asyncio.run(main())


# --- a loop that is behind --------------------------------------------------------------------


@pytest.fixture(scope="module")
def busy_url(llm):
    """A server whose event loop is blocked for 0.1 s again and again."""
    with opened(llm) as async_llm, serving(async_llm) as url:
        is_over = threading.Event()

        def disturb():
            while not is_over.wait(0.02):
                for stream in list(async_llm._streams.values()):
                    stream.loop.call_soon_threadsafe(time.sleep, 0.1)
                    is_over.wait(0.1)
                    break

        thread = threading.Thread(target=disturb)
        thread.start()
        yield url
        is_over.set()
        thread.join()


CHAT = {"messages": [{"role": "user", "content": "def add(a, b):"}]}
LENGTH = {"max_tokens": 80, "temperature": 0, "ignore_eos": True}
FORMS = {
    "text": ("/v1/completions", {"prompt": PROMPT}),
    "echo": ("/v1/completions", {"prompt": PROMPT, "echo": True}),
    "several": ("/v1/completions", {"prompt": [PROMPT, "import os"], "n": 2, "seed": 3}),
    "logprobs": ("/v1/completions", {"prompt": PROMPT, "logprobs": 2}),
    "ids": ("/v1/completions", {"prompt": PROMPT, "return_token_ids": True}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat with logprobs": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "chat with ids": ("/v1/chat/completions", {**CHAT, "n": 2, "return_token_ids": True}),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_stream_of_a_busy_server_has_fewer_events_and_the_same_content(busy_url, form):
    path, fields = FORMS[form]
    asked = {**LENGTH, **fields}
    counts_each = "logprobs" in form or "ids" in form
    options = {"include_usage": True, "continuous_usage_stats": counts_each}
    whole = httpx2.post(busy_url + path, json=asked, timeout=60).json()
    streamed = {**asked, "stream": True, "stream_options": options}
    body = httpx2.post(busy_url + path, json=streamed, timeout=60).text
    lines = [line[6:] for line in body.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    last = events.pop()
    tokens = whole["usage"]["completion_tokens"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == tokens == 80 * len(whole["choices"])
    assert len(events) < 0.7 * tokens
    for choice in whole["choices"]:
        own = [e for e in events if e["choices"][0]["index"] == choice["index"]]
        check_content([e["choices"][0] for e in own], choice)
        counts = [e["usage"]["completion_tokens"] for e in own if "usage" in e]
        assert counts == sorted(counts)
        num_openings = "chat" in form  # the chunk that says who speaks counts nothing
        assert len(counts) == (len(own) - num_openings if counts_each else 0)
        if counts_each and len(whole["choices"]) == 1:
            assert counts[-1] == tokens


def check_content(chunks, choice):
    """The chunks of a sample, joined, are the choice of the whole response."""
    is_chat = "message" in choice
    texts = [c["delta"].get("content", "") if is_chat else c["text"] for c in chunks]
    assert "".join(texts) == (choice["message"]["content"] if is_chat else choice["text"])
    assert [c["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["finish_reason"] == choice["finish_reason"] == "length"
    assert chunks[-1]["stop_reason"] == choice["stop_reason"]
    if "token_ids" in choice:
        joined = [token_id for c in chunks for token_id in c.get("token_ids", [])]
        assert joined == choice["token_ids"]
    if choice["logprobs"] is not None:
        key = "content" if is_chat else "tokens"
        joined = [token for c in chunks if c["logprobs"] for token in c["logprobs"][key]]
        names = [token["token"] if is_chat else token for token in joined]
        found = choice["logprobs"][key]
        assert names == [token["token"] if is_chat else token for token in found]

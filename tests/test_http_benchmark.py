"""The load generator of ``python -m benchmarks http``, against a server of one made-up response."""

import asyncio
import socket
import threading
import time

import pytest
import torch
from benchmarks import http_parts
from benchmarks.generators import Model
from benchmarks.http import Stream, Workload, compare, send
from benchmarks.http_n import Setup, compare_n, make_byte_tokenizer

from pagetile.engine.text_decoder import TextDecoder

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
EVENTS = (
    b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n',
    b'data: {"choices": [{"index": 0, "text": "b"}]}\n\n'
    b'data: {"choices": [{"index": 0, "text": "c"}]}\n\n',
    b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n',
    b"data: [DONE]\n\n",
)


@pytest.fixture
def serve():
    """Answers every connection with the same bytes; returns the address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def start(events):
        def accept():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(HEAD + b"".join(events))

        threading.Thread(target=accept, daemon=True).start()
        return listener.getsockname()

    yield start
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_requests_are_sent_when_they_are_due_and_read_to_the_end(serve):
    address, start = serve(EVENTS), time.perf_counter()
    streams = send(address, [b"a", b"b"], [0.0, 0.1])
    assert streams[1].sent - start >= 0.1
    for stream in streams:
        assert stream.body == HEAD + b"".join(EVENTS)
        assert stream.num_tokens == 3
        assert stream.sent < stream.times[0] <= stream.times[1] == stream.times[2]


def test_a_response_that_breaks_off_has_no_tokens(serve):
    assert send(serve(EVENTS[:-1]), [b"a"], [0.0])[0].num_tokens == 0


def test_events_have_the_time_of_their_read():
    pieces = [(1.0, HEAD), (2.0, EVENTS[0]), (3.0, EVENTS[1]), (4.0, EVENTS[2] + EVENTS[3])]
    assert Stream(0.5, pieces).times == [2.0, 3.0, 3.0]


@pytest.mark.slow
def test_the_server_and_the_engine_do_the_same_work():
    found = compare(Workload(num_streams=2, num_prompt=8, num_new=4), turns=1, seconds=0.5)
    assert found["share of LLM.generate"] > 0
    assert found["ms to the first token, p50"] > 0


TINY = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 500,
    "tie_word_embeddings": True,
}


def test_every_token_of_workload_n_has_a_text_of_its_own():
    tokenizer = make_byte_tokenizer(500)
    spelt = TextDecoder(tokenizer).token_bytes[True]  # the fast way, which Qwen3's takes, too
    assert [spelt[i] for i in (0, 7, 499)] == [b" w0", b" w7", b" w499"]


def test_both_ways_of_an_event_reach_the_connections(monkeypatch):
    for name, value in (("NUM_STREAMS", 3), ("NUM_STEPS", 2), ("NUM_CALLS", 10)):
        monkeypatch.setattr(http_parts, name, value)
    received, empty = [], http_parts._Connections.empty

    monkeypatch.setattr(http_parts._Connections, "empty", lambda self: received.append(empty(self)))
    found = asyncio.run(http_parts.measure())
    assert all(value > 0 for value in found.values())
    nothing, sent, directly, by_tasks = (received[at : at + 2] for at in (0, 2, 4, 6))
    assert nothing == [0, 0]
    assert sent[0] == sent[1] > 0
    assert directly[0] == directly[1] == by_tasks[0] == by_tasks[1] > 0


@pytest.mark.slow
def test_workload_n_over_http_is_what_the_engine_generates():
    setup = Setup(Model("tiny", TINY), "cpu", torch.float32, num_prompts=3, longest=20)
    found = compare_n(setup, turns=1)
    assert found["share of LLM.generate"] > 0
    assert found["share of the engine that streams"] > 0
    assert found["tokens an event"] >= 1
    assert found["ms to the first token, p50"] > 0


@pytest.mark.slow
def test_a_failure_of_the_engines_process_is_reported():
    setup = Setup(Model("tiny", TINY), "nonsense", torch.float32, num_prompts=1, longest=20)
    with pytest.raises(RuntimeError, match=r"process of the engine failed: \w+: .*nonsense"):
        compare_n(setup, turns=1)

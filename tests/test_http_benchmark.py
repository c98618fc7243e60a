"""The load generator of ``python -m benchmarks http``, against a server of one made-up response."""

import socket
import threading
import time

import pytest
from benchmarks.http import Workload, compare, send

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
EVENTS = (
    b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n',
    b'data: {"choices": [{"index": 0, "text": "b"}]}\n\n'
    b'data: {"choices": [{"index": 0, "text": "c"}]}\n\n',
    b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n',
    b"data: [DONE]\n\n",
)


@pytest.fixture
def address():
    """A server that answers every connection with EVENTS, the first after 50 ms."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(connection):
        with connection:
            connection.recv(1 << 16)
            connection.sendall(HEAD)
            for event in EVENTS:
                time.sleep(0.05)
                connection.sendall(event)

    def accept():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,)).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_events_have_the_times_at_which_they_were_read(address):
    streams = send(address, [b"a", b"b"], [0.0, 0.1])
    assert [stream.num_tokens for stream in streams] == [3, 3]
    assert streams[1].sent - streams[0].sent >= 0.1
    for stream in streams:
        first, second, third = stream.times
        assert first - stream.sent >= 0.05
        assert second - first >= 0.04
        assert second == third


def test_a_response_that_breaks_off_has_no_tokens(address, monkeypatch):
    monkeypatch.setitem(globals(), "EVENTS", EVENTS[:-1])
    assert send(address, [b"a"], [0.0])[0].num_tokens == 0


@pytest.mark.slow
def test_the_server_and_the_engine_do_the_same_work():
    found = compare(Workload(num_streams=2, num_prompt=8, num_new=4), turns=1, seconds=0.5)
    assert found["share of LLM.generate"] > 0
    assert found["ms to the first token, p50"] > 0

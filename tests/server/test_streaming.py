"""Writing pieces of a stream to the connection, without an engine."""

import asyncio
import socket
import threading
import time
from types import SimpleNamespace

import httpx2
import pytest
import uvicorn

from pagetile.engine.outputs import Delta
from pagetile.server.generation import server_sent_events
from pagetile.server.streaming import DirectWrites, EventStream


class App:
    """Answers with a stream and keeps what went through ``send``."""

    def __init__(self, pieces, send_seconds=30.0):
        self.pieces, self.send_seconds = pieces, send_seconds
        self.messages, self.ended = [], threading.Event()

    async def __call__(self, scope, receive, send):
        async def watched(message):
            self.messages.append(message)
            await send(message)

        stream = EventStream(self.pieces(), send_seconds=self.send_seconds, on_end=self.ended.set)
        await stream(scope, receive, watched)


@pytest.fixture
def address():
    """Serves an ``App`` behind ``DirectWrites``: its host and port."""
    servers = []

    def start(app):
        options = {"http": "h11", "ws": "none", "lifespan": "off", "log_level": "critical"}
        server = uvicorn.Server(uvicorn.Config(DirectWrites(app), port=0, **options))
        server.install_signal_handlers = lambda: None
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        servers.append((server, thread))
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        return server.servers[0].sockets[0].getsockname()[:2]

    yield start
    for server, thread in servers:
        server.should_exit = True
        thread.join(10)


async def three():
    for number in range(3):
        await asyncio.sleep(0)
        yield b"data: %d\n\n" % number
        yield b""


def test_pieces_pass_no_wrapper_of_send(address):
    app = App(three)
    host, port = address(app)
    assert httpx2.get(f"http://{host}:{port}/").content == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
    kinds = [(message["type"], message.get("body")) for message in app.messages]
    assert kinds == [("http.response.start", None), ("http.response.body", b"")]


def test_a_client_that_knows_no_chunks_gets_none(address):
    with socket.create_connection(address(App(three))) as client:
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        data = b""
        while more := client.recv(1000):
            data += more
    assert data.endswith(b"\r\n\r\ndata: 0\n\ndata: 1\n\ndata: 2\n\n")


@pytest.mark.parametrize("leaves", [True, False])
def test_nothing_is_made_for_a_client_that_does_not_read(address, leaves):
    num_made = 0

    async def many():
        nonlocal num_made
        while num_made < 1000:
            await asyncio.sleep(0)
            num_made += 1
            yield b"x" * (1 << 20)

    app = App(many, send_seconds=30.0 if leaves else 0.3)
    with socket.create_connection(address(app)) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        client.recv(1000)
        if leaves:
            client.close()
        assert app.ended.wait(5)
    assert num_made < 100


def test_a_stream_that_its_client_leaves_is_not_logged_as_one_without_tokens():
    class Stream:
        prompt_token_ids = (1, 2)

        async def take(self):
            return [Delta(0, 0, "x", 5, None)]

        def close(self):
            pass

    log = {}
    request = SimpleNamespace(state=SimpleNamespace(log=log), scope={})

    async def leave():
        events = server_sent_events(request, [Stream()], lambda number, deltas: b"x", None)
        assert await anext(events) == b"x"
        await events.aclose()

    asyncio.run(leave())
    assert log == {}

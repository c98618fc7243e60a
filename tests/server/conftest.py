"""A server on a loopback port, with the shipped checkpoint in float32 behind it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager

import httpx2
import pytest
import uvicorn

from pagetile.engine.async_llm import AsyncLLM
from pagetile.engine.llm import LLM
from pagetile.server import ServerConfig, create_app
from pagetile.server.logs import log
from pagetile.server.streaming import DirectWrites
from pagetile.server.templates import built_in_template

log.is_on = False


@pytest.fixture(scope="session")
def llm():
    """The engine, for tests that call it, or open an ``AsyncLLM`` of their own over it."""
    return LLM(dtype="float32", num_blocks=256, max_num_seqs=16)


@pytest.fixture(scope="session")
def served_llm():
    """The engine of ``async_llm``, which nothing else may use."""
    return LLM(dtype="float32", num_blocks=256, max_num_seqs=16)


@pytest.fixture(scope="module")
def async_llm(served_llm):
    """An ``AsyncLLM`` that the tests of a module share."""
    with opened(served_llm) as found:
        yield found


@contextmanager
def opened(llm, **options):
    made = AsyncLLM(llm, **options)
    try:
        yield made
        assert made.is_alive
        llm.engine.check()
    finally:
        # On a thread of its own: Playwright runs an event loop on this one.
        closer = threading.Thread(target=lambda: asyncio.run(made.close()))
        closer.start()
        closer.join()
        if llm.engine.has_unfinished:
            for request_id in list(llm.engine._requests):
                llm.engine.abort(request_id)
                llm.engine.take_output(request_id)


@contextmanager
def serving(async_llm, config=None):
    """The URL of a server that runs on a thread of this process."""
    app = create_app(async_llm, config or chatty())
    options = {"http": "h11", "ws": "none", "lifespan": "off", "log_level": "critical"}
    server = uvicorn.Server(uvicorn.Config(DirectWrites(app), port=0, **options))
    server.install_signal_handlers = lambda: None
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        threading.Event().wait(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def chatty(**options):
    return ServerConfig(chat_template=built_in_template("chatml"), **options)


@pytest.fixture(scope="module")
def url(async_llm):
    with serving(async_llm) as found:
        yield found


@pytest.fixture(scope="module")
def http(url):
    with httpx2.Client(base_url=url, timeout=30) as client:
        yield client


@pytest.fixture
def post(http):
    """Send JSON; return status and body."""

    def call(path, **body):
        response = http.post(path, json=body)
        return response.status_code, response.json()

    return call

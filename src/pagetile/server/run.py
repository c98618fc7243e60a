"""Runs the application under uvicorn, with a graceful shutdown.

::

    SIGTERM ──► /ready 503, new requests 503 ──► running ones finish (or time is up) ──► exit 0
    SIGTERM again ──► exit at once
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from ..engine.async_llm import AsyncLLM
from ..errors import RequestError
from .logs import log
from .streaming import DirectWrites

# Longer than clients and proxies keep idle connections: httpx 5 s, aiohttp 15 s, nginx and load
# balancers 60 s. A request sent just when the server closes its connection is lost.
KEEP_ALIVE_SECONDS = 75
SENDING_SECONDS = 0.1  # lets the last answers be sent
DEVICE_LOST = 3  # the exit code when the engine died


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handlers: they would close the port at once."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to ``serve``."""
        yield


async def serve(
    app: FastAPI,
    llm: AsyncLLM,
    *,
    host: str,
    port: int,
    drain_seconds: float = 30.0,
    on_start: Callable[[str], None] | None = None,
    background: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> int:
    """Serve an application until a signal ends it, or its engine dies.

    Args:
        app: The application of ``create_app``.
        llm: Its engine; closed at the end.
        host: Address to listen at.
        port: Port; 0 takes a free one.
        drain_seconds: How long running requests may still take after the first signal.
        on_start: Called with the URL when connections are accepted.
        background: Runs beside the server until it ends.

    Returns:
        The exit code: 0, or 3 if the engine died.

    Raises:
        RequestError: The address is not available.
    """
    listener = _listen(host, port)
    config = uvicorn.Config(
        DirectWrites(app),
        http="h11",  # it limits the size of headers, which httptools does not
        ws="none",
        lifespan="off",
        log_level="critical",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        h11_max_incomplete_event_size=64 << 10,
        backlog=2048,
        server_header=False,
    )
    server = _Server(config)
    loop = asyncio.get_running_loop()
    ending: list[asyncio.Task[None]] = []

    async def end(name: str) -> None:
        log.info("draining", signal=name, requests=llm.num_requests, seconds=drain_seconds)
        is_whole = await llm.drain(drain_seconds)
        log.info("drained" if is_whole else "aborted what was left")
        await asyncio.sleep(SENDING_SECONDS)
        server.should_exit = True

    def on_signal(number: int) -> None:
        if ending:
            server.should_exit = server.force_exit = True
        else:
            ending.append(loop.create_task(end(signal.Signals(number).name)))

    def on_death(error: BaseException) -> None:
        log.error("the engine has stopped", exc=error)

        def stop() -> None:
            # Health checks see the 503 before the process goes.
            loop.call_later(1.0, lambda: setattr(server, "should_exit", True))

        loop.call_soon_threadsafe(stop)

    llm.thread.on_death = on_death
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    beside: asyncio.Task[None] | None = None
    # Loaded objects stay alive. Without this a garbage collection takes tenths of a second, in
    # which all streams stall.
    gc.collect()
    gc.freeze()
    try:
        if on_start is not None:
            shown = f"[{host}]" if ":" in host else host
            on_start(f"http://{shown}:{listener.getsockname()[1]}")
        if background is not None:
            beside = loop.create_task(background())
        await server.serve(sockets=[listener])
    finally:
        gc.unfreeze()
        if beside is not None:
            beside.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        listener.close()
        died = llm.death is not None
        if not died:
            await llm.close()
            if server.force_exit:  # running requests have failed just now
                await asyncio.sleep(SENDING_SECONDS)
    return DEVICE_LOST if died else 0


def check_address(host: str, port: int) -> None:
    """Check that a server could listen at an address.

    Raises:
        RequestError: It could not.
    """
    _listen(host, port).close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with ExitStack() as on_failure:
            listener = on_failure.enter_context(socket.socket(family, kind, protocol))
            if os.name == "posix":
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
            listener.set_inheritable(False)
            on_failure.pop_all()
            return listener
    except OSError as error:
        option = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise RequestError(
            f"cannot listen at {host}:{port}: {error.strerror or error}; choose another {option}"
        ) from None

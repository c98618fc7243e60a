"""Responses that end when the client disconnects: server-sent events, and single answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

WRITE = "pagetile.write"
"""The extension of a scope that has ``DirectWrites``' function."""

Write = Callable[[bytes], bool]
"""Writes a chunk to the connection, or returns False if it cannot be written now."""

T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed its connection, or no longer reads."""


async def until_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``; cancel it when the client closes its connection.

    Raises:
        ClientGone: The client closed it.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_until_gone(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _end(task)
        await _end(watcher)


class DirectWrites:
    """Outermost application: lets an ``EventStream`` write its pieces to the connection itself.

    A message for ``send`` passes four wrappers and h11, which cost more than making it. Where the
    application does not run under uvicorn's h11, or the response is not chunked, pieces go through
    ``send``.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a connection."""
        cycle = getattr(send, "__self__", None)
        is_chunked = scope.get("http_version") == "1.1" and scope.get("method") != "HEAD"
        if isinstance(cycle, RequestResponseCycle) and is_chunked:
            scope.setdefault("extensions", {})[WRITE] = write_chunks(cycle)
        await self._app(scope, receive, send)


def write_chunks(cycle: RequestResponseCycle) -> Write:
    """Return a function that writes chunks to the connection of a uvicorn request."""

    def write(data: bytes) -> bool:
        """Write a chunk, unless the client reads too slowly."""
        if cycle.flow.write_paused or cycle.disconnected:
            return False
        if data:  # an empty chunk would end the body
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    return write


class EventStream(Response):
    """Sends the pieces of an iterator as they come.

    The status is sent with the first piece, so an error before it is an ordinary response. When
    the client disconnects, or takes longer than ``send_seconds`` to receive a piece, the iterator
    is cancelled.

    Args:
        pieces: The pieces of the body.
        send_seconds: See above.
        on_end: Called at the end in any case, even if the iterator was not started.
        on_start: Called when the status is sent, with a function that writes to the connection; not
            called where pieces cannot be written directly. The function may be called while the
            iterator waits, but not while one of its pieces is being sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        *,
        send_seconds: float,
        on_end: Callable[[], None] | None = None,
        on_start: Callable[[Write], None] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._pieces, self._send_seconds = pieces, send_seconds
        self._on_end, self._on_start = on_end, on_start
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response.

        Raises:
            ClientGone: The client did not receive all of it.
        """
        write = scope.get("extensions", {}).get(WRITE, _cannot_write)
        pump = asyncio.ensure_future(self._pump(send, write))
        watcher = asyncio.ensure_future(_until_gone(receive))
        try:
            # Poll for a stuck client: a timeout around every piece costs more than the piece.
            while not (pump.done() or watcher.done() or self._is_stuck()):
                await asyncio.wait(
                    {pump, watcher},
                    timeout=self._send_seconds / 4,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            if not pump.done():
                raise ClientGone
            pump.result()
        finally:
            await _end(pump)
            await _end(watcher)
            if self._on_end is not None:
                self._on_end()

    def _is_stuck(self) -> bool:
        since = self._sending_since
        return since is not None and time.monotonic() - since > self._send_seconds

    async def _pump(self, send: Send, write: Write) -> None:
        pieces, has_started = self._pieces, False
        try:
            async for piece in pieces:
                if not has_started:
                    has_started = True
                    await self._start(send, write)
                if write(piece):
                    continue
                self._sending_since = time.monotonic()
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                self._sending_since = None
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            close = getattr(pieces, "aclose", None)
            if close is not None:
                await close()

    async def _start(self, send: Send, write: Write) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        if self._on_start is not None and write is not _cannot_write:
            self._on_start(write)


def _cannot_write(data: bytes) -> bool:
    return False


async def _until_gone(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


async def _end(task: asyncio.Future[Any]) -> None:
    if not task.done():
        task.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await task

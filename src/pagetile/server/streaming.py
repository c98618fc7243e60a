"""Responses that notice when their client has gone: server-sent events, and single answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["ClientGone", "EventStream", "until_disconnected"]

T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed its connection; there is no client to answer."""


async def until_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client closes its connection.

    Raises:
        ClientGone: It did.
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


class EventStream(Response):
    """Sends what an iterator yields, as it comes.

    The status is sent with the first piece, so an error before it is an ordinary response. When
    the client goes, or takes longer than ``send_seconds`` to take a piece in, the iterator is
    cancelled where it stands.

    Args:
        pieces: Of the body.
        send_seconds: See above.
        on_end: Called at the end, whatever it is; also when the iterator was never begun.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        *,
        send_seconds: float,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._pieces, self._send_seconds, self._on_end = pieces, send_seconds, on_end
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        pump = asyncio.ensure_future(self._pump(send))
        watcher = asyncio.ensure_future(_until_gone(receive))
        try:
            # One look now and then: a timeout around every piece costs more than the piece.
            while not (pump.done() or watcher.done() or self._is_stuck()):
                await asyncio.wait(
                    {pump, watcher},
                    timeout=self._send_seconds / 4,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            if pump.done():
                pump.result()
        finally:
            await _end(pump)
            await _end(watcher)
            if self._on_end is not None:
                self._on_end()

    def _is_stuck(self) -> bool:
        since = self._sending_since
        return since is not None and time.monotonic() - since > self._send_seconds

    async def _pump(self, send: Send) -> None:
        pieces, has_started = self._pieces, False
        try:
            async for piece in pieces:
                if not has_started:
                    has_started = True
                    await send(
                        {
                            "type": "http.response.start",
                            "status": self.status_code,
                            "headers": self.raw_headers,
                        }
                    )
                self._sending_since = time.monotonic()
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                self._sending_since = None
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            close = getattr(pieces, "aclose", None)
            if close is not None:
                await close()


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

"""A client of streamed completions, in a process of its own, that stores each read and its time.

The process that compares servers writes a ``Load`` into a file, starts this module and reads the
``Response`` of each request from another one. Nothing is parsed before the last response has ended,
so that a read costs the client some microseconds, and no torch is imported.

::

    http_latency ── load ──▶ python -m benchmarks.http_client ══ requests ══▶ server
                 ◀─ responses ─┘            stores (time, bytes) of each read ◀══
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_KILL_SECONDS = 10.0


@dataclass(frozen=True)
class Load:
    """Requests, and when they are sent.

    Attributes:
        address: Host and port.
        requests: HTTP requests, each of which says ``Connection: close``.
        due: Open loop: when each is sent, in ascending seconds, whether others have ended or not.
        num_streams: Closed loop, without ``due``: so many at a time, the next as soon as one ends.
        seconds: Closed loop: no request is sent later.
        timeout: Seconds after which a response that has not ended is aborted.
    """

    address: tuple[str, int]
    requests: Sequence[bytes]
    due: Sequence[float] | None = None
    num_streams: int = 1
    seconds: float = math.inf
    timeout: float = 60.0

    @property
    def longest(self) -> float:
        """Seconds after which ``drive`` has ended in any case."""
        last = self.due[-1] if self.due else min(self.seconds, len(self.requests) * self.timeout)
        return last + self.timeout


@dataclass
class Response:
    """A response as it arrived.

    Attributes:
        index: Index of its request.
        due: When it should be sent, in seconds of ``time.perf_counter``.
        sent: When its connection was opened.
        pieces: What each read returned, and when.
        error: Why the exchange ended before the server ended it.
    """

    index: int
    due: float
    sent: float = 0.0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    error: str | None = None

    @property
    def failure(self) -> str | None:
        """What is wrong with it, briefly, so that equal failures can be counted."""
        if self.error is not None:
            return self.error
        raw = b"".join(data for _, data in self.pieces)
        status = re.match(rb"HTTP/1\.1 (\d+)", raw)
        if status is None:
            return "no response"
        if status[1] != b"200":
            return f"status {status[1].decode()}"
        if any("error" in event for _, event in self.events):
            return "an error in the stream"
        if not self.num_tokens:
            return "the stream broke off"
        return None

    @property
    def num_tokens(self) -> int:
        """New tokens as the server counts them; 0 if the stream did not end."""
        counts = [event["usage"]["completion_tokens"] for _, event in self.events if _usage(event)]
        return int(counts[-1]) if counts else 0

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(_text(event) for _, event in self.events)

    @property
    def times(self) -> list[float]:
        """When each event with text was complete."""
        return [at for at, event in self.events if _text(event)]

    @property
    def events(self) -> list[tuple[float, dict[str, Any]]]:
        """Server-sent events that are JSON objects, and when their last byte arrived."""
        if self._events is None:
            self._events = list(_events(self.pieces))
        return self._events

    _events: list[tuple[float, dict[str, Any]]] | None = None


def post(path: str, fields: dict[str, Any]) -> bytes:
    """An HTTP request with a JSON body."""
    body = json.dumps(fields).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


# --- parsing the stored reads ------------------------------------------------------------------


def _usage(event: dict[str, Any]) -> bool:
    return bool(event.get("usage"))


def _text(event: dict[str, Any]) -> str:
    return "".join(choice.get("text") or "" for choice in event.get("choices", ()))


def _events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    raw = b"".join(data for _, data in pieces)
    ends = list(itertools.accumulate(len(data) for _, data in pieces))  # of each piece, in ``raw``
    head, found, _ = raw.partition(b"\r\n\r\n")
    if not found:
        return
    is_chunked = b"transfer-encoding: chunked" in head.lower()
    body, places = _unchunk(raw, len(head) + 4, is_chunked)
    for match in re.finditer(rb"data: (\{.*?\})\r?\n\r?\n", body, re.DOTALL):
        last = match.end() - 1
        chunk = bisect_left(places, (last + 1, 0)) - 1 if is_chunked else 0
        start_of_chunk, place = places[chunk]
        at = pieces[bisect_left(ends, place + last - start_of_chunk + 1)][0]
        with contextlib.suppress(json.JSONDecodeError):
            yield at, json.loads(match[1])


def _unchunk(raw: bytes, start: int, is_chunked: bool) -> tuple[bytes, list[tuple[int, int]]]:
    """The body without incomplete chunks, and where each chunk begins in it and in ``raw``."""
    if not is_chunked:
        return raw[start:], [(0, start)]
    parts, places, length = [], [], 0
    while (end := raw.find(b"\r\n", start)) >= 0:
        size = int(raw[start:end].partition(b";")[0] or b"0", 16)
        part = raw[end + 2 : end + 2 + size]
        if not size or len(part) < size:
            break
        places.append((length, end + 2))
        parts.append(part)
        length += size
        start = end + 2 + size + 2
    return b"".join(parts), places


# --- the client ---------------------------------------------------------------------------------


class _Reader(asyncio.Protocol):
    """Stores each read of one connection with its time."""

    def __init__(self, response: Response) -> None:
        self._pieces = response.pieces
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.ended.done():
            return
        if exc is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(exc)


async def _exchange(load: Load, response: Response) -> None:
    loop = asyncio.get_running_loop()
    response.sent = time.perf_counter()
    transport, reader = await loop.create_connection(lambda: _Reader(response), *load.address)
    try:
        transport.write(load.requests[response.index])
        await reader.ended
    finally:
        transport.abort()


async def _send(load: Load, response: Response) -> None:
    try:
        await asyncio.wait_for(_exchange(load, response), load.timeout)
    except asyncio.TimeoutError:
        response.error = f"no end within {load.timeout:g} s"
    except OSError as error:
        response.error = type(error).__name__


async def _open_loop(load: Load, due: Sequence[float]) -> list[Response]:
    start = time.perf_counter()
    responses = [Response(index, start + at) for index, at in enumerate(due)]
    tasks = []
    for response in responses:
        await asyncio.sleep(max(0.0, response.due - time.perf_counter()))
        tasks.append(asyncio.create_task(_send(load, response)))
    await asyncio.gather(*tasks)
    return responses


async def _closed_loop(load: Load) -> list[Response]:
    start, responses = time.perf_counter(), []
    indices = iter(range(len(load.requests)))

    async def stream() -> None:
        for index in indices:
            now = time.perf_counter()
            if now - start >= load.seconds:
                return
            responses.append(Response(index, now))
            await _send(load, responses[-1])

    await asyncio.gather(*(stream() for _ in range(load.num_streams)))
    return responses


def drive(load: Load) -> list[Response]:
    """Send the requests from this process and read the responses to their ends."""
    loop = _closed_loop(load) if load.due is None else _open_loop(load, load.due)
    return asyncio.run(loop)


def run(load: Load) -> list[Response]:
    """``drive`` in a process of its own, which is ended with this call in any case.

    Raises:
        RuntimeError: It failed, or did not end in its time.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("load", "responses")]
        files[0].write_bytes(pickle.dumps(load))
        command = [sys.executable, "-m", __name__, *map(str, files)]
        with subprocess.Popen(command, cwd=Path(__file__).parent.parent) as process:
            try:
                code = process.wait(load.longest + _KILL_SECONDS)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"the client did not end in {load.longest:.0f} s") from None
            finally:
                process.kill()
        if code:
            raise RuntimeError(f"the client failed with code {code}: see above")
        responses: list[Response] = pickle.loads(files[1].read_bytes())
        return responses


def _main(load: str, responses: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    found = drive(pickle.loads(Path(load).read_bytes()))
    Path(responses).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    from benchmarks import http_client  # so that pickles name the module and not __main__

    http_client._main(*sys.argv[1:])

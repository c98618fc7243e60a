"""CPU microseconds a streamed token, by part: ``python -m benchmarks.http_parts``.

Each part runs alone on one thread, without an engine: 256 streams over TCP on the loopback, a token
a step. Received bytes are read between the steps, and that is not timed.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pagetile import SamplingParams
from pagetile.engine.detokenizer import Detokenizer
from pagetile.engine.engine_thread import Mailbox, News
from pagetile.engine.outputs import Delta
from pagetile.engine.request_stream import RequestStream
from pagetile.engine.text_decoder import TextDecoder
from pagetile.server.generation import TextEvents, server_sent_events, write_text
from pagetile.server.streaming import WRITE, EventStream, Write, write_chunks

from .http_n import make_byte_tokenizer

NUM_STREAMS = 256
NUM_STEPS = 200
NUM_CALLS = 100_000
TEXT = " word"
HEAD = {"id": f"cmpl-{24 * '0'}", "object": "text_completion", "created": 10**9, "model": "name"}


def _event(index: int, text: str) -> dict[str, Any]:
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
    return {**HEAD, "choices": [choice]}


class _Connections:
    """Both ends of TCP connections; the sending ends belong to the running loop."""

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self.transports: list[asyncio.Transport] = []
        self._ends = []
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for _ in range(NUM_STREAMS):
                client = socket.create_connection(listener.getsockname())
                end, _ = listener.accept()
                for each in (client, end):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    each.setblocking(False)
                transport, _ = await loop.create_connection(asyncio.Protocol, sock=client)
                self.transports.append(transport)
                self._ends.append(end)

    def empty(self) -> int:
        """Read all that has arrived; return the number of bytes."""
        num_bytes = 0
        for end in self._ends:
            try:
                while data := end.recv(1 << 16):
                    num_bytes += len(data)
            except BlockingIOError:
                pass
        return num_bytes

    def writes(self) -> list[Write]:
        """Functions that write, as ``DirectWrites`` makes them."""
        flow = SimpleNamespace(write_paused=False)
        cycles: list[Any] = [
            SimpleNamespace(flow=flow, disconnected=False, transport=transport)
            for transport in self.transports
        ]
        return [write_chunks(cycle) for cycle in cycles]

    def close(self) -> None:
        """Close both ends."""
        for transport, end in zip(self.transports, self._ends, strict=True):
            transport.abort()
            end.close()


def _streams() -> list[RequestStream]:
    return [
        RequestStream(
            str(number),
            None,
            (1,),
            SamplingParams(),
            is_streamed=True,
            generates=True,
            on_close=lambda stream: None,
        )
        for number in range(NUM_STREAMS)
    ]


async def _time_steps(streams: list[RequestStream], after: Callable[[], object]) -> float:
    """CPU microseconds a token from the mailbox on, including the tasks that it wakes."""
    mailbox = Mailbox(asyncio.get_running_loop())
    found = []
    for _ in range(NUM_STEPS):
        news: list[News] = [
            (stream, [Delta(stream.request_id, 0, TEXT, 5, None)], None, 0.0) for stream in streams
        ]
        start = time.process_time()
        mailbox.post(news)
        for _ in range(4):  # the delivery, the tasks that it wakes, and what they wake
            await asyncio.sleep(0)
        found.append(time.process_time() - start)
        after()
    return 1e6 * statistics.median(found) / len(streams)


async def _past_tasks(connections: _Connections, *, writes: bool) -> float:
    """Write text events directly where their deltas are delivered."""
    streams, events = _streams(), TextEvents(_event, 1)
    directly = connections.writes() if writes else [lambda data: True] * NUM_STREAMS
    for stream, write in zip(streams, directly, strict=True):
        write_text(stream, events, write)
    tasks = [asyncio.ensure_future(stream.take()) for stream in streams]
    await asyncio.sleep(0)
    found = await _time_steps(streams, connections.empty)
    for task in tasks:
        task.cancel()
    return found


async def _by_tasks(connections: _Connections) -> float:
    """Write them in each stream's task: its iterator and the loop that sends its pieces."""
    streams, events = _streams(), TextEvents(_event, 1)
    request: Any = SimpleNamespace(state=SimpleNamespace(log={}))

    async def send(message: Any) -> None:
        pass

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def respond(stream: RequestStream, write: Write) -> None:
        pieces = server_sent_events(
            request, [stream], lambda _, deltas: events.encode(deltas) or b"", None
        )
        scope = {"type": "http", "extensions": {WRITE: write}}
        await EventStream(pieces, send_seconds=30)(scope, receive, send)

    tasks = [
        asyncio.ensure_future(respond(stream, write))
        for stream, write in zip(streams, connections.writes(), strict=True)
    ]
    for _ in range(3):
        await asyncio.sleep(0)
    found = await _time_steps(streams, connections.empty)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return found


def _sends(connections: _Connections) -> float:
    """Only the system calls."""
    data = b"%x\r\n%b\r\n" % (200, b"x" * 200)
    files = [transport.get_extra_info("socket").fileno() for transport in connections.transports]
    sockets = [socket.socket(fileno=os.dup(file)) for file in files]
    found = []
    for _ in range(NUM_STEPS):
        start = time.process_time()
        for each in sockets:
            each.send(data)
        found.append(time.process_time() - start)
        connections.empty()
    for each in sockets:
        each.close()
    return 1e6 * statistics.median(found) / NUM_STREAMS


def _repeat(call: Callable[[], Any]) -> float:
    start = time.process_time()
    for _ in range(NUM_CALLS):
        call()
    return 1e6 * (time.process_time() - start) / NUM_CALLS


async def measure() -> dict[str, float]:
    """CPU microseconds a token of each part."""
    connections = _Connections()
    await connections.open()
    detokenizer = Detokenizer(TextDecoder(make_byte_tokenizer(1000)), SamplingParams())
    events, deltas = TextEvents(_event, 1), [Delta("0", 0, TEXT, 5, None)]
    try:
        return {
            "text of a token": _repeat(lambda: detokenizer.append([500])),
            "delta": _repeat(lambda: Delta("0", 0, TEXT, 5, None)),
            "event": _repeat(lambda: events.encode(deltas)),
            "event by json.dumps": _repeat(lambda: json.dumps(_event(0, TEXT)).encode()),
            "delivery and event": await _past_tasks(connections, writes=False),
            "system call": _sends(connections),
            "delivery, event and write": await _past_tasks(connections, writes=True),
            "the same by a task": await _by_tasks(connections),
        }
    finally:
        connections.close()


if __name__ == "__main__":
    about = f"CPU us a streamed token by part, {NUM_STREAMS} streams"
    print(json.dumps({"what": "parts", "about": about, **asyncio.run(measure())}))

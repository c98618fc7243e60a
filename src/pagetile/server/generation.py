"""Shared by the generating routes: usage, results of several prompts, and streams.

A stream of server-sent events takes one of two ways::

    deltas of a step ──► RequestStream.on_deltas ──► TextEvents ──► connection     text only
                    └──► RequestStream.take ──► a completion's encode ──► pieces   everything else

The first needs no switch of tasks, and encodes only the text as JSON.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as to_json
from typing import Any

from starlette.requests import Request

from ..engine.outputs import Delta, RequestOutput
from ..engine.request_stream import RequestStream
from .errors import to_api_error
from .logs import log
from .streaming import Write


@dataclass
class Usage:
    """Token counts of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, output: RequestOutput) -> None:
        """Count one prompt and its samples."""
        self.prompt_tokens += len(output.prompt_token_ids)
        self.completion_tokens += sum(len(sample.token_ids) for sample in output.outputs)
        self.cached_tokens += output.num_cached_tokens

    def report(self) -> dict[str, Any]:
        """Return the ``usage`` of a response."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


async def results(streams: Sequence[RequestStream]) -> list[RequestOutput]:
    """Wait for all outputs; if one fails or the task is cancelled, abort all."""
    try:
        return [await stream.result() for stream in streams]
    finally:
        close_all(streams)


async def merged(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, list[Delta]]]:
    """Yield the deltas of several prompts as they come, with the number of their prompt."""
    if len(streams) == 1:
        while deltas := await streams[0].take():
            yield 0, deltas
        return
    tasks = {asyncio.ensure_future(stream.take()): number for number, stream in enumerate(streams)}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = tasks.pop(task)
                if deltas := task.result():
                    tasks[asyncio.ensure_future(streams[number].take())] = number
                    yield number, deltas
    finally:
        for task in tasks:
            task.cancel()


def close_all(streams: Sequence[RequestStream]) -> None:
    """Abort the requests that still run."""
    for stream in streams:
        stream.close()


# --- server-sent events ---------------------------------------------------------------------


@dataclass(slots=True)
class Added:
    """One delta of a sample, or several joined."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or token that ended the sample, if one did."""


def join(deltas: Sequence[Delta]) -> list[Added]:
    """Join the deltas of each sample."""
    found: dict[int, Added] = {}
    for delta in deltas:
        added = found.get(delta.index)
        if added is None:
            added = found[delta.index] = Added(delta.index)
        added.text += delta.text
        if delta.token_id is not None:
            added.token_ids.append(delta.token_id)
        added.finish_reason, added.stop_reason = delta.finish_reason, delta.stop_reason
    return list(found.values())


def event_of(data: dict[str, Any]) -> str:
    """Encode a server-sent event."""
    return f"data: {json.dumps(data)}\n\n"


class TextEvents:
    r"""Encodes events in which only the text changes; everything else is encoded once.

    ``json.dumps`` of a whole event takes ten times as long.

    Args:
        make: Returns the whole event, for ``json.dumps``, from a sample's number and a text.
        num_samples: Number of samples.

    Examples:
        >>> events = TextEvents(lambda index, text: {"index": index, "text": text}, 1)
        >>> events.of(0, '"')
        'data: {"index": 0, "text": "\\""}\n\n'
    """

    _MARK = "\0text\0"

    def __init__(self, make: Callable[[int, str], dict[str, Any]], num_samples: int) -> None:
        self._around: list[tuple[str, str]] = []
        for index in range(num_samples):
            before, _, after = event_of(make(index, self._MARK)).rpartition(to_json(self._MARK))
            self._around.append((before, after))

    def of(self, index: int, text: str) -> str:
        """Return the event that adds a text to a sample."""
        before, after = self._around[index]
        return f"{before}{to_json(text)}{after}"

    def encode(self, deltas: Sequence[Delta]) -> bytes | None:
        """Return the events of deltas, one a sample; ``None`` if one of them ends its sample."""
        if len(deltas) == 1:
            [delta] = deltas
            if delta.finish_reason is not None:
                return None
            return self.of(delta.index, delta.text).encode() if delta.text else b""
        added = join(deltas)
        if any(each.finish_reason is not None for each in added):
            return None
        return "".join(self.of(each.index, each.text) for each in added if each.text).encode()


def write_text(stream: RequestStream, events: TextEvents | None, write: Write) -> None:
    """Write deltas that only add text to the connection as soon as they arrive.

    Args:
        stream: The stream; its reader encodes all other deltas.
        events: Encodes the deltas; ``None``: this request's events have more than text.
        write: Writes to the connection.
    """
    if events is None:
        return
    encode = events.encode

    def on_deltas(deltas: list[Delta]) -> bool:
        data = encode(deltas)
        return data is not None and write(data)

    stream.on_deltas = on_deltas


async def server_sent_events(
    request: Request,
    streams: Sequence[RequestStream],
    encode: Callable[[int, list[Delta]], bytes],
    usage_event: Callable[[Usage], str] | None,
) -> AsyncIterator[bytes]:
    """Yield the body of a streamed response; close the streams at its end.

    Args:
        request: The request; its usage is logged if the streams end.
        streams: One for each prompt.
        encode: Returns events, or ``b""``, from a prompt's number and deltas.
        usage_event: Returns the last event, from the usage; ``None``: there is none.

    Raises:
        Exception: A stream's error, if nothing was sent yet; later errors become events.
    """
    has_begun, usage = False, Usage()
    try:
        async for number, deltas in merged(streams):
            if data := encode(number, deltas):
                has_begun = True
                yield data
        for stream in streams:
            usage.add(await stream.result())
        note_usage(request, usage)
        if usage_event is not None:
            yield usage_event(usage).encode()
        yield b"data: [DONE]\n\n"
    except Exception as error:
        if not has_begun:
            raise
        log.error("stream failed", request=request.scope, exc=error)
        yield f"{event_of(to_api_error(error).body)}data: [DONE]\n\n".encode()
    finally:
        close_all(streams)


def note_usage(request: Request, usage: Usage) -> None:
    """Add a request's token counts to its log line."""
    request.state.log.update(tokens_in=usage.prompt_tokens, tokens_out=usage.completion_tokens)

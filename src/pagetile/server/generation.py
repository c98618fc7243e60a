"""What the generating routes share: usage, results of several prompts, their merged streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from ..engine.output_processor import Delta
from ..engine.request import RequestOutput
from ..engine.request_stream import RequestStream
from .errors import to_api_error
from .logs import log

__all__ = ["Usage", "close_all", "error_event", "merged", "note_usage", "results"]


@dataclass
class Usage:
    """Tokens of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, output: RequestOutput) -> None:
        """Count one prompt and its samples."""
        self.prompt_tokens += len(output.prompt_token_ids)
        self.completion_tokens += sum(len(sample.token_ids) for sample in output.outputs)
        self.cached_tokens += output.num_cached_tokens

    def report(self) -> dict[str, Any]:
        """The ``usage`` of a response."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


async def results(streams: Sequence[RequestStream]) -> list[RequestOutput]:
    """The outputs of all; if one fails or the task is cancelled, all are aborted."""
    try:
        return [await stream.result() for stream in streams]
    finally:
        close_all(streams)


async def merged(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, list[Delta]]]:
    """Deltas of several prompts as they come, each with the number of its prompt."""
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
    """Abort those that still run."""
    for stream in streams:
        stream.close()


def error_event(error: Exception, request: Request) -> bytes:
    """What ends a stream that fails after it has begun."""
    found = to_api_error(error)
    log.error("stream failed", request=request.scope, exc=error)
    return f"data: {json.dumps(found.body)}\n\ndata: [DONE]\n\n".encode()


def note_usage(request: Request, usage: Usage) -> None:
    """Put the tokens of a request into its line of the log."""
    request.state.log.update(tokens_in=usage.prompt_tokens, tokens_out=usage.completion_tokens)

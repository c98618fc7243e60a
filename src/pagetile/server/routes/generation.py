"""The paths that generate: completions, chat completions and responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from ..body import described, read_body
from ..chat_completion import ChatCompletion
from ..completion import Completion
from ..model_response import ModelResponse
from ..schemas.chat import ChatRequest
from ..schemas.completions import CompletionRequest
from ..schemas.responses import ResponsesRequest
from ..state import server_of
from ..streaming import EventStream, Write, until_disconnected

router = APIRouter()


@router.post("/v1/completions", **described(CompletionRequest, streams=True))
async def create_completion(
    request: Request, body: Annotated[CompletionRequest, Depends(read_body(CompletionRequest))]
) -> Response:
    """Continue one or more prompts."""
    completion = await Completion.start(request, body)
    return await _respond(request, completion, streams=body.stream, on_start=completion.write_text)


@router.post("/v1/chat/completions", **described(ChatRequest, streams=True))
async def create_chat_completion(
    request: Request, body: Annotated[ChatRequest, Depends(read_body(ChatRequest))]
) -> Response:
    """Answer a conversation."""
    completion = await ChatCompletion.start(request, body)
    return await _respond(request, completion, streams=body.stream, on_start=completion.write_text)


@router.post("/v1/responses", **described(ResponsesRequest, streams=True))
async def create_response(
    request: Request, body: Annotated[ResponsesRequest, Depends(read_body(ResponsesRequest))]
) -> Response:
    """Answer a text or a conversation."""
    response = await ModelResponse.start(request, body)
    return await _respond(request, response, streams=body.stream)


async def _respond(
    request: Request,
    work: Completion | ChatCompletion | ModelResponse,
    *,
    streams: bool | None,
    on_start: Callable[[Write], None] | None = None,
) -> Response:
    """Return the answer in one piece or as events; abort what still runs when it ends."""
    if streams:
        seconds = server_of(request).limits.send_seconds
        return EventStream(
            work.events(), send_seconds=seconds, on_end=work.close, on_start=on_start
        )
    try:
        return JSONResponse(await until_disconnected(request, work.answer()))
    finally:
        work.close()

"""``/v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from ..body import described, read_body
from ..chat_completion import ChatCompletion
from ..schemas.chat import ChatRequest
from ..streaming import EventStream, until_disconnected

__all__ = ["router"]

router = APIRouter()
Body = Annotated[ChatRequest, Depends(read_body(ChatRequest))]


@router.post("/v1/chat/completions", **described(ChatRequest, streams=True))
async def create_chat_completion(request: Request, body: Body) -> Response:
    """Answer a conversation."""
    completion = await ChatCompletion.start(request, body)
    if body.stream:
        return EventStream(
            completion.events(),
            send_seconds=completion.server.limits.send_seconds,
            on_end=completion.stream.close,
            on_start=completion.write_text,
        )
    try:
        return JSONResponse(await until_disconnected(request, completion.answer()))
    finally:
        completion.stream.close()

"""``/v1/completions``."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from ..body import described, read_body
from ..completion import Completion
from ..schemas.completions import CompletionRequest
from ..streaming import EventStream, until_disconnected

__all__ = ["router"]

router = APIRouter()
Body = Annotated[CompletionRequest, Depends(read_body(CompletionRequest))]


@router.post("/v1/completions", **described(CompletionRequest, streams=True))
async def create_completion(request: Request, body: Body) -> Response:
    """Continue one or more prompts."""
    completion = await Completion.start(request, body)
    if body.stream:
        return EventStream(
            completion.events(),
            send_seconds=completion.server.limits.send_seconds,
            on_end=completion.close,
            on_start=completion.write_text,
        )
    try:
        return JSONResponse(await until_disconnected(request, completion.answer()))
    finally:
        completion.close()

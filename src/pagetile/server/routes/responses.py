"""``/v1/responses``."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from ..body import described, read_body
from ..model_response import ModelResponse
from ..schemas.responses import ResponsesRequest
from ..streaming import EventStream, until_disconnected

__all__ = ["router"]

router = APIRouter()
Body = Annotated[ResponsesRequest, Depends(read_body(ResponsesRequest))]


@router.post("/v1/responses", **described(ResponsesRequest, streams=True))
async def create_response(request: Request, body: Body) -> Response:
    """Answer a text or a conversation."""
    response = await ModelResponse.start(request, body)
    completion = response.completion
    if body.stream:
        return EventStream(
            response.events(),
            send_seconds=completion.server.limits.send_seconds,
            on_end=completion.stream.close,
        )
    try:
        return JSONResponse(await until_disconnected(request, response.answer()))
    finally:
        completion.stream.close()

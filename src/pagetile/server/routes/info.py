"""Models, health, version and metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from ...version import find_version
from ..body import described
from ..errors import ApiError
from ..state import Server, server_of

router = APIRouter()


def _model(server: Server, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "pagetile",
        "root": server.model_name,
        "parent": None,
        "max_model_len": server.max_model_len,
    }


@router.get("/v1/models", **described())
async def list_models(request: Request) -> dict[str, Any]:
    """The names that requests may use for the model."""
    server = server_of(request)
    return {"object": "list", "data": [_model(server, n) for n in server.config.model_names]}


@router.get("/v1/models/{name:path}", **described())
async def get_model(request: Request, name: str) -> dict[str, Any]:
    """One of the names."""
    server = server_of(request)
    server.check_model(name)
    return _model(server, name)


@router.head("/health", include_in_schema=False)  # load balancers ask so
@router.get("/health", **described(is_open=True))
async def health(request: Request) -> Response:
    """200 while requests can be served; 503 when the engine has stopped."""
    llm = server_of(request).llm
    if llm.is_alive:
        return JSONResponse({"status": "ok"})
    error = ApiError(503, f"the engine has stopped: {llm.death or 'it was closed'}")
    return error.response()


@router.head("/ready", include_in_schema=False)
@router.get("/ready", **described())
async def ready(request: Request) -> Response:
    """200 while new requests are accepted; 503 while the queue is full, or at shutdown."""
    server_of(request).llm.check_capacity(1)
    return JSONResponse({"status": "ready"})


@router.get("/version", **described())
async def get_version() -> dict[str, str]:
    """The version of this server."""
    return {"version": find_version()}


@router.get("/metrics", **described(), response_class=Response)
async def metrics(request: Request) -> Response:
    """Counts and times, for Prometheus."""
    body = await server_of(request).metrics.render()
    return Response(body, media_type=CONTENT_TYPE_LATEST)

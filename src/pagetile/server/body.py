"""Reading and validating a request's body, and describing it to OpenAPI."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.requests import ClientDisconnect, Request

from .errors import ApiError, ErrorBody, from_validation
from .state import server_of

M = TypeVar("M", bound=BaseModel)

_LARGE = 32 << 10  # bytes; larger bodies are parsed on a thread
_REFERENCE = "#/components/schemas/{model}"
_FAILURES = {
    400: "The request cannot be served as it stands; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "The model or path is unknown.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    431: "The headers are too large.",
    500: "The request failed while it was computed.",
    503: "Too many requests, or the server is shutting down: try again after `Retry-After`.",
}


def read_body(model: type[M]) -> Callable[[Request], Coroutine[Any, Any, M]]:
    """Return a FastAPI dependency that reads and validates a route's body."""

    async def read(request: Request) -> M:
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip()
        if kind.lower() != "application/json":
            hint = "application/json (curl -H 'Content-Type: application/json')"
            raise ApiError(415, f"content-type is {kind!r}, expected {hint}")
        limits = server_of(request).limits
        try:
            body = await asyncio.wait_for(request.body(), limits.body_seconds)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body did not come within {limits.body_seconds:g} s") from None
        except ClientDisconnect:
            raise ApiError(400, "the connection was closed before the body had come") from None
        try:
            if len(body) > _LARGE:
                return await asyncio.to_thread(model.model_validate_json, body)
            return model.model_validate_json(body)
        except ValidationError as error:
            raise from_validation(error, model, body) from None

    return read


def described(
    body: type[BaseModel] | None = None, *, streams: bool = False, is_open: bool = False
) -> dict[str, Any]:
    """Return keyword arguments for a route: how OpenAPI describes its body and its errors.

    Args:
        body: The model of the body.
        streams: Whether it can answer with server-sent events.
        is_open: Whether it needs no API key.
    """
    statuses = dict(_FAILURES)
    if body is None:
        statuses = {s: statuses[s] for s in (401, 404, 431, 503)}
    if is_open:
        del statuses[401]
    responses: dict[int | str, dict[str, Any]] = {
        status: {"description": text, "model": ErrorBody} for status, text in statuses.items()
    }
    if streams:
        responses[200] = {
            "description": "The answer; with `stream`, chunks of it as server-sent events.",
            "content": {"application/json": {}, "text/event-stream": {}},
        }
    options: dict[str, Any] = {"responses": responses}
    if is_open:
        options["openapi_extra"] = {"security": []}
    if body is not None:
        reference = {"$ref": _REFERENCE.format(model=body.__name__)}
        content = {"application/json": {"schema": reference}}
        options["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
    return options


def add_openapi(app: FastAPI, bodies: list[type[BaseModel]], *, needs_key: bool) -> None:
    """Add the bodies that ``read_body`` reads to the application's OpenAPI document."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes,
                                   description=app.description)  # fmt: skip
            _, definitions = models_json_schema(
                [(body, "validation") for body in bodies], ref_template=_REFERENCE
            )
            components = document.setdefault("components", {})
            components.setdefault("schemas", {}).update(definitions["$defs"])
            if needs_key:
                scheme = {"type": "http", "scheme": "bearer"}
                components["securitySchemes"] = {"key": scheme}
                document["security"] = [{"key": []}]
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]

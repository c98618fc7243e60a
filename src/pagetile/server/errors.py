"""Errors as the OpenAI API reports them: a status, and ``{"error": {"message": …}}``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from ..errors import (
    EngineDeadError,
    GenerationError,
    NoTokenLeftError,
    OverloadedError,
    RequestError,
)
from .logs import log

RETRY_AFTER = "1"  # seconds
_KINDS = {401: "authentication_error", 404: "not_found_error", 503: "service_unavailable_error"}


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    code: int | str | None = None


class ErrorBody(BaseModel):
    """The body of every response that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """A response other than a success.

    Args:
        status: HTTP status.
        message: What was given, what is expected, and what to do.
        param: The wrong field.
        code: Machine-readable error code.
        headers: Headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        other = "invalid_request_error" if self.status < 500 else "internal_server_error"
        detail = {"message": self.message, "type": _KINDS.get(self.status, other)}
        return {"error": {**detail, "param": self.param, "code": self.code or self.status}}

    def response(self) -> JSONResponse:
        """The whole response."""
        return JSONResponse(self.body, self.status, self.headers)


def field_error(param: str, message: str) -> ApiError:
    """Return a 400 that names the wrong field."""
    return ApiError(400, message, param=param)


def to_api_error(error: Exception) -> ApiError:
    """Convert an error of the engine, or any other, to a response."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error))
    if isinstance(error, OverloadedError):
        return ApiError(503, str(error), code="overloaded", headers={"Retry-After": RETRY_AFTER})
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_dead")
    if isinstance(error, NoTokenLeftError):
        return ApiError(400, str(error), code="no_token_left")
    if isinstance(error, GenerationError):
        return ApiError(500, str(error), code="generation_failed")
    if isinstance(error, HTTPException):
        message = str(error.detail)
        return ApiError(error.status_code, message, headers=error.headers)
    return ApiError(500, f"internal error: {type(error).__name__}", code="internal_error")


def from_validation(error: ValidationError, model: type[BaseModel]) -> ApiError:
    """Return a 400 that names the first wrong field, and for an unknown one the nearest known."""
    first = error.errors(include_url=False, include_input=False)[0]
    # The first part is always a field, even if its name is also that of a type ("text").
    loc = first["loc"]
    path = ".".join(str(part) for part in (*loc[:1], *filter(_is_field, loc[1:])))
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', '')}")
    message = f"{path}: {first['msg']}" if path else str(first["msg"])
    if first["loc"][-2:] == ("content", "str"):
        message = f"{path}: expected a string, or a list of text parts: {_TEXT_PART}"
    if first["type"] == "extra_forbidden":
        message = f"{path} is not a field of this request"
        if len(first["loc"]) == 1:
            message += _nearest(str(first["loc"][0]), model.model_fields)
    return ApiError(400, message, param=path or None)


def _is_field(part: int | str) -> bool:
    """Return whether a part of a location is a field, and not a member of a union of types."""
    return isinstance(part, int) or (not any(c in part for c in "[(-") and part not in _TYPES)


_TEXT_PART = '{"type": "text", "text": "..."}'
_TYPES = {"str", "int", "float", "bool", "dict", "none", "text", "function", "named"}


# Fields of earlier APIs of vLLM and OpenAI.
_RENAMED = {
    **{f"guided_{form}": f"structured_outputs.{form}" for form in ("json", "regex", "choice")},
    "guided_grammar": "structured_outputs.grammar",
    "functions": "tools",
    "function_call": "tool_choice",
}


def _nearest(name: str, known: Iterable[str]) -> str:
    renamed = _RENAMED.get(name)
    if renamed is not None and renamed.partition(".")[0] in known:
        return f": did you mean {renamed}?"
    close = difflib.get_close_matches(name, known, 1)
    return f": did you mean {close[0]}?" if close else ""


def add_handlers(app: FastAPI) -> None:
    """Report every error in OpenAI's form."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        found = to_api_error(error)
        if found.status >= 500 and found.code != "overloaded":
            log.error("request failed", request=request.scope, exc=error)
        return found.response()

    async def name_path(request: Request, error: Exception) -> JSONResponse:
        found = to_api_error(error)
        if found.status in (404, 405):
            hint = "no such path; /docs lists all, /pages shows the cache"
            if found.status == 405:
                hint = f"expected {found.headers.get('Allow', 'another method')}"
            message = f"{request.method} {request.url.path}: {hint}"
            return ApiError(found.status, message, headers=found.headers).response()
        return await handle(request, error)

    for kind in (ApiError, RequestError, OverloadedError, EngineDeadError, GenerationError):
        app.add_exception_handler(kind, handle)
    app.add_exception_handler(HTTPException, name_path)

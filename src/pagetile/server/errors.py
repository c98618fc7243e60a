"""Errors as the OpenAI API reports them: a status, and ``{"error": {"message": …}}``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.exceptions import HTTPException

from ..engine.sampling_params import SamplingParams
from ..errors import (
    EngineDeadError,
    GenerationError,
    NoTokenLeftError,
    OverloadedError,
    RequestError,
)
from .logs import log

RETRY_AFTER = "1"  # seconds
_MOST_ERRORS = 1000
_SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)}
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


def field_error(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400 that names the wrong field: ``param``, or what the message begins with."""
    return ApiError(400, message, param=param or _first_name(message), code=code)


def _first_name(message: str) -> str:
    return re.split(r"[^\w.]", message, maxsplit=1)[0]


def to_api_error(error: Exception) -> ApiError:
    """Convert an error of the engine, or any other, to a response."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        name = _first_name(str(error))
        return ApiError(400, str(error), param=name if name in _SAMPLING_FIELDS else None)
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


def from_validation(error: ValidationError, model: type[BaseModel], body: bytes) -> ApiError:
    """Return a 400 that names the first wrong field, and for an unknown one the nearest known."""
    if error.error_count() > _MOST_ERRORS:  # to describe millions would take a minute
        return ApiError(400, f"the body has {error.error_count()} wrong or unknown fields")
    errors = error.errors(include_url=False)
    if errors[0]["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {errors[0].get('ctx', {}).get('error', '')}")
    content = from_json(body)
    # A union reports an error for each of its types: the one that read furthest was meant.
    of_field = [each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]]
    first = max(of_field, key=lambda each: sum(isinstance(x, str) for x in _fields(each, content)))
    kind, context = first["type"], first.get("ctx", {})
    names = _fields(first, content)
    if kind.startswith("union_tag"):
        names.append(context["discriminator"].strip("'"))
    path = ".".join(map(str, names))
    message = f"{path or 'the body'}: {_complaint(first, names)}"
    if kind == "extra_forbidden":
        message = f"{path} is not a field of this request"
        if len(names) == 1:
            message += _nearest(path, model.model_fields)
    return ApiError(400, message, param=path or None)


def _fields(error: ErrorDetails, value: Any) -> list[int | str]:
    """Return the parts of an error's location that are keys, not names of types in a union."""
    names: list[int | str] = []
    for part in error["loc"]:
        if part in value if isinstance(value, dict) else isinstance(part, int):
            names.append(part)
            value = value[part]
    return [*names, error["loc"][-1]] if error["type"] == "missing" else names


def _complaint(error: ErrorDetails, names: Sequence[int | str]) -> str:
    """Return what is wrong with a field: what was expected, and what was given if it is short."""
    kind, context, given = error["type"], error.get("ctx", {}), error["input"]
    if kind in ("missing", "union_tag_not_found"):
        return "this field is required"
    if kind == "too_short":
        return f"expected at least {context['min_length']}, not {context['actual_length']}"
    expected = error["msg"].replace("Input should be", "expected")
    expected = re.sub("^expected (greater|less) ", r"expected a number \1 ", expected)
    if kind == "union_tag_invalid":
        given, expected = context["tag"], f"expected one of {context['expected_tags']}"
    elif names and names[-1] != error["loc"][-1]:  # a location that ends with the name of a type
        expected = _UNIONS.get(str(names[-1]), expected)
    is_plain = given is None or isinstance(given, (bool, int, float, str))
    shown = f", not {given!r}" if is_plain else ""
    return expected + (shown if len(shown) <= 60 else "")


_UNIONS = {
    "content": 'expected a string, or a list of text parts: {"type": "text", "text": "..."}',
    "prompt": "expected a string, a list of strings, token ids, or a list of lists of token ids",
    "stop": "expected a string or a list of strings",
    "input": "expected a string or a list of messages",
}
"""What fields of several types expect, where the value has none of them."""


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

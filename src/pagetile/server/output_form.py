"""Structured-output constraints of a request: ``response_format`` and forced tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..engine.structured_outputs import StructuredOutputsParams
from ..errors import RequestError
from .errors import field_error
from .schemas.chat import ChatRequest, Function, JsonSchemaFormat, NamedTool
from .schemas.common import GenerationFields
from .schemas.completions import CompletionRequest


def output_form(body: ChatRequest | CompletionRequest) -> StructuredOutputsParams | None:
    """Return the constraint in a body's ``response_format`` or ``structured_outputs``.

    Raises:
        ApiError: With status 400: both are given.
    """
    format_, asked = body.response_format, body.structured_outputs
    is_free = format_ is None or format_.type == "text"
    if asked is None and is_free:
        return None
    if asked is not None and not is_free:
        raise field_error(
            "give response_format or structured_outputs, not both", "structured_outputs"
        )
    if isinstance(format_, JsonSchemaFormat):
        return _form("response_format", json=format_.json_schema.schema_)
    if not is_free:
        return _form("response_format", json_object=True)
    assert asked is not None
    fields = dict(asked)
    return _form("structured_outputs", json=fields.pop("json_"), **fields)


def form_field(body: GenerationFields) -> str:
    """Return the field that constrains the output of a request."""
    if body.structured_outputs is not None:
        return "structured_outputs"
    has_format = isinstance(body, ChatRequest | CompletionRequest) and output_form(body) is not None
    return "response_format" if has_format else "tools"


def forced_call_form(body: ChatRequest) -> StructuredOutputsParams | None:
    """Return the constraint on calls that ``tool_choice`` forces; ``None`` if it forces none.

    A named tool: its arguments. ``"required"``: a list of ``{"name": …, "parameters": …}``.
    """
    functions = [tool.function for tool in body.tools or ()]
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        [chosen] = [f for f in functions if f.name == choice.function.name]
        return _form("tools", json=_arguments(chosen), disable_any_whitespace=True)
    if choice != "required":
        return None
    calls, definitions = [], {}
    for number, function in enumerate(functions):
        schema = _arguments(function)
        for key in ("$defs", "definitions"):
            for name, definition in (schema.pop(key, None) or {}).items():
                definitions[f"{number}-{name}"] = _moved(definition, number)
        properties = {"name": {"const": function.name}, "parameters": _moved(schema, number)}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
    if body.parallel_tool_calls is False:
        schema["maxItems"] = 1
    return _form("tools", json=schema, disable_any_whitespace=True)


def _arguments(function: Function) -> dict[str, Any]:
    """Return the schema of a function's arguments: an object, empty for one without parameters."""
    if function.parameters is None:
        return {"type": "object", "additionalProperties": False}
    return {"type": "object", **function.parameters}


def _moved(schema: Any, number: int) -> Any:
    """Return a schema with renamed references: all tools' definitions share one list."""
    if isinstance(schema, Mapping):
        moved = {key: _moved(value, number) for key, value in schema.items()}
        reference = moved.get("$ref")
        if isinstance(reference, str):
            for key in ("#/$defs/", "#/definitions/"):
                if reference.startswith(key):
                    moved["$ref"] = f"#/$defs/{number}-{reference.removeprefix(key)}"
        return moved
    if isinstance(schema, list):
        return [_moved(value, number) for value in schema]
    return schema


def _form(param: str, **fields: Any) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**fields)
    except (RequestError, RecursionError) as error:
        raise field_error(str(error), param) from None

"""Messages and tools as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .errors import ApiError
from .schemas.chat import Message, Tool

__all__ = ["as_template_messages", "as_template_tools"]


def as_template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages with their text in one piece, and the arguments of calls as objects.

    Raises:
        ApiError: With status 400: the arguments of a call are no JSON object.
    """
    return [_message(number, message) for number, message in enumerate(messages)]


def _message(number: int, message: Message) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    made: dict[str, Any] = {"role": role, "content": content if content is not None else ""}
    if message.name is not None:
        made["name"] = message.name
    if message.role == "tool":
        made["tool_call_id"] = message.tool_call_id
    if message.role == "assistant" and message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(
                        call.function.arguments, f"messages.{number}.tool_calls.{place}"
                    ),
                },
            }
            for place, call in enumerate(message.tool_calls)
        ]
    return made


def _arguments(text: str, param: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ApiError(400, f"{param}.function.arguments is no JSON object", param=param)
    return found


def as_template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as objects; ``None`` where there are none."""
    if not tools:
        return None
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]

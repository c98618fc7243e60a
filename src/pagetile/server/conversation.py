"""Messages and tools as chat templates take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.chat import as_template_message
from ..errors import RequestError
from .errors import ApiError
from .schemas.chat import Message, Tool

__all__ = ["as_template_messages", "as_template_tools"]


def as_template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages with their text in one piece, and the arguments of calls as objects.

    Raises:
        ApiError: With status 400: the arguments of a call are no JSON object.
    """
    return [_message(message, f"messages.{number}") for number, message in enumerate(messages)]


def _message(message: Message, param: str) -> dict[str, Any]:
    try:
        return as_template_message(message.model_dump(exclude_none=True), param)
    except RequestError as error:
        raise ApiError(400, str(error), param=param) from None


def as_template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as objects; ``None`` where there are none."""
    if not tools:
        return None
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]

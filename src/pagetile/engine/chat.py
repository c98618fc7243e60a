"""Conversations as prompts, by the template that comes with a checkpoint's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

from ..errors import RequestError
from .numbers import is_list

__all__ = ["Conversation", "render", "render_text"]

Conversation = SequenceOf[Mapping[str, Any]]
"""Messages in turn: ``{"role": "user", "content": "…"}``."""


def render(
    tokenizer: Any,
    messages: Conversation | SequenceOf[Conversation],
    chat_template: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[list[int]]:
    """The token ids of each conversation, up to where the model's answer begins.

    Args:
        tokenizer: The checkpoint's, from Transformers.
        messages: One conversation, or a list of them. One that ends with the assistant's words
            is continued, not answered.
        chat_template: In the place of the tokenizer's own.
        options: What else the template takes: ``{"enable_thinking": False}``, ``{"tools": […]}``.

    Raises:
        RequestError: There is no template, it refuses the messages, or they are none.
    """
    _check_template(tokenizer, chat_template)
    conversations = _listed(messages)
    return [
        _render(tokenizer, conversation, f"conversation {number}", chat_template, options or {})
        for number, conversation in enumerate(conversations)
    ]


def render_text(
    tokenizer: Any,
    conversation: Conversation,
    chat_template: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """One conversation as text; encoded without special tokens it gives ``render``'s ids.

    Raises:
        RequestError: As ``render``.
    """
    _check_template(tokenizer, chat_template)
    [listed] = _listed(conversation)
    options = {**(options or {}), "tokenize": False}
    text: str = _apply(tokenizer, listed, "conversation 0", chat_template, options)
    return text


def _check_template(tokenizer: Any, chat_template: str | None) -> None:
    if tokenizer is None:
        raise RequestError(
            "the model directory has no tokenizer, so no chat template: give token ids to generate"
        )
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            "the tokenizer has no chat template: the model was not trained on conversations. Give "
            "chat_template=..., or text to generate"
        )


def _listed(messages: Any) -> list[list[Any]]:
    """Several conversations, or one: its elements are messages."""
    listed = list(messages) if is_list(messages) else None
    if not listed:
        raise RequestError(
            f"messages is {messages!r}, expected a list of messages such as "
            "{'role': 'user', 'content': 'text'}, or a list of such lists"
        )
    conversations = [listed] if isinstance(listed[0], Mapping) else listed
    for number, conversation in enumerate(conversations):
        _check(conversation, f"conversation {number}")
    return [list(conversation) for conversation in conversations]


def _check(conversation: Any, name: str) -> None:
    if not isinstance(conversation, SequenceOf) or isinstance(conversation, str):
        raise RequestError(f"{name} is {conversation!r}, expected a list of messages")
    if not conversation:
        raise RequestError(f"{name} is empty: give at least one message")
    for message in conversation:
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str):
            raise RequestError(
                f"{name} has {message!r}, expected a message such as "
                "{'role': 'user', 'content': 'text'}"
            )


def _render(
    tokenizer: Any,
    conversation: list[Any],
    name: str,
    chat_template: str | None,
    options: Mapping[str, Any],
) -> list[int]:
    options = {**options, "tokenize": True}
    token_ids: list[int] = _apply(tokenizer, conversation, name, chat_template, options)
    return token_ids


def _apply(
    tokenizer: Any,
    conversation: list[Any],
    name: str,
    chat_template: str | None,
    options: Mapping[str, Any],
) -> Any:
    is_begun = conversation[-1]["role"] == "assistant"
    try:
        return tokenizer.apply_chat_template(
            conversation,
            chat_template=chat_template,
            **{
                "add_generation_prompt": not is_begun,
                "continue_final_message": is_begun,
                **options,
                "return_dict": False,
            },
        )
    except Exception as error:  # a template is a program, and says no in its own ways
        raise RequestError(f"{name}: the chat template refuses it: {error}") from error

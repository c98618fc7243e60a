"""Renders conversations as prompts, by the chat template of a checkpoint's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

from ..errors import RequestError, TemplateError
from .input_processor import is_list

Conversation = SequenceOf[Mapping[str, Any]]
"""Messages in turn, in OpenAI's form: ``{"role": "user", "content": "…"}``."""
Tools = SequenceOf[Mapping[str, Any]]
"""What the model may call: ``{"type": "function", "function": {"name": …, "parameters": …}}``."""


def render(
    tokenizer: Any,
    messages: Conversation | SequenceOf[Conversation],
    chat_template: str | None = None,
    **options: Any,
) -> list[list[int]]:
    """Return the token ids of each conversation, up to where the model's answer begins.

    Args:
        tokenizer: The checkpoint's, from Transformers.
        messages: One conversation, or a list of them.
        chat_template: Replaces the tokenizer's own.
        **options: As for ``render_text``.

    Raises:
        TemplateError: The template refuses the messages.
        RequestError: There is none, or they are not messages.
    """
    _check_template(tokenizer, chat_template)
    return [
        tokenizer.encode(
            render_text(
                tokenizer, conversation, chat_template, name=f"conversation {number}: ", **options
            ),
            add_special_tokens=False,
        )
        for number, conversation in enumerate(_listed(messages))
    ]


def as_template_message(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a message with its text joined, and the arguments of calls as objects.

    Args:
        message: In OpenAI's form.
        name: Its name in errors.

    Raises:
        RequestError: It has a part that is not text, or arguments that are not a JSON object.
    """
    made = {key: value for key, value in message.items() if value is not None}
    made["role"] = "system" if message["role"] == "developer" else message["role"]
    made["content"] = _text(message.get("content"), name)
    if made.pop("tool_calls", None):
        made["tool_calls"] = [
            _call(call, f"{name}.tool_calls.{place}")
            for place, call in enumerate(message["tool_calls"])
        ]
    return made


def _text(content: Any, name: str) -> str:
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        kinds = {part.get("type") for part in content}
        if kinds <= {"text"}:
            content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, (str, type(None))):
        raise RequestError(f"{name} has content {content!r}, expected text, or parts of text")
    return content or ""


def _call(call: Any, name: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{name} is {call!r}, expected a call of a function with its name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{name}.function.arguments is not a JSON object")
    named = {"id": call["id"]} if "id" in call else {}
    function = {"name": function["name"], "arguments": dict(arguments)}
    return {**named, "type": "function", "function": function}


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


def _listed(messages: Any) -> list[list[dict[str, Any]]]:
    """Return a list of conversations; one conversation is a list of messages."""
    listed = list(messages) if is_list(messages) else None
    if not listed:
        raise RequestError(
            f"messages is {messages!r}, expected a list of messages such as "
            "{'role': 'user', 'content': 'text'}, or a list of such lists"
        )
    conversations = [listed] if isinstance(listed[0], Mapping) else listed
    for number, conversation in enumerate(conversations):
        _check(conversation, f"conversation {number}")
    return [
        [
            as_template_message(message, f"conversation {number}: messages.{place}")
            for place, message in enumerate(conversation)
        ]
        for number, conversation in enumerate(conversations)
    ]


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


def render_text(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    chat_template: str | None,
    *,
    name: str = "",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Tools | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> str:
    """Return one conversation as text, to be encoded without special tokens.

    Args:
        tokenizer: The checkpoint's, from Transformers; it or ``chat_template`` has a template.
        messages: As ``as_template_message`` makes them.
        chat_template: Replaces the tokenizer's own.
        name: How messages of errors begin.
        add_generation_prompt: Whether the text ends where an answer begins.
        continue_final_message: Whether it ends within the last message, for the model to continue.
        tools: What the model may call.
        template_options: What else the template takes, ``{"enable_thinking": False}``.

    Raises:
        TemplateError: The template refuses the messages.
        RequestError: It knows no tools, or there is no message to continue.
    """
    source = str(chat_template or tokenizer.chat_template)
    if tools and "tools" not in source:
        raise RequestError("tools: the chat template does not offer tools to the model")
    if continue_final_message and messages[-1]["role"] != "assistant":
        raise RequestError(f"{name}continue_final_message needs an assistant's last message")
    try:
        text: str = tokenizer.apply_chat_template(
            messages,
            chat_template=chat_template,
            tools=list(tools) if tools else None,
            tokenize=False,
            **{
                **(template_options or {}),
                "add_generation_prompt": add_generation_prompt and not continue_final_message,
                "continue_final_message": continue_final_message,
                "return_dict": False,
            },
        )
        return text
    except Exception as error:  # a template may raise anything
        raise TemplateError(f"{name}the chat template refuses it: {error}") from error

"""vLLM's dictionary form of a prompt: ``{"prompt": text, "cache_salt": salt}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import RequestError


def parse_prompt(prompt: Mapping[str, Any]) -> tuple[Any, str | None]:
    """Split vLLM's dictionary form of a prompt into text or token ids, and its ``cache_salt``.

    A dictionary has ``prompt`` (text) or ``prompt_token_ids``, and may have ``cache_salt``.

    Raises:
        RequestError: The dictionary has other keys, or not exactly one prompt, or a value is of
            the wrong type.
    """
    unknown = [key for key in prompt if key not in ("prompt", "prompt_token_ids", "cache_salt")]
    if unknown:
        raise RequestError(
            f"the prompt has {', '.join(map(repr, unknown))}, expected 'prompt' or "
            "'prompt_token_ids', and optionally 'cache_salt'"
        )
    given = [key for key in ("prompt", "prompt_token_ids") if key in prompt]
    if len(given) != 1:
        raise RequestError(
            f"the prompt has {' and '.join(map(repr, given)) or 'neither text nor token ids'}, "
            "expected one of 'prompt' and 'prompt_token_ids'"
        )
    cache_salt = prompt.get("cache_salt")
    if cache_salt is not None and not (isinstance(cache_salt, str) and cache_salt):
        raise RequestError(
            f"the prompt has cache_salt={cache_salt!r}, expected a non-empty string, or None"
        )
    [key] = given
    if (key == "prompt") != isinstance(prompt[key], str):
        expected = "text" if key == "prompt" else "a list of token ids"
        raise RequestError(
            f"the prompt's {key!r} is {type(prompt[key]).__name__}, expected {expected}"
        )
    return prompt[key], cache_salt

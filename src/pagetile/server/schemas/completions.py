"""Bodies of ``/v1/completions``, ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ..config import Limits
from ..errors import field_error
from .chat import Message, ResponseFormat, Tool
from .common import Body, GenerationFields, Items, at_most


class CompletionRequest(GenerationFields):
    """Continue one or more prompts."""

    prompt: str | Items[int] | Items[str] | Items[Items[int]]
    max_tokens: int | None = Field(16, ge=0)
    """0 is for ``echo``: the prompt's log-probabilities only."""
    echo: bool | None = False
    """Return the prompt before its continuation; with ``logprobs``, both have them."""
    logprobs: int | None = Field(None, ge=0)
    add_special_tokens: bool = True
    """Only true: the tokenizer adds its special tokens to a text."""
    response_format: ResponseFormat | None = None

    def check(self, limits: Limits) -> None:
        """Refuse what cannot be honoured."""
        super().check(limits)
        at_most("logprobs", self.logprobs or 0, limits.num_logprobs)
        if self.max_tokens == 0 and not self.echo:
            raise field_error("max_tokens=0 needs echo=true")
        if self.max_tokens == 0 and self.stream:
            raise field_error("max_tokens=0 cannot be streamed", "stream")
        if not self.add_special_tokens:
            raise field_error(
                "add_special_tokens: only true is supported; give token ids to choose them all"
            )

    def prompts(self, limits: Limits) -> list[str | list[int]]:
        """Each prompt: text, or token ids."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if not given:
            raise field_error("prompt is an empty list: give at least one")
        if isinstance(given[0], int):
            return [given]
        at_most("prompt", len(given), limits.num_prompts, "prompts")
        return list(given)


class TokenizeRequest(Body):
    """Text or messages to turn into tokens; give one of them."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[Message] | None = Field(None, min_length=1)
    tools: Items[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """Tokens to turn into text."""

    model: str | None = None
    tokens: Items[int]

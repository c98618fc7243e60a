"""Bodies of ``/v1/completions``, ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ..config import Limits
from ..errors import ApiError
from .chat import Message, ResponseFormat, Tool
from .common import Body, GenerationFields

__all__ = ["CompletionRequest", "DetokenizeRequest", "TokenizeRequest"]


class CompletionRequest(GenerationFields):
    """Continue one or more prompts."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(16, ge=0)
    """0 needs ``echo``: nothing is generated, the prompt is scored."""
    echo: bool = False
    """Return the prompt before its continuation; with ``logprobs``, both have them."""
    logprobs: int | None = Field(None, ge=0)
    add_special_tokens: bool = True
    """Only true: text becomes the tokens that the tokenizer makes of it."""
    response_format: ResponseFormat | None = None

    def check(self, limits: Limits) -> None:
        """Refuse what cannot be honoured."""
        super().check(limits)
        if self.logprobs is not None and self.logprobs > limits.num_logprobs:
            raise ApiError(
                400,
                f"logprobs={self.logprobs}, at most {limits.num_logprobs}",
                param="logprobs",
            )
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens=0 needs echo=true", param="max_tokens")
        if self.max_tokens == 0 and self.stream:
            raise ApiError(400, "max_tokens=0 cannot be streamed", param="stream")
        if not self.add_special_tokens:
            raise ApiError(
                400,
                "add_special_tokens: only true is supported; give token ids to choose them all",
                param="add_special_tokens",
            )
        if self.stream and (self.prompt_logprobs is not None):
            raise ApiError(400, "prompt_logprobs cannot be streamed", param="prompt_logprobs")

    def prompts(self, limits: Limits) -> list[str | list[int]]:
        """Each prompt: text, or token ids."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if not given:
            raise ApiError(400, "prompt is an empty list: give at least one", param="prompt")
        if isinstance(given[0], int):
            return [given]
        if len(given) > limits.num_prompts:
            raise ApiError(
                400,
                f"prompt: {len(given)} prompts, at most {limits.num_prompts} in one request",
                param="prompt",
            )
        return list(given)


class TokenizeRequest(Body):
    """Text or messages to turn into tokens; give one of them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """Tokens to turn into text."""

    model: str | None = None
    tokens: list[int]

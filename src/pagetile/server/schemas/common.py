"""Fields that completions, chat completions and responses share, and how they become parameters."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from ...engine.sampling_params import SamplingParams
from ...errors import RequestError
from ..config import Limits, ServerConfig
from ..errors import field_error

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list whose first wrong item is reported: a body may have millions."""


class Body(BaseModel):
    """A JSON object whose fields are all known and of the right type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    """A last chunk without choices that counts tokens."""
    continuous_usage_stats: bool = False
    """The count so far in every chunk."""
    include_obfuscation: Literal[False] | None = None
    """Only false."""


class StructuredOutputs(Body):
    """A constraint on the output; give one of the first four."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    """A JSON schema, as an object or as text."""
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    """In Lark's form, or GBNF's."""
    json_object: bool | None = None
    """Any JSON object."""
    disable_any_whitespace: bool = False
    """JSON without line breaks and indentation."""


class GenerationFields(Body):
    """Sampling fields, those of the OpenAI API first, then vLLM's extensions."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = Field(None, ge=1)
    seed: int | None = None
    stop: str | Items[str] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=512)
    """Written to the server's log beside the request's id."""

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Items[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int | None = Field(None, ge=0)
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    """Only true."""
    prompt_logprobs: int | None = Field(None, ge=0)
    allowed_token_ids: Items[int] | None = None
    bad_words: Items[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int = 0
    """Only 0: requests are served in order of arrival."""
    request_id: str | None = Field(None, min_length=1, max_length=128)
    """Part of the response's id; unique among running requests."""
    return_token_ids: bool = False
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    """Cached prefixes are shared only with requests of the same salt and the same API key."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    """Keep this many of the prompt's last tokens; -1: as many as fit."""

    def check(self, limits: Limits) -> None:
        """Refuse what is beyond the limits, and what cannot be honoured.

        Raises:
            ApiError: With status 400 and the field's name.
        """
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        at_most("n", self.n or 1, limits.n)
        at_most("stop", len(stops), limits.num_stops, "strings")
        at_most("stop", max(map(len, stops), default=0), limits.stop_chars, "characters")
        at_most("stop_token_ids", len(self.stop_token_ids or ()), limits.num_logit_biases, "ids")
        at_most("bad_words", len(self.bad_words or ()), limits.num_bad_words, "words")
        longest = max(map(len, self.bad_words or ()), default=0)
        at_most("bad_words", longest, limits.stop_chars, "characters")
        at_most("logit_bias", len(self.logit_bias or ()), limits.num_logit_biases, "entries")
        at_most("prompt_logprobs", self.prompt_logprobs or 0, limits.num_logprobs)
        if self.priority != 0:
            raise field_error("priority: only 0 is served, in order of arrival")
        if not self.spaces_between_special_tokens:
            raise field_error("spaces_between_special_tokens: only true is supported")
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options needs stream=true")
        if self.stream and self.prompt_logprobs is not None:
            raise field_error("prompt_logprobs cannot be streamed")
        if self.truncate_prompt_tokens == 0:
            raise field_error(
                "truncate_prompt_tokens=0 would leave no prompt: expected at least 1, or -1"
            )

    @property
    def reports_usage(self) -> bool:
        """Whether a stream ends with a chunk that counts tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def counts_usage(self) -> bool:
        """Whether every chunk of a stream counts the tokens so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def sampling_params(
        self, config: ServerConfig, *, max_tokens: int | None, logprobs: int | None, **more: Any
    ) -> SamplingParams:
        """Return the engine's parameters; missing fields take the checkpoint's defaults.

        Args:
            config: Has those defaults.
            max_tokens: Longest output; ``None``: as many tokens as the context allows.
            logprobs: How many alternatives to report for each token; ``None``: nothing.
            **more: Parameters that override this body's.

        Raises:
            ApiError: With status 400: a value is out of range.
        """
        values: dict[str, Any] = dict(config.sampling_defaults)
        values |= self.model_dump(include=_PASSED, exclude_none=True)
        if self.logit_bias:
            values["logit_bias"] = _token_ids(self.logit_bias)
        values["max_tokens"] = max_tokens
        values["logprobs"] = logprobs
        values.update(more)
        try:
            return SamplingParams(**values)
        except RequestError as error:
            raise field_error(str(error)) from None  # messages begin with the field


_PASSED = {
    *("temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_tokens", "ignore_eos"),
    *("skip_special_tokens", "include_stop_str_in_output", "allowed_token_ids", "bad_words"),
}


def _token_ids(biases: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): bias for token_id, bias in biases.items()}
    except ValueError:
        raise field_error("logit_bias: its keys are token ids, whole numbers as text") from None


def at_most(name: str, count: int, most: int, what: str = "") -> None:
    """Refuse more than the limit of a field."""
    if count > most:
        raise field_error(f"{name}: {count} {what}".rstrip() + f", at most {most}")

"""Results: the deltas of steps, finished and unfinished requests, and counts of the cache."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from ..errors import GenerationError
from .logprobs import LogprobDicts, TokenLogprobs


@dataclass(slots=True)
class Delta:
    """The tokens and text that a step added to one sequence."""

    request_id: Any
    index: int
    text: str
    """New text; ``""`` while it is uncertain, and for requests that neither stream nor have stop
    strings."""
    token_id: int | None
    finish_reason: str | None
    error: str | None = None
    """Why it failed, where ``finish_reason`` is ``"error"``."""
    logprobs: TokenLogprobs | None = None
    """The token's log-probability and the likeliest alternatives, if requested."""
    prompt_logprobs: LogprobDicts | None = None
    """Those of the prompt's tokens, if requested: in the request's first delta with a token."""
    stop_reason: str | int | None = None
    """With a ``finish_reason``: the stop string or token that ended the sequence, if one did."""


@dataclass(frozen=True)
class CompletionOutput:
    """One generated continuation."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    """``"stop"`` (a stop string or token, or the model's end of text), ``"length"``, ``"abort"``,
    ``"error"``, or ``None`` while it is being generated."""
    stop_reason: str | int | None = None
    """The stop string or the stop token's id that ended it; ``None`` for the end of text."""
    logprobs: LogprobDicts | None = None
    """For each token a dictionary ``{token_id: Logprob}``: itself, then the likeliest
    alternatives."""
    cumulative_logprob: float | None = None
    error: str | None = None
    error_type: type[GenerationError] = GenerationError
    """The type of ``error``, which ``AsyncLLM`` raises."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request's events, in seconds since 1970; ``None``: not yet."""

    arrival_time: float
    first_scheduled_time: float | None = None
    """When it was first scheduled."""
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from its arrival until it was first scheduled."""
        if self.first_scheduled_time is None:
            return None
        return self.first_scheduled_time - self.arrival_time


@dataclass(frozen=True)
class RequestOutput:
    """A request with everything generated for it so far."""

    request_id: Hashable
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int
    """Prompt tokens whose keys and values were found in the cache, not computed."""
    prompt_logprobs: LogprobDicts | None = None
    """For each prompt token a dictionary ``{token_id: Logprob}``, and None for the first."""
    metrics: RequestMetrics | None = field(default=None, compare=False)


@dataclass
class CacheCounts:
    """Counts of cache events since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the cache at a request's first admission."""
    copied_blocks: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Tokens computed again because preemption freed their blocks and others reused them."""
    peak_blocks: int = 0
    shared_blocks: int = 0
    """The most blocks that were held more than once at the same time."""
    held_slots: int = 0
    """Slots of held blocks, summed over steps."""
    unused_slots: int = 0
    """Those of them that hold no token."""
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """Draft tokens that equal the sampled ones."""

    @property
    def waste(self) -> float:
        """Share of the held cache memory that held no token, averaged over steps."""
        return self.unused_slots / self.held_slots if self.held_slots else 0.0

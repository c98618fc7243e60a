"""A generation request, its output sequences, and what a user gets back.

::

    Request ──┬── Sequence 0    waiting → running → finished
              ├── Sequence 1       ▲         │
              └── …  (n of them)   └─────────┘ preempted: its blocks are gone, its tokens stay

Sequence 0 fills the prompt's blocks; the others fork from it when it has.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from ..kv_cache import BlockTable
from ..kv_cache.prefix_index import BlockHashes
from .detokenizer import Detokenizer
from .sampling_params import SamplingParams

__all__ = ["CompletionOutput", "Request", "RequestOutput", "Sequence"]


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
    logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    """For each token: itself with its log-probability, then the likeliest alternatives."""
    cumulative_logprob: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A request with everything generated for it so far."""

    request_id: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int
    """Prompt tokens whose keys and values were found in the cache, not computed."""


@dataclass(eq=False)
class Sequence:
    """One output being generated. Everything else about it follows from these."""

    request: Request
    index: int
    token_ids: list[int]
    """The prompt and the output so far."""
    table: BlockTable
    block_hashes: BlockHashes
    detokenizer: Detokenizer
    num_computed: int = 0
    """Tokens whose keys and values lie in the cache."""
    num_lost: int = 0
    """As many were when it was preempted, until it runs again."""
    row: int | None = None
    """Its row in the runner's block tables while it runs."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens after the prompt."""
        return self.token_ids[len(self.request.prompt_token_ids) :]

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were generated."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_pending(self) -> int:
        """Tokens that have to be computed before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be generated."""
        return self.finish_reason is not None

    def output(self) -> CompletionOutput:
        """What a user gets of this sequence now."""
        logprobs = tuple(self.logprobs) if self.request.params.logprobs is not None else None
        return CompletionOutput(
            index=self.index,
            text=self.detokenizer.text,
            token_ids=tuple(self.output_token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=logprobs,
            cumulative_logprob=None if logprobs is None else sum(t[0][1] for t in logprobs),
            error=self.error,
        )


@dataclass(eq=False)
class Request:
    """A prompt and how to continue it."""

    request_id: int
    prompt: str | None
    prompt_token_ids: SequenceOf[int]
    params: SamplingParams
    seed: int
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    makes_text_early: bool = False
    """Whether tokens are turned into text as they come: for a stream, or to find a stop string."""
    sequences: list[Sequence] = field(default_factory=list)
    num_cached_tokens: int | None = None
    """Prompt tokens found in the cache at the first admission; ``None`` before that."""

    @property
    def is_forked(self) -> bool:
        """Whether all ``n`` sequences exist."""
        return len(self.sequences) == self.params.n

    @property
    def is_finished(self) -> bool:
        """Whether all sequences are."""
        return all(sequence.is_finished for sequence in self.sequences) and (
            self.is_forked or self.sequences[0].is_finished
        )

    def output(self) -> RequestOutput:
        """What a user gets now."""
        return RequestOutput(
            self.request_id,
            self.prompt,
            tuple(self.prompt_token_ids),
            tuple(sequence.output() for sequence in self.sequences),
            self.is_finished,
            self.num_cached_tokens or 0,
        )

"""A generation request and its output sequences.

::

    Request ──┬── Sequence 0    WAITING ──► RUNNING ──► FINISHED
              ├── Sequence 1       ▲           │
              └── …  (n of them)   └───────────┘ preempted: its blocks are gone, its tokens stay

Sequence 0 computes the prompt; the others fork from it in the step that samples its first token.

With a step in flight the device is ahead of the host: ``num_computed`` counts tokens that the
launched steps compute, and ``num_tokens`` also those that they sample and the host has not read::

    token_ids: prompt, known output    unread
    [0 1 2 3 4 5 6 7 8]                [9]       num_tokens = 10
     └─ num_computed ─┘ 9                        num_pending = 1: the next decode step
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import GenerationError
from ..kv_cache import BlockTable
from ..kv_cache.prefix_index import BlockHashes
from .detokenizer import Detokenizer
from .logprobs import LogprobDicts, TokenLogprobsList
from .ngram import NgramProposer
from .outputs import CompletionOutput, RequestMetrics, RequestOutput
from .sampling_params import SamplingParams
from .sampling_rows import SamplingInput
from .structured_outputs import Grammar
from .text_decoder import TextDecoder

_EPOCH = time.time() - time.perf_counter()
"""Added to ``time.perf_counter``, gives seconds since 1970; set once, so that times never go
back."""


class State(enum.Enum):
    """State of a sequence."""

    WAITING = "it has no blocks: it is new, or was preempted"
    RUNNING = "it has blocks and a row on the device"
    FINISHED = "it has a reason, and keeps both while a step in flight still computes it"


@dataclass(eq=False, slots=True)
class Sequence:
    """One output being generated."""

    request: Request
    index: int
    token_ids: list[int]
    """The prompt, then the known output tokens."""
    table: BlockTable
    block_hashes: BlockHashes
    decoder: TextDecoder | None
    """Makes its text when it ends; ``None``: it has none."""
    max_len: int
    """Tokens at which it ends, prompt included."""
    end_token_ids: frozenset[int]
    """Tokens that end it."""
    detokenizer: Detokenizer | None = None
    """Makes its text earlier, after every token: for a stream, or to find a stop string."""
    grammar: Grammar | None = None
    proposer: NgramProposer | None = None
    """Drafts its next tokens; ``None`` without speculation."""
    state: State = State.WAITING
    num_computed: int = 0
    """Tokens whose keys and values are in the cache once the launched steps are done."""
    num_tokens: int = 0
    """All tokens: the known ones, and those that launched steps sample."""
    last_step: int = -1
    """The last launched step that computes it, or samples its token."""
    is_decoding: bool = False
    """Whether its row on the device has its last token and all its blocks but the last."""
    text: str = ""
    only_appends: bool = False
    """Whether a token that is not its last only has to be appended: it runs, it has its first
    token, and neither text nor a grammar follows its tokens."""
    num_lost: int = 0
    """Tokens that were computed when it was preempted; 0 once it runs again."""
    row: int = -1
    """Its row on the device; -1: none."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: GenerationError | None = None
    logprobs: TokenLogprobsList | None = None
    """Log-probabilities of its output, if requested."""

    def __post_init__(self) -> None:
        self.num_tokens = len(self.token_ids)
        if self.request.params.logprobs is not None:
            self.logprobs = TokenLogprobsList()

    @property
    def output_token_ids(self) -> list[int]:
        """The known tokens after the prompt."""
        return self.token_ids[len(self.request.prompt_token_ids) :]

    @property
    def num_pending(self) -> int:
        """Tokens that no launched step computes; the next token is sampled after the last one."""
        return self.num_tokens - self.num_computed

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be generated."""
        return self.state is State.FINISHED

    def sampling_input(self) -> SamplingInput:
        """Return what the sampler needs to know when the sequence gets a row."""
        request = self.request
        return SamplingInput(
            request.params,
            request.prompt_token_ids,
            self.output_token_ids,
            request.seed,
            self.index,
            self.end_token_ids,
            request.bad_words,
        )

    def output(self) -> CompletionOutput:
        """Return the sequence as users see it now."""
        logprobs = None
        if self.logprobs is not None:
            logprobs = LogprobDicts(self.logprobs.copy(), self.request.decode_token)
        return CompletionOutput(
            index=self.index,
            text=self.text if self.detokenizer is None else self.detokenizer.text,
            token_ids=tuple(self.output_token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=logprobs,
            cumulative_logprob=None if self.logprobs is None else self.logprobs.total,
            error=None if self.error is None else str(self.error),
            error_type=GenerationError if self.error is None else type(self.error),
        )


@dataclass(eq=False)
class Request:
    """A prompt and how to continue it."""

    request_id: Any
    prompt: str | None
    prompt_token_ids: SequenceOf[int]
    params: SamplingParams
    seed: int
    bad_words: SequenceOf[SequenceOf[int]] = ()
    """``params.bad_words`` as tokens."""
    cache_salt: str | None = None
    stream: bool = False
    """Whether deltas carry text, and the time between tokens matters."""
    make_grammar: Callable[[], Grammar] | None = None
    sequences: list[Sequence] = field(default_factory=list)
    num_cached_tokens: int | None = None
    """Prompt tokens found in the cache at the first admission; ``None`` before that."""
    decode_token: Callable[[int], str] | None = None
    """Returns the text of a token id, for log-probabilities; ``None`` without a tokenizer."""
    generates: bool = True
    """Whether the prompt is continued, or only scored."""
    prompt_logprobs: LogprobDicts | None = None
    """Of the prompt's tokens, once they are computed."""
    arrival_time: float = field(default_factory=time.perf_counter)
    """In seconds of ``time.perf_counter``."""
    metrics: RequestMetrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = RequestMetrics(self.arrival_time + _EPOCH)

    def record(self, event: str) -> None:
        """Set one of the ``metrics``, times of events, to now."""
        self.metrics = replace(self.metrics, **{event: time.perf_counter() + _EPOCH})

    @property
    def needs_scores(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are to be computed first."""
        is_asked = self.params.prompt_logprobs is not None and self.prompt_logprobs is None
        return is_asked or not self.generates

    @property
    def is_finished(self) -> bool:
        """Whether all sequences are."""
        return all(sequence.is_finished for sequence in self.sequences)

    def output(self) -> RequestOutput:
        """Return the request as users see it now."""
        return RequestOutput(
            self.request_id,
            self.prompt,
            tuple(self.prompt_token_ids),
            tuple(sequence.output() for sequence in self.sequences),
            self.is_finished,
            self.num_cached_tokens or 0,
            self.prompt_logprobs,
            self.metrics,
        )

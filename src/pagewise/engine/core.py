"""The engine: requests come and go while steps are computed."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import RequestError
from ..kv_cache import BlockPool, BlockTable, PrefixIndex
from ..kv_cache.storage import KVCache
from ..models.paged_model import PagedModel
from ..transfer import send
from .detokenizer import Detokenizer
from .numbers import is_index, is_list
from .request import Request, RequestOutput, Sequence
from .runner import Runner
from .sampler import SampledToken, SamplingInput, sample
from .sampling_params import SamplingParams
from .scheduler import CacheCounts, Scheduler

__all__ = ["Delta", "Engine"]


@dataclass(frozen=True)
class Delta:
    """What a step added to one sequence."""

    request_id: int
    index: int
    text: str
    """New text; ``""`` while it is uncertain, and for requests that neither stream nor have stop
    strings."""
    token_id: int | None
    finish_reason: str | None
    error: str | None = None
    """Why it failed, where ``finish_reason`` is ``"error"``."""


class Engine:
    """Continuous batching of requests over one model and one paged cache.

    Requests may be added and aborted between any two steps. One that cannot be served is refused
    when it is added; one that fails later fails alone.

    Args:
        model: The model; its attention layers are bound to ``cache`` here.
        cache: Memory of the keys and values.
        tokenizer: Turns text into tokens and back; without one, prompts are token ids and
            outputs have no text.
        max_num_seqs: The most sequences that run at the same time.
        max_num_batched_tokens: The most tokens of one step; longer prompts are cut into chunks.
        max_model_len: The most tokens of a sequence, prompt and output.
        enable_prefix_caching: Whether requests share the blocks of common beginnings.
        enforce_eager: On a GPU, launch the kernels of decode steps one by one, not as graphs.
        seed: Where the seeds of requests without one come from.

    Attributes:
        on_step: Called in every step when its blocks are taken and nothing is computed yet: for
            those who want to watch the pool.
    """

    def __init__(
        self,
        model: PagedModel,
        cache: KVCache,
        tokenizer: Any = None,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        enforce_eager: bool = False,
        seed: int = 0,
    ) -> None:
        if max_num_seqs < 1 or max_num_batched_tokens < max_num_seqs:
            raise RequestError(
                f"max_num_seqs={max_num_seqs} and max_num_batched_tokens={max_num_batched_tokens}: "
                "expected at least one sequence, and a token a step for each"
            )
        most = model.max_step_tokens
        if most is not None and max_num_batched_tokens > most:
            raise RequestError(
                f"max_num_batched_tokens={max_num_batched_tokens}: {model.name} runs exactly with "
                f"at most {most} tokens a step"
            )
        self.model, self.cache, self.tokenizer = model, cache, tokenizer
        self.max_model_len = max_model_len
        self._index = PrefixIndex(cache.block_size)
        self.pool = BlockPool(cache.num_blocks, on_reuse=self._index.forget)
        self.scheduler = Scheduler(
            self.pool,
            self._index if enable_prefix_caching else None,
            block_size=cache.block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        self._runner = Runner(
            model,
            cache,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            enforce_eager=enforce_eager,
        )
        self._requests: dict[int, Request] = {}
        self._streaming: set[int] = set()
        self._next_id = 0
        self._seeds = random.Random(seed)
        self.on_step: Callable[[], None] | None = None

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the sequences that wait for a step: their first, or one after preemption."""
        return sum(len(sequence.token_ids) for sequence in self.scheduler.waiting)

    @property
    def counts(self) -> CacheCounts:
        """What happened in the cache since the start."""
        return self.scheduler.counts

    def encode(self, prompt: str | SequenceOf[int]) -> list[int]:
        """The token ids of a prompt, each of them proven to be in the vocabulary.

        Raises:
            RequestError: The prompt is empty, has an id that the model does not know, or is text
                and there is no tokenizer.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    "the prompt is text but the model directory has no tokenizer: "
                    "give a list of token ids"
                )
            # A tokenizer may put a token of its own before no text at all.
            token_ids = list(self.tokenizer.encode(_unicode(prompt))) if prompt else []
        else:
            token_ids = _integers(prompt)
        if not token_ids:
            raise RequestError("the prompt is empty: give at least one token")
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self.model.vocab_size:
                raise RequestError(
                    f"the prompt has token id {token_id}, expected 0 to "
                    f"{self.model.vocab_size - 1}: the model has no such token"
                )
        return token_ids

    def validate(self, prompt: str | SequenceOf[int], params: SamplingParams) -> list[int]:
        """Prove that a request can be served; returns the prompt's token ids.

        Raises:
            RequestError: It never can: see ``encode``; or the prompt leaves no room for a token,
                or ``n`` sequences cannot run together, or a stop token or a biased one is not in
                the vocabulary.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params is {params!r}, expected SamplingParams(…)")
        token_ids = self.encode(prompt)
        if len(token_ids) >= self.max_model_len:
            limit = "of the model or as it was asked for: shorten it"
            if self.max_model_len >= self.cache.num_tokens:
                blocks = f"{self.cache.num_blocks} blocks of {self.cache.block_size}"
                limit = f"what {blocks} hold: shorten it, or use more blocks"
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens, expected fewer than max_model_len="
                f"{self.max_model_len}, {limit}"
            )
        if params.n > self.scheduler.max_num_seqs:
            raise RequestError(
                f"n={params.n} is more than max_num_seqs={self.scheduler.max_num_seqs}: "
                "ask for fewer samples, or raise max_num_seqs"
            )
        named = {
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": dict(params.logit_bias or ()),
        }
        for name, named_ids in named.items():
            if named_ids and max(named_ids) >= self.model.vocab_size:
                raise RequestError(
                    f"{name} has {max(named_ids)}, expected 0 to {self.model.vocab_size - 1}"
                )
        Detokenizer(self.tokenizer, params)  # refuses stop strings when there is no text
        return token_ids

    def add_request(
        self,
        prompt: str | SequenceOf[int],
        params: SamplingParams | None = None,
        *,
        salt: str | None = None,
        stream: bool = False,
    ) -> int:
        """Queue a request and return its id.

        Args:
            prompt: Text, or token ids.
            params: How to continue it.
            salt: Cached prefixes are shared only between requests of the same salt.
            stream: Whether deltas carry text as soon as it is certain.

        Raises:
            RequestError: It can never be served. Nothing has changed.
        """
        if params is None:
            params = SamplingParams()
        token_ids = self.validate(prompt, params)
        if salt is not None and not isinstance(salt, str):
            raise RequestError(f"salt={salt!r}: expected a string, or None")
        text = prompt if isinstance(prompt, str) else None
        return self.add_validated(text, token_ids, params, salt=salt, stream=stream)

    def add_validated(
        self,
        text: str | None,
        token_ids: list[int],
        params: SamplingParams,
        *,
        salt: str | None = None,
        stream: bool = False,
    ) -> int:
        """Queue what ``validate`` has seen: ``token_ids`` are what it returned for ``text``."""
        request = Request(
            request_id=self._next_id,
            prompt=text,
            prompt_token_ids=tuple(token_ids),
            params=params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            salt=salt,
        )
        sequence = self._new_sequence(request, token_ids)
        self._next_id += 1
        self._requests[request.request_id] = request
        if stream or params.stop:
            self._streaming.add(request.request_id)
        self.scheduler.add(sequence)
        return request.request_id

    def abort(self, request_id: int) -> None:
        """Stop a request and give its blocks back; one that is unknown or done changes nothing."""
        request = self._requests.get(request_id)
        for sequence in request.sequences if request else ():
            if not sequence.is_finished:
                self._finish(sequence, "abort")
                with suppress(Exception):  # what text there is
                    self._detokenize_all(sequence)

    def step(self) -> list[Delta]:
        """Compute one forward pass and sample; returns what was added to each sequence.

        What the model or the sampler raises leaves the requests as they were: their tokens are
        computed again, and the next step may be tried at once. A sequence whose tokens cannot be
        turned into text fails alone.
        """
        try:
            return self._step()
        except BaseException:
            self.scheduler.restart()
            raise

    def _step(self) -> list[Delta]:
        step = self.scheduler.schedule()
        if not step.sequences:
            return []
        if self.on_step is not None:
            self.on_step()
        ready = [
            sequence.num_pending == chunk
            for sequence, chunk in zip(step.sequences, step.num_tokens, strict=True)
        ]
        logits = self._runner.run(step, ready)
        sampling = self.scheduler.complete(step)
        rows, drawers = [], []
        for row, sequence in enumerate(sampling):
            family = [sequence, *self._fork(sequence)]
            drawers += family
            rows += [row] * len(family)
        if not drawers:
            return []
        if len(rows) != logits.shape[0]:
            logits = logits[send(np.array(rows), logits.device)]
        tokens = sample(logits, [self._sampling_input(sequence) for sequence in drawers])
        return [
            self._advance(sequence, token) for sequence, token in zip(drawers, tokens, strict=True)
        ]

    def is_finished(self, request_id: int) -> bool:
        """Whether nothing more will be generated for a request.

        Raises:
            RequestError: There is no such request, or its output has been taken.
        """
        return self._find(request_id).is_finished

    def take_output(self, request_id: int) -> RequestOutput:
        """What a request has so far; a finished one is forgotten by this.

        Raises:
            RequestError: There is no such request, or its output has been taken.
        """
        request = self._find(request_id)
        if request.is_finished:
            del self._requests[request_id]
            self._streaming.discard(request_id)
        return request.output()

    def check(self) -> None:
        """Prove that no block is lost, held twice or remembered wrongly.

        Raises:
            AssertionError: With the numbers that do not add up.
        """
        self.scheduler.check()
        self._index.check()

    def _find(self, request_id: int) -> Request:
        if request_id not in self._requests:
            raise RequestError(
                f"there is no request {request_id}: it was never added, or its output was taken"
            )
        return self._requests[request_id]

    # --- one sequence ----------------------------------------------------------------------

    def _new_sequence(self, request: Request, token_ids: list[int]) -> Sequence:
        sequence = Sequence(
            request,
            index=len(request.sequences),
            token_ids=list(token_ids),
            table=BlockTable(self.pool, self.cache.block_size),
            chain=self._index.chain(request.salt),
            detokenizer=Detokenizer(self.tokenizer, request.params),
        )
        request.sequences.append(sequence)
        return sequence

    def _fork(self, parent: Sequence) -> list[Sequence]:
        """The other samples of a prompt that has just been computed."""
        request, children = parent.request, []
        while not request.is_forked:
            child = self._new_sequence(request, parent.token_ids)
            self.scheduler.fork(parent, child)
            children.append(child)
        return children

    def _sampling_input(self, sequence: Sequence) -> SamplingInput:
        request = sequence.request
        params = request.params
        forbidden: tuple[int, ...] = ()
        if sequence.num_output_tokens < params.min_tokens:
            ends = () if params.ignore_eos else self.model.eos_token_ids
            forbidden = (*ends, *(params.stop_token_ids or ()))
        return SamplingInput(
            params=params,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=sequence.output_token_ids,
            seed=request.seed,
            index=sequence.index,
            forbidden_token_ids=forbidden,
        )

    def _advance(self, sequence: Sequence, token: SampledToken) -> Delta:
        """Take a sampled token in, and see whether it was the last one."""
        request_id, index = sequence.request.request_id, sequence.index
        if token.error is not None:
            self.scheduler.distrust(sequence)
            with suppress(Exception):  # what text there is
                self._detokenize_all(sequence)
            return self._fail(sequence, token.error)
        sequence.token_ids.append(token.token_id)
        if token.logprob is not None:
            sequence.logprobs.append(((token.token_id, token.logprob), *token.top_logprobs))
        reason = self._stop_reason(sequence, token.token_id)
        try:
            text = self._detokenize(sequence, token.token_id, is_last=reason is not None)
        except Exception as error:
            return self._fail(sequence, f"the tokenizer failed: {type(error).__name__}: {error}")
        if sequence.detokenizer.finished:
            reason, sequence.stop_reason = "stop", sequence.detokenizer.stop_reason
        if reason is not None:
            self._finish(sequence, reason)
        return Delta(request_id, index, text, token.token_id, reason)

    def _fail(self, sequence: Sequence, error: str) -> Delta:
        sequence.error = error
        self._finish(sequence, "error")
        return Delta(
            sequence.request.request_id, sequence.index, "", None, sequence.finish_reason, error
        )

    def _detokenize(self, sequence: Sequence, token_id: int, *, is_last: bool) -> str:
        """What a stream's new token makes certain; with the last one, all that was held back."""
        if sequence.request.request_id not in self._streaming:
            if is_last:
                self._detokenize_all(sequence)
            return ""
        is_text = not self._is_stop_token(sequence, token_id)
        text = sequence.detokenizer.append([token_id] if is_text else [])
        return text + sequence.detokenizer.flush() if is_last else text

    def _detokenize_all(self, sequence: Sequence) -> None:
        """Of a sequence that ends here and did not stream: its text; of a stream, the rest."""
        if sequence.request.request_id not in self._streaming:
            token_ids = sequence.output_token_ids
            if token_ids and self._is_stop_token(sequence, token_ids[-1]):
                token_ids = token_ids[:-1]
            sequence.detokenizer.append(token_ids)
        sequence.detokenizer.flush()

    def _stop_reason(self, sequence: Sequence, token_id: int) -> str | None:
        params = sequence.request.params
        if self._is_stop_token(sequence, token_id):
            if token_id in (params.stop_token_ids or ()):
                sequence.stop_reason = token_id
            return "stop"
        longest = math.inf if params.max_tokens is None else params.max_tokens
        if sequence.num_output_tokens >= longest or len(sequence.token_ids) >= self.max_model_len:
            return "length"
        return None

    def _is_stop_token(self, sequence: Sequence, token_id: int) -> bool:
        params = sequence.request.params
        if token_id in (params.stop_token_ids or ()):
            return True
        return not params.ignore_eos and token_id in self.model.eos_token_ids

    def _finish(self, sequence: Sequence, reason: str) -> None:
        sequence.finish_reason = reason
        self.scheduler.finish(sequence)


def _unicode(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt has half a character at position {error.start} "
            f"({prompt[error.start]!r}), expected text: decode its bytes with errors='replace'"
        ) from None
    return prompt


def _integers(prompt: Any) -> list[int]:
    token_ids = list(prompt) if is_list(prompt) else None
    if token_ids is None or not all(map(is_index, token_ids)):
        raise RequestError(
            f"the prompt is {type(prompt).__name__}, expected text or a list of token ids (int)"
        )
    return [operator.index(token_id) for token_id in token_ids]

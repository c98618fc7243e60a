"""The engine: requests come and go while steps are computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from ..errors import RequestError
from ..kv_cache import BlockTable, PrefixIndex
from ..kv_cache.storage import KVCache
from ..models.paged_model import PagedModel
from ..transfer import send
from .detokenizer import Detokenizer
from .intake import Intake
from .progress import Delta, Progress
from .request import Request, RequestOutput, Sequence
from .runner import Runner
from .sampler import SampledToken, SamplingInput, sample
from .sampling_params import SamplingParams
from .scheduler import CacheCounts, Scheduler

__all__ = ["Engine"]


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
        self._intake = Intake(tokenizer, model.vocab_size, cache, max_num_seqs, max_model_len)
        self._progress = Progress(model.eos_token_ids, max_model_len)
        self.pool = cache.pool
        self._index = PrefixIndex(self.pool)
        self.scheduler = Scheduler(
            self.pool,
            self._index if enable_prefix_caching else None,
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
        """The token ids of a prompt, as ``Intake.encode`` proves them."""
        return self._intake.encode(prompt)

    def validate(self, prompt: str | SequenceOf[int], params: SamplingParams) -> list[int]:
        """The token ids of a prompt that can be served: see ``Intake.validate``."""
        return self._intake.validate(prompt, params)

    def add_request(
        self,
        prompt: str | SequenceOf[int],
        params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        stream: bool = False,
    ) -> int:
        """Queue a request and return its id.

        Args:
            prompt: Text, or token ids.
            params: How to continue it.
            cache_salt: Cached prefixes are shared only between requests of the same salt.
            stream: Whether deltas carry text as soon as it is certain.

        Raises:
            RequestError: It can never be served. Nothing has changed.
        """
        if params is None:
            params = SamplingParams()
        token_ids = self.validate(prompt, params)
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise RequestError(f"cache_salt={cache_salt!r}: expected a string, or None")
        text = prompt if isinstance(prompt, str) else None
        return self.add_validated(text, token_ids, params, cache_salt=cache_salt, stream=stream)

    def add_validated(
        self,
        text: str | None,
        token_ids: list[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        stream: bool = False,
    ) -> int:
        """Queue what ``validate`` has seen: ``token_ids`` are what it returned for ``text``."""
        request = Request(
            request_id=self._next_id,
            prompt=text,
            prompt_token_ids=tuple(token_ids),
            params=params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            cache_salt=cache_salt,
            makes_text_early=stream or bool(params.stop),
        )
        sequence = self._new_sequence(request, token_ids)
        self._next_id += 1
        self._requests[request.request_id] = request
        self.scheduler.add(sequence)
        return request.request_id

    def abort(self, request_id: int) -> None:
        """Stop a request and give its blocks back; one that is unknown or done changes nothing."""
        request = self._requests.get(request_id)
        for sequence in request.sequences if request else ():
            if not sequence.is_finished:
                self._finish(sequence, "abort")
                self._progress.write_out(sequence)

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
        return request.output()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes: after the model's weights have changed they are wrong.

        Raises:
            RequestError: Requests are running; they hold blocks that were computed before.
        """
        if self.has_unfinished:
            raise RequestError("requests are running: finish or abort them first")
        self._index.clear()

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
            table=BlockTable(self.pool),
            block_hashes=self._index.block_hashes(cache_salt=request.cache_salt),
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
        is_early = sequence.num_output_tokens < params.min_tokens
        forbidden = self._progress.ends(sequence) if is_early else ()
        return SamplingInput(
            params=params,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=sequence.output_token_ids,
            seed=request.seed,
            index=sequence.index,
            forbidden_token_ids=forbidden,
        )

    def _advance(self, sequence: Sequence, token: SampledToken) -> Delta:
        """Take a sampled token in; blocks of a sequence that ends go back."""
        if token.error is not None:
            self.scheduler.distrust(sequence)
        delta = self._progress.advance(sequence, token)
        if delta.finish_reason is not None:
            self._finish(sequence, delta.finish_reason)
        return delta

    def _finish(self, sequence: Sequence, reason: str) -> None:
        sequence.finish_reason = reason
        self.scheduler.finish(sequence)

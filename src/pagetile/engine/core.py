"""The engine: adds requests, runs steps and returns deltas.

With ``async_scheduling`` a step is launched before the tokens of the previous one are read, so
that the device does not wait for the host. Text is made while the device computes::

    step()   launch N+1 ─► read N ─► text, ends, deltas of N
    device   ├── N ──┤├── N+1 ──┤
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from collections.abc import Sequence as SequenceOf
from typing import Any

from ..errors import EngineDeadError, RequestError
from ..kv_cache import BlockTable, PrefixIndex
from ..kv_cache.storage import KVCache
from ..models.paged_model import PagedModel
from .detokenizer import Detokenizer
from .input_processor import InputProcessor
from .ngram import NgramProposer, verify
from .output_processor import advance, append_plain, detokenize_rest, fail
from .outputs import CacheCounts, Delta, RequestOutput
from .prefix_groups import PrefixGrouper
from .prompt_logprobs import score_next
from .request import Request, Sequence
from .runner import Runner
from .sampling_params import SamplingParams
from .scheduler import Scheduler
from .step import LaunchedStep
from .step_masks import encode_bad_words
from .structured_outputs import GrammarCompiler, explain_failure, fill_masks
from .text_decoder import TextDecoder
from .token_text import TokenText


class Engine:
    """Continuous batching of requests over one model and one paged cache.

    Requests may be added and aborted between any two steps. One that cannot be served is refused
    when it is added; one that fails later fails alone.

    Args:
        model: The model; its attention layers are bound to ``cache`` here.
        cache: Memory of the keys and values.
        tokenizer: Turns text into tokens and back; without one, prompts are token ids and
            outputs have no text.
        max_num_seqs: As the arguments that follow: one of ``LLM``'s.
        num_speculative_tokens: The most tokens of a draft; 0: no speculation.

    Attributes:
        token_text: Text and bytes of single tokens.
        decode_token: Returns the text of a token id; ``None`` without a tokenizer.
        grammars: Compiles constraints on outputs, and keeps them for the requests that use them.
        inputs: Tokenizes prompts and refuses requests that can never be served.
        death: Why no step can be computed: its device is lost, or a fork copied it. Else ``None``.
        on_step: Called in every step after its blocks were taken, before it is computed.
        in_use: Held by the call, the stream or the ``AsyncLLM`` that steps the engine.
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
        async_scheduling: bool | None = None,
        num_speculative_tokens: int = 0,
        seed: int = 0,
    ) -> None:
        self.model, self.cache, self.tokenizer = model, cache, tokenizer
        self.max_model_len = max_model_len
        self._decoder = None if tokenizer is None else TextDecoder(tokenizer, model.vocab_size)
        self.token_text = TokenText(tokenizer)
        self.decode_token = None if tokenizer is None else self.token_text.text
        self.grammars = GrammarCompiler(tokenizer, model.vocab_size, model.eos_token_ids)
        self.inputs = InputProcessor(
            tokenizer, model.vocab_size, self.grammars, cache, max_num_seqs, max_model_len
        )
        self.pool = cache.pool
        self._index = PrefixIndex(self.pool)
        self._runner = Runner(model, cache, max_num_seqs, max_model_len)
        grouper, kernels = None, self._runner.kernels
        if kernels is not None:
            grouper = PrefixGrouper(self.pool.block_size, kernels.min_saved_tokens)
            if not enforce_eager:
                kernels.make_graphs(max_num_batched_tokens)
        self.scheduler = Scheduler(
            self.pool,
            self._index if enable_prefix_caching else None,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            grouper=grouper,
        )
        is_ahead = model.device.type == "cuda" if async_scheduling is None else async_scheduling
        self._most_in_flight = 2 if is_ahead and not num_speculative_tokens else 1
        self._num_speculative_tokens = num_speculative_tokens
        self._in_flight: deque[LaunchedStep] = deque()
        self._deltas: list[Delta] = []
        """Of completed steps; those of a step that fails half-way are returned by the next."""
        self._to_score: deque[Sequence] = deque()
        """New sequences whose prompt's log-probabilities are computed first."""
        self._last_read = 0.0
        self._requests: dict[Hashable, Request] = {}
        self._numbers, self._num_grammars = itertools.count(), 0
        self._is_torn = False
        """Whether a call has begun to change requests or blocks, and has not ended."""
        self.in_use = threading.Lock()
        self._seeds = random.Random(seed)
        self.on_step: Callable[[], None] | None = None
        self.death: Exception | None = None

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would do anything."""
        is_pending = self._in_flight or self._to_score or self._deltas or self._is_torn
        return self.scheduler.has_work or bool(is_pending)

    @property
    def counts(self) -> CacheCounts:
        """Counts of cache events since the start."""
        return self.scheduler.counts

    def add_request(
        self,
        prompt: str | SequenceOf[int],
        params: SamplingParams | None = None,
        *,
        request_id: Hashable = None,
        cache_salt: str | None = None,
        stream: bool = False,
        token_ids: SequenceOf[int] | None = None,
        generates: bool = True,
        arrival_time: float | None = None,
    ) -> Hashable:
        """Queue a request and return its id.

        Args:
            prompt: Text, or token ids.
            params: Sampling parameters.
            request_id: The request's id; ``None`` takes the next number.
            cache_salt: Cached prefixes are shared only between requests of the same salt.
            stream: Whether deltas carry text as soon as it is certain. Chunks of other prompts are
                then limited, so that they do not delay its tokens.
            token_ids: What ``inputs.validate`` returned for ``prompt`` and ``params``, if called.
            generates: Whether to continue the prompt, or only to compute the log-probabilities of
                its tokens.
            arrival_time: When it came, in seconds of ``time.perf_counter``; ``None`` is now.

        Raises:
            RequestError: It can never be served, or ``request_id`` is in use. Nothing has changed.
            EngineDeadError: The device is lost.
        """
        self.require_device()
        if params is None:
            params = SamplingParams()
        if token_ids is None:
            token_ids = self.inputs.validate(prompt, params)
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise RequestError(f"cache_salt={cache_salt!r}: expected a string, or None")
        if request_id is None:
            request_id = self.make_id()
        elif request_id in self._requests:
            raise RequestError(f"request_id={request_id!r} is in use: take its output first")
        form, words = params.structured_outputs, params.bad_words
        request = Request(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=tuple(token_ids),
            params=params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            bad_words=encode_bad_words(self.tokenizer, words) if words else (),
            cache_salt=cache_salt,
            stream=stream,
            make_grammar=None if form is None else self.grammars.compile(form),
            decode_token=self.decode_token,
            generates=generates,
            arrival_time=time.perf_counter() if arrival_time is None else arrival_time,
        )
        request.sequences.append(self._new_sequence(request, 0))
        self._start_change()
        self._requests[request_id] = request
        if request.needs_scores:
            self._to_score += request.sequences
        else:
            self.scheduler.add(request.sequences[0])
        self._is_torn = False
        return request_id

    def make_id(self) -> int:
        """Return the id of the next request without one; a caller may have numbered others."""
        return next(number for number in self._numbers if number not in self._requests)

    def abort(self, request_id: Hashable) -> list[Delta]:
        """End a request, free its blocks, and return its last deltas; none if it has ended."""
        self._start_change()
        request, last = self._requests.get(request_id), list[Delta]()
        if request is not None and not request.is_finished:
            self._to_score = deque(s for s in self._to_score if s.request is not request)
            self.add_samples(request)
            for sequence in [s for s in request.sequences if not s.is_finished]:
                self.scheduler.finish(sequence, "abort")
                text = detokenize_rest(sequence)
                last.append(Delta(request_id, sequence.index, text, None, "abort"))
        try:
            self._drain_idle()
        except Exception:  # of steps whose sequences have all ended
            self._start_over()
        self._is_torn = False
        return last

    def step(self) -> list[Delta]:
        """Launch a step, and return the deltas of the oldest step in flight.

        An error of the model or the sampler leaves the requests as they were: tokens that were not
        returned are computed again, and the next step may be tried at once. So does an interruption
        (``KeyboardInterrupt``), but deltas of that step may be lost. A sequence whose
        tokens cannot be turned into text fails alone. A lost device raises EngineDeadError.
        """
        self.require_device()
        self._start_change()
        try:
            admits = not self._to_score or score_next(self, self._to_score, self._deltas)
            while len(self._in_flight) < self._most_in_flight and self._launch(admits):
                pass
            if self._in_flight:
                self._complete()
            self._drain_idle()
            deltas, self._deltas = self._deltas, []
            self._is_torn = False
            return deltas
        except BaseException:
            self._start_over()
            self.require_device()
            raise

    def is_finished(self, request_id: Hashable) -> bool:
        """Whether nothing more will be generated for a request; it must be known."""
        return self._find(request_id).is_finished

    def take_output(self, request_id: Hashable) -> RequestOutput:
        """Return a request's output so far; a finished request is removed."""
        request = self._find(request_id)
        if request.is_finished:
            self._deltas = [delta for delta in self._deltas if delta.request_id != request_id]
            del self._requests[request_id]
        return request.output()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes: see ``LLM.reset_prefix_cache``."""
        if self.has_unfinished:
            raise RequestError("requests are running: finish or abort them first")
        self._index.clear()

    def check(self) -> None:
        """Assert that no block is lost, held twice or indexed wrongly."""
        self.scheduler.check()
        self._index.check()

    def _find(self, request_id: Hashable) -> Request:
        if request_id not in self._requests:
            raise RequestError(
                f"there is no request {request_id}: it was never added, or its output was taken"
            )
        return self._requests[request_id]

    # --- one step --------------------------------------------------------------------------

    def _launch(self, admits: bool) -> bool:
        """Schedule and launch a step; False if there is nothing to compute now."""
        # With a grammar the next tokens depend on those that are not read.
        if not self.scheduler.has_work or (self._in_flight and self._has_grammar()):
            return False
        step = self.scheduler.schedule(in_flight=bool(self._in_flight), admits=admits)
        if step is None or not step.sequences:
            return False
        if not step.is_decode:  # samples fork in the step that computes their prompt
            for parent in [s for s in step.sampled if not s.is_decoding]:
                for sequence in self.add_samples(parent.request):
                    self.scheduler.fork(step, parent, sequence)
        if self.on_step is not None:
            self.on_step()
        masks = None
        if self._has_grammar():
            masks = fill_masks([s.grammar for s in step.sampled], self.model.vocab_size)
        self._in_flight.append(self._runner.run(step, masks))
        return True

    def _complete(self) -> None:
        """Read the oldest step in flight, and append its tokens to their sequences."""
        launched = self._in_flight[0]
        step, tokens = launched.step, self._runner.read(launched)
        self._in_flight.popleft()
        self._record_time(launched)
        kept: SequenceOf[int] = range(len(step.sampled))
        if step.drafts:
            kept = verify(step, tokens.token_ids, self.scheduler.counts)
            self._runner.sampler.accept(
                [launched.rows[at] for at in kept], [tokens.token_ids[at] for at in kept]
            )
        self.scheduler.complete(step)
        sampled, token_ids = step.sampled, tokens.token_ids
        if not (step.drafts or tokens.logprobs or tokens.errors):
            kept = append_plain(sampled, token_ids, self._deltas)
        for at in kept:
            sequence, error = sampled[at], tokens.errors.get(at)
            if sequence.is_finished:
                continue  # it ended a step ago, or within its draft: this token is one too many
            if error is None:
                delta = advance(sequence, token_ids[at], tokens.logprobs.get(at))
            else:
                self.scheduler.evict_from_prefix_cache(sequence)
                delta = fail(sequence, explain_failure(sequence.grammar, error))
            self._deltas.append(delta)
            if delta.finish_reason is not None:
                self.scheduler.finish(sequence, delta.finish_reason)

    def _record_time(self, launched: LaunchedStep) -> None:
        """Tell the chunk sizer a step's time: since its launch, or since the last was read."""
        now, step = time.perf_counter(), launched.step
        num_decode = step.num_tokens.count(1) + len(step.drafts)
        num_prompt = sum(step.num_tokens) - num_decode - sum(map(len, step.drafts.values()))
        seconds = now - max(self._last_read, launched.started)
        self.scheduler.chunks.record(seconds, num_decode, num_prompt)
        self._last_read = now

    def _start_change(self) -> None:
        """Call it before requests or blocks are changed, and unset ``_is_torn`` after that."""
        if self._is_torn:
            self._start_over()
        self._is_torn = True

    def _start_over(self) -> None:
        """Rebuild all state from the known tokens, wherever a step or another call has failed.

        Steps in flight are waited for and dropped: their tokens are sampled again.
        """
        try:
            self._runner.wait()
        except Exception as error:
            self.death = error
        self._in_flight.clear()
        unfinished = list[Sequence]()
        for request in self._requests.values():
            for sequence in request.sequences:
                if not sequence.is_finished:
                    self._rebuild(sequence)
            unfinished += [s for s in request.sequences if not s.is_finished]
        self._to_score = deque(s for s in unfinished if s.request.needs_scores)
        self.scheduler.restart([s for s in unfinished if not s.request.needs_scores])
        self._is_torn = False

    def require_device(self) -> None:
        """Raise EngineDeadError if no step can be computed any more: see ``death``."""
        if self.death is not None:
            raise EngineDeadError(f"the engine has stopped: {self.death}") from self.death

    def _drain_idle(self) -> None:
        """Complete steps in flight whose sequences have all ended."""
        while self._in_flight and not self.scheduler.has_work:
            self._complete()

    def _has_grammar(self) -> bool:
        return self._num_grammars > 0 and any(s.grammar for s in self.scheduler.running)

    # --- one sequence ----------------------------------------------------------------------

    def _rebuild(self, old: Sequence) -> None:
        """Replace a sequence by one of the same tokens, without blocks; they may end it."""
        new, end = self._new_sequence(old.request, old.index), None
        for at, token_id in enumerate(old.output_token_ids):
            logprobs = None if old.logprobs is None else old.logprobs[at]
            end = advance(new, token_id, logprobs).finish_reason
        new.num_tokens = len(new.token_ids)
        old.request.sequences[old.index] = new
        if end is not None:
            self.scheduler.finish(new, end)

    def add_samples(self, request: Request) -> list[Sequence]:
        """Add the samples that a request gets when it forks, or ends before that; return them."""
        indices = range(len(request.sequences), request.params.n)
        request.sequences += [self._new_sequence(request, index) for index in indices]
        return request.sequences[indices.start :]

    def _new_sequence(self, request: Request, index: int) -> Sequence:
        params, num_prompt = request.params, len(request.prompt_token_ids)
        longest = min(self.max_model_len, num_prompt + (params.max_tokens or self.max_model_len))
        ends = () if params.ignore_eos else self.model.eos_token_ids
        decoder = self._decoder if params.detokenize else None
        sequence = Sequence(
            request,
            index,
            token_ids=list(request.prompt_token_ids),
            table=BlockTable(self.pool),
            block_hashes=self._index.block_hashes(cache_salt=request.cache_salt),
            decoder=decoder,
            max_len=longest,
            end_token_ids=frozenset((*ends, *(params.stop_token_ids or ()))),
        )
        if request.stream or params.stop:
            sequence.detokenizer = Detokenizer(decoder, params, request.prompt_token_ids)
        if request.make_grammar is not None:
            sequence.grammar = request.make_grammar()
            self._num_grammars += 1
        elif self._num_speculative_tokens:  # not with a grammar: it cannot be rolled back
            sequence.proposer = NgramProposer(sequence.token_ids, self._num_speculative_tokens)
        return sequence

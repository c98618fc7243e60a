"""``AsyncLLM``: many coroutines generate at once, and one thread runs the engine.

::

    event loop   submit ──┐                          ┌── deltas of one step, all requests at once
                          ▼                          │   (call_soon_threadsafe)
    engine thread     inbox ──► add · abort · call ──► step ──► publish ──► …

The engine is touched by its thread alone. What a coroutine wants done there is a function in the
inbox, which is emptied before every step; so an abort frees its blocks before the next one.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import EngineDeadError, GenerationError, OverloadedError, RequestError
from .core import Engine
from .llm import LLM
from .output_processor import Delta
from .prompt_logprobs import PromptLogprobs, score_prompt
from .request import CompletionOutput, RequestOutput
from .request_stream import RequestStream
from .sampling_params import SamplingParams

__all__ = ["AsyncLLM", "StepReport"]

Prompt = str | Sequence[int]
T = TypeVar("T")

# Parts of a message that say the device itself is gone, after which no step can succeed.
_DEVICE_LOST = ("CUDA error", "device-side assert", "HIP error", "NCCL error", "Xid")


@dataclass(frozen=True)
class StepReport:
    """What one step did, for metrics. Called on the engine's thread."""

    seconds: float
    num_tokens: int
    """Tokens that were sampled."""
    num_running: int
    num_waiting: int
    intervals: Mapping[float, int]
    """Seconds since a request's token before, and how many requests waited so long."""


class AsyncLLM:
    """Serves an engine's requests to coroutines.

    Args:
        llm: An ``LLM`` or its ``Engine``. Nothing else may use it from now on.
        max_queued_seqs: Sequences that are accepted beyond the ``max_num_seqs`` that can run.
            More raise ``OverloadedError``.
        num_threads: Threads that turn prompts into tokens.

    Attributes:
        observers: Called after every step with a ``StepReport``, on the engine's thread.
        on_death: Called once, with the error, when the engine cannot go on; on its thread.

    Example:
        >>> import asyncio
        >>> async def main():
        ...     async with AsyncLLM.load(num_blocks=64) as llm:
        ...         params = SamplingParams(temperature=0, max_tokens=4)
        ...         async for output in llm.generate("def add(a, b):", params):
        ...             pass
        ...         return len(output.outputs[0].token_ids)
        >>> asyncio.run(main())
        4
    """

    def __init__(
        self, llm: LLM | Engine, *, max_queued_seqs: int = 1024, num_threads: int = 2
    ) -> None:
        self.engine: Engine = llm.engine if isinstance(llm, LLM) else llm
        self.max_num_seqs = self.engine.scheduler.max_num_seqs
        self.max_queued_seqs = max_queued_seqs
        self.observers: list[Callable[[StepReport], None]] = []
        self.on_death: Callable[[BaseException], None] | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, RequestStream] = {}  # of the event loop's side
        self._admitted: dict[Any, RequestStream] = {}  # of the engine's, by the engine's ids
        self._to_score: list[RequestStream] = []
        self._in_step: list[Any] = []
        self._intervals: dict[float, int] = {}  # of the step that was just published
        self._num_seqs = 0
        self._next_id = 0
        self._is_draining = self._is_closed = False
        self._death: BaseException | None = None
        self._workers = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        self.engine.on_step = self._note_step
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, model: str | os.PathLike[str] | Any = None, **options: Any) -> AsyncLLM:
        """Load a checkpoint: arguments as for ``LLM``."""
        return cls(LLM(model, **options))

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def is_alive(self) -> bool:
        """Whether requests can still be served."""
        return self._death is None and not self._is_closed

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused because the engine is about to stop."""
        return self._is_draining

    @property
    def death(self) -> BaseException | None:
        """Why the engine stopped serving; ``None`` while it does."""
        return self._death

    @property
    def num_requests(self) -> int:
        """Requests that were accepted and are not finished."""
        return len(self._streams)

    @property
    def num_free_seqs(self) -> int:
        """Sequences that would still be accepted."""
        return max(0, self.max_num_seqs + self.max_queued_seqs - self._num_seqs)

    # --- of the event loop ------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Continue a prompt; yields everything generated so far, the finished output last.

        Closing the iterator, or cancelling its task, aborts the request.

        Raises:
            RequestError: It can never be served.
            OverloadedError: Too many requests are waiting.
            GenerationError: It failed while it was computed.
            EngineDeadError: The engine has stopped.
        """
        stream = await self.submit(prompt, params, request_id=request_id, cache_salt=cache_salt)
        texts, tokens = [""] * stream.params.n, [[] for _ in range(stream.params.n)]  # type: ignore[var-annotated]
        try:
            while deltas := await stream.take():
                for delta in deltas:
                    texts[delta.index] += delta.text
                    if delta.token_id is not None:
                        tokens[delta.index].append(delta.token_id)
                if stream.output is not None:
                    break
                outputs = tuple(
                    CompletionOutput(i, texts[i], tuple(tokens[i]), None) for i in range(len(texts))
                )
                yield RequestOutput(
                    deltas[0].request_id, stream.prompt, stream.prompt_token_ids, outputs, False, 0
                )
            yield await stream.result()
        finally:
            stream.close()

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
    ) -> AsyncIterator[Delta]:
        """Continue a prompt; yields text as soon as it is certain. Errors as ``generate``."""
        stream = await self.submit(prompt, params, request_id=request_id, cache_salt=cache_salt)
        try:
            while deltas := await stream.take():
                for delta in deltas:
                    yield delta
            await stream.result()
        finally:
            stream.close()

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        stream: bool = True,
        prompt_logprobs: int | None = None,
        generates: bool = True,
    ) -> RequestStream:
        """Queue a request; the caller must ``close`` what is returned, or read it to its end.

        Args:
            prompt: Text, or token ids.
            params: How to continue it.
            request_id: Its name in messages, for ``abort``; must be unique among the running.
            cache_salt: Cached prefixes are shared only between requests of the same salt.
            stream: Whether deltas come as soon as they are certain; otherwise only the result.
            prompt_logprobs: Report the log-probability of every prompt token but the first, and
                so many of the likeliest alternatives.
            generates: Whether to continue the prompt, or only score it.

        Raises:
            RequestError: It can never be served.
            OverloadedError: Too many requests are waiting, or the engine is draining.
            EngineDeadError: The engine has stopped.
        """
        if params is None:
            params = SamplingParams()
        self.check_capacity(params.n)
        token_ids = await self.run_in_worker(self._validate, prompt, params)
        self.check_capacity(params.n)  # others came while the prompt was turned into tokens
        if request_id is None:
            request_id = f"request-{self._next_id}"
            self._next_id += 1
        if request_id in self._streams:
            raise RequestError(f"request_id={request_id!r} is running: choose another")
        handle = RequestStream(
            request_id,
            prompt if isinstance(prompt, str) else None,
            tuple(token_ids),
            params,
            is_streamed=stream,
            prompt_logprobs=prompt_logprobs,
            generates=generates,
            on_close=self._close_stream,
        )
        self._streams[request_id] = handle
        self._num_seqs += params.n
        handle.arrived = time.perf_counter()
        self._inbox.put(lambda: self._admit(handle, cache_salt))
        return handle

    def check_capacity(self, num_seqs: int = 1) -> None:
        """Raise OverloadedError or EngineDeadError unless so many sequences would be accepted."""
        if not self.is_alive:
            raise EngineDeadError(f"the engine has stopped: {self._death or 'it was closed'}")
        if self._is_draining:
            raise OverloadedError("the server is shutting down: send the request elsewhere")
        limit = self.max_num_seqs + self.max_queued_seqs
        if self._num_seqs + num_seqs > limit:
            raise OverloadedError(
                f"{self._num_seqs} sequences run or wait, at most {limit} are accepted: "
                "try again later"
            )

    def abort(self, request_id: str) -> None:
        """End a request early; its output so far has finish_reason "abort". Unknown: no effect."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self._inbox.put(lambda: self._abort(stream))

    async def drain(self, timeout: float | None = None) -> bool:
        """Accept nothing more and wait for what runs; True when all of it finished in time.

        Args:
            timeout: Seconds after which requests that still run are aborted.
        """
        self._is_draining = True
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._streams and self.is_alive:
            if deadline is not None and time.monotonic() >= deadline:
                for request_id in list(self._streams):
                    self.abort(request_id)
                return False
            await asyncio.sleep(0.02)
        return True

    async def close(self) -> None:
        """Stop the engine's thread. Requests that still run fail with EngineDeadError."""
        if not self._is_closed:
            self._is_closed = True
            self._inbox.put(lambda: None)
            await asyncio.to_thread(self._thread.join)
            self._workers.shutdown(wait=False, cancel_futures=True)

    async def run_in_engine(self, function: Callable[[], T]) -> T:
        """The result of a function that is called between two steps, on the engine's thread."""
        if not self.is_alive:
            raise EngineDeadError(f"the engine has stopped: {self._death or 'it was closed'}")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def call() -> None:
            try:
                result = function()
            except BaseException as error:
                loop.call_soon_threadsafe(_fail, future, error)
            else:
                loop.call_soon_threadsafe(_resolve, future, result)

        self._inbox.put(call)
        return await future

    async def run_in_worker(self, function: Callable[..., T], *arguments: Any) -> T:
        """The result of a function that is called on one of the tokenising threads."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, function, *arguments)

    def _validate(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        return self.engine.validate(prompt, params)

    def _close_stream(self, stream: RequestStream) -> None:
        if self._streams.pop(stream.request_id, None) is not None:
            self._num_seqs -= stream.params.n
            if stream.output is None and stream.error is None:
                self._inbox.put(lambda: self._abort(stream))

    # --- of the engine's thread -------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                is_busy = self.engine.has_unfinished or bool(self._to_score)
                self._call_commands(wait=not is_busy)
                if self._to_score:
                    self._score_next()
                if self.engine.has_unfinished:
                    self._step()
        except BaseException as error:
            self._die(error)
        finally:
            self._end_all(self._death or EngineDeadError("the engine was closed"))

    def _call_commands(self, *, wait: bool) -> None:
        if wait:
            self._inbox.get()()
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            command()

    def _step(self) -> None:
        start = time.perf_counter()
        self._in_step = list(self._admitted)  # if it fails before it has chosen its sequences
        try:
            deltas = self.engine.step()
        except Exception as error:
            self._fail_step(error)
            return
        end = time.perf_counter()
        self._intervals = {}
        if deltas:
            self._publish(deltas, end)
        if self.observers:
            scheduler = self.engine.scheduler
            report = StepReport(
                end - start,
                len(deltas),
                len(scheduler.running),
                len(scheduler.waiting),
                self._intervals,
            )
            for observer in self.observers:
                observer(report)

    def _note_step(self) -> None:
        """Remember the requests of the step that begins: they fail if it does."""
        self._in_step = [s.request.request_id for s in self.engine.scheduler.running]

    def _publish(self, deltas: Sequence[Delta], now: float) -> None:
        """Give one step's deltas to their streams: one wake-up of the event loop for all."""
        news: dict[Any, list[Delta]] = {}
        for delta in deltas:
            news.setdefault(delta.request_id, []).append(delta)
        batches: dict[asyncio.AbstractEventLoop, list[_News]] = {}
        for request_id, own in news.items():
            stream = self._admitted.get(request_id)
            if stream is None:
                continue
            if stream.stepped is not None:
                interval = now - stream.stepped
                self._intervals[interval] = self._intervals.get(interval, 0) + 1
            is_first, stream.stepped = stream.stepped is None, now
            output = None
            has_ended = any(delta.finish_reason is not None for delta in own)
            if has_ended or (stream.is_streamed and stream.params.logprobs is not None):
                output = self.engine.take_output(request_id)
                if output.finished:
                    del self._admitted[request_id]
            elif not (stream.is_streamed or is_first):
                continue  # nothing is read before the end
            batches.setdefault(stream.loop, []).append((stream, own, output, now))
        for loop, batch in batches.items():
            _call_soon(loop, _deliver, batch)

    def _admit(self, stream: RequestStream, cache_salt: str | None) -> None:
        if stream.is_closed:
            return
        if stream.prompt_logprobs is not None and stream.prompt_scores is None:
            stream.cache_salt = cache_salt
            self._to_score.append(stream)
            return
        try:
            request_id = self.engine.add_request(
                stream.prompt_token_ids,
                stream.params,
                cache_salt=cache_salt,
                stream=stream.is_streamed,
            )
        except Exception as error:
            _call_soon(stream.loop, stream.fail, error)
            return
        stream.engine_id = request_id
        self._admitted[request_id] = stream

    def _score_next(self) -> None:
        """Compute one prompt's log-probabilities; it waits while the pool lacks the blocks."""
        stream = self._to_score[0]
        try:
            top = stream.prompt_logprobs
            assert top is not None
            scores = score_prompt(self.engine, stream.prompt_token_ids, top)
        except Exception as error:
            self._to_score.pop(0)
            self._report_failure(stream, error)
            return
        if scores is None:
            return
        self._to_score.pop(0)
        stream.prompt_scores = scores
        if stream.generates:
            self._admit(stream, stream.cache_salt)
        else:
            _call_soon(stream.loop, stream.finish, _only_scored(stream, scores))

    def _abort(self, stream: RequestStream) -> None:
        if stream in self._to_score:
            self._to_score.remove(stream)
            error = GenerationError(f"request {stream.request_id} was aborted")
            _call_soon(stream.loop, stream.fail, error)
            return
        request_id = stream.engine_id
        if self._admitted.pop(request_id, None) is None:
            return
        self.engine.abort(request_id)
        output = self.engine.take_output(request_id)
        _call_soon(stream.loop, stream.finish, output)

    def _fail_step(self, error: Exception) -> None:
        """Fail the requests of a step that raised, and no other."""
        if type(error).__name__ == "AcceleratorError" or any(w in str(error) for w in _DEVICE_LOST):
            raise error  # the device is lost: _serve ends
        for request_id in set(self._in_step):
            stream = self._admitted.pop(request_id, None)
            self.engine.abort(request_id)
            self.engine.take_output(request_id)
            if stream is not None:
                self._report_failure(stream, error)
        self.engine.check()  # raises, and ends the thread, if a block was lost

    def _report_failure(self, stream: RequestStream, error: Exception) -> None:
        failure = GenerationError(f"a step of this request failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        _call_soon(stream.loop, stream.fail, failure)

    def _die(self, error: BaseException) -> None:
        self._death = error
        if self.on_death is not None:
            self.on_death(error)

    def _end_all(self, reason: BaseException) -> None:
        while not self._inbox.empty():
            self._inbox.get_nowait()()
        streams = [*self._admitted.values(), *self._to_score]
        self._admitted.clear()
        self._to_score.clear()
        for stream in streams:
            error = EngineDeadError(f"the engine has stopped: {reason}")
            _call_soon(stream.loop, stream.fail, error)


_News = tuple[RequestStream, list[Delta], RequestOutput | None, float]
"""A stream, one step's deltas of it, everything so far where it is known, and when it came."""


def _deliver(batch: list[_News]) -> None:
    for stream, deltas, output, now in batch:
        stream.put(deltas, output, now)


def _only_scored(stream: RequestStream, scores: PromptLogprobs) -> RequestOutput:
    output = CompletionOutput(0, "", (), "length", logprobs=())
    return RequestOutput(0, stream.prompt, stream.prompt_token_ids, (output,), True, 0)


def _call_soon(
    loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any
) -> None:
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        if not loop.is_closed():  # one that is closed has nobody left to tell
            raise


def _resolve(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)

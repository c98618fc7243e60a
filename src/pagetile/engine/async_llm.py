"""``AsyncLLM``: many coroutines generate at once, and one thread runs the engine.

::

    event loop   submit ──┐                          ┌── deltas of one step, all requests at once
                          ▼                          │   (call_soon_threadsafe)
    engine thread     inbox ──► add · abort · call ──► step ──► publish ──► …

Only its thread touches the engine. Coroutines post functions to the inbox, which are called before
every step, so an abort frees its blocks before the next step.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ..errors import EngineDeadError, OverloadedError, RequestError
from .core import Engine
from .engine_thread import EngineThread, call_soon
from .input_processor import Prompt, check_params
from .keywords import ExplainsAbsentNames, refuse_unknown_keywords
from .llm import LLM
from .logprobs import LogprobDicts
from .outputs import CompletionOutput, Delta, RequestOutput
from .prompt_dictionary import parse_prompt
from .request_stream import RequestStream
from .sampling_params import SamplingParams
from .vllm_names import ASYNC_LLM_NAMES, CALL_OPTIONS

T = TypeVar("T")


class AsyncLLM(metaclass=ExplainsAbsentNames, of_vllm=ASYNC_LLM_NAMES):
    """Serves an engine's requests to coroutines.

    Args:
        llm: An ``LLM`` or its ``Engine``. Nothing else may use it before ``close``.
        max_queued_seqs: Sequences that are accepted beyond the ``max_num_seqs`` that can run.
            More raise ``OverloadedError``.
        num_threads: Threads that turn prompts into tokens.

    Raises:
        RequestError: It is in use: by an open stream, say, or another ``AsyncLLM``.
        EngineDeadError: Its device is lost.

    Attributes:
        thread: The engine's thread, which calls ``thread.observers`` and ``thread.on_death``.

    Examples:
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
        if not isinstance(llm, (LLM, Engine)):
            raise RequestError(
                f"llm is of type {type(llm).__name__}, expected an LLM: AsyncLLM.load(model, ...) "
                "makes both"
            )
        if isinstance(llm, LLM):
            llm._check_idle()
        self.engine: Engine = llm.engine if isinstance(llm, LLM) else llm
        self._default_params = (
            llm.get_default_sampling_params() if isinstance(llm, LLM) else SamplingParams()
        )
        self.max_num_seqs = self.engine.scheduler.max_num_seqs
        self.max_queued_seqs = max_queued_seqs
        self._streams: dict[str, RequestStream] = {}
        self._num_seqs = 0
        self._next_id = 0
        self._is_draining = self._is_closed = False
        self._workers = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        self.thread = EngineThread(self.engine)

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
        return self.death is None and not self._is_closed

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused because the engine is about to stop."""
        return self._is_draining

    @property
    def death(self) -> BaseException | None:
        """Why the engine stopped serving; ``None`` while it does."""
        return self.thread.death or self.engine.death

    def get_tokenizer(self) -> Any:
        """As ``LLM.get_tokenizer``."""
        return self.engine.tokenizer

    @property
    def num_requests(self) -> int:
        """Requests that were accepted and are not finished."""
        return len(self._streams)

    # --- of the event loop ------------------------------------------------------------------

    @refuse_unknown_keywords(CALL_OPTIONS)
    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Continue a prompt; yields everything generated so far, the finished output last.

        Closing the iterator, or cancelling its task, aborts the request.

        Raises:
            RequestError: The request can never be served.
            OverloadedError: Too many requests are waiting.
            GenerationError: It failed while it was computed.
            EngineDeadError: The engine has stopped.
        """
        stream = await self.submit(prompt, sampling_params, request_id, cache_salt=cache_salt)
        texts, tokens = [""] * stream.params.n, [[] for _ in range(stream.params.n)]  # type: ignore[var-annotated]
        ends: list[tuple[str | None, str | int | None]] = [(None, None)] * stream.params.n
        try:
            while deltas := await stream.take():
                for delta in deltas:
                    texts[delta.index] += delta.text
                    ends[delta.index] = delta.finish_reason, delta.stop_reason
                    if delta.token_id is not None:
                        tokens[delta.index].append(delta.token_id)
                if stream.output is not None:
                    break
                outputs = tuple(
                    CompletionOutput(i, text, tuple(tokens[i]), *ends[i], self._logprobs(stream, i))
                    for i, text in enumerate(texts)
                )
                yield RequestOutput(
                    stream.request_id,
                    stream.prompt,
                    stream.prompt_token_ids,
                    outputs,
                    finished=False,
                    num_cached_tokens=0,
                    prompt_logprobs=self._prompt_logprobs(stream),
                )
            yield await stream.result()
        finally:
            stream.close()

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
    ) -> AsyncIterator[Delta]:
        """Continue a prompt; yields text as soon as it is certain. Errors as ``generate``.

        The first delta has the ``prompt_logprobs``, if requested.
        """
        stream = await self.submit(prompt, sampling_params, request_id, cache_salt=cache_salt)
        try:
            while deltas := await stream.take():
                for delta in deltas:
                    delta.request_id = stream.request_id
                    yield delta
            await stream.result()
        finally:
            stream.close()

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        stream: bool = True,
        generates: bool = True,
    ) -> RequestStream:
        """Queue a request; the caller must ``close`` the returned stream, or read it to its end.

        Args:
            prompt: Text, token ids, or a dictionary as for ``LLM.generate``.
            sampling_params: How to continue it; ``None`` takes
                ``LLM.get_default_sampling_params()``.
            request_id: Its name in messages and for ``abort``, unique among running requests.
            cache_salt: Cached prefixes are shared only between requests of the same salt.
            stream: Whether deltas come as soon as they are certain; otherwise only the result.
            generates: Whether to continue the prompt, or only to compute the log-probabilities of
                its tokens.

        Raises:
            RequestError: The request can never be served.
            OverloadedError: Too many requests are waiting, or the engine is draining.
            EngineDeadError: The engine has stopped.
        """
        params = self._default_params if sampling_params is None else sampling_params
        check_params(params)
        if isinstance(prompt, Mapping):
            prompt, own_salt = parse_prompt(prompt)
            if own_salt is not None and cache_salt not in (None, own_salt):
                raise RequestError("cache_salt is given twice: in the prompt, and beside it")
            cache_salt = cache_salt or own_salt
        self.check_capacity(min(params.n, self.max_num_seqs))  # more are refused for good
        token_ids = await self.run_in_worker(self._validate, prompt, params)
        self.check_capacity(params.n)  # other requests may have come during tokenization
        if request_id is None:
            request_id = f"request-{self._next_id}"
            self._next_id += 1
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={request_id!r}, expected text")
        if request_id in self._streams:
            raise RequestError(f"request_id={request_id!r} is running: choose another")
        handle = RequestStream(
            request_id,
            prompt if isinstance(prompt, str) else None,
            tuple(token_ids),
            params,
            is_streamed=stream,
            generates=generates,
            on_close=self._close_stream,
        )
        self._streams[request_id] = handle
        self._num_seqs += params.n
        handle.arrived = time.perf_counter()
        self.thread.admit(handle, cache_salt)
        return handle

    def check_capacity(self, num_seqs: int = 1) -> None:
        """Raise OverloadedError or EngineDeadError unless so many sequences would be accepted."""
        if not self.is_alive:
            raise EngineDeadError(f"the engine has stopped: {self.death or 'it was closed'}")
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
            self.thread.abort(stream)

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
            await asyncio.to_thread(self.thread.close)
            self._workers.shutdown(wait=False)  # a prompt that waits there is refused in its turn

    async def run_in_engine(self, function: Callable[[], T]) -> T:
        """Call a function on the engine's thread between two steps, and return its result."""
        if not self.is_alive:
            raise EngineDeadError(f"the engine has stopped: {self.death or 'it was closed'}")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def call() -> None:
            try:
                result = function()
            except BaseException as error:
                call_soon(loop, _fail, future, error)
            else:
                call_soon(loop, _resolve, future, result)

        self.thread.post(call)
        return await future

    async def run_in_worker(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on one of the tokenizing threads, and return its result."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, function, *arguments)

    def _logprobs(self, stream: RequestStream, index: int) -> LogprobDicts | None:
        if stream.params.logprobs is None:
            return None
        return LogprobDicts(stream.logprobs[index].copy(), self.engine.decode_token)

    def _prompt_logprobs(self, stream: RequestStream) -> LogprobDicts | None:
        if stream.params.prompt_logprobs is None:
            return None
        return LogprobDicts(stream.prompt_logprobs, self.engine.decode_token)

    def _validate(self, prompt: Any, params: SamplingParams) -> list[int]:
        self.check_capacity(0)
        return self.engine.inputs.validate(prompt, params)

    def _close_stream(self, stream: RequestStream) -> None:
        if self._streams.pop(stream.request_id, None) is not None:
            self._num_seqs -= stream.params.n
            if stream.output is None:  # it may have failed here while the engine computes it
                self.thread.abort(stream)


def _resolve(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)

"""One request as its event loop sees it: a stream of deltas, then the result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .logprobs import TokenLogprobs
from .outputs import Delta, RequestOutput
from .sampling_params import SamplingParams


class RequestStream:
    """The results, present and future, of a request submitted to an ``AsyncLLM``.

    Only the event loop that submitted it uses it. The engine's thread reaches it through that loop,
    except for ``engine_id`` and ``stepped``, which only that thread writes.

    Attributes:
        request_id: The request's id.
        prompt: Its text; ``None`` for token ids.
        prompt_token_ids: The tokens of the prompt.
        params: Sampling parameters.
        is_streamed: Whether ``take`` returns deltas before the end.
        output: The finished output; ``None`` before.
        error: Why it failed; ``None`` if it did not.
        logprobs: For each sample, its tokens' log-probabilities so far, if requested.
        prompt_logprobs: Those of the prompt, from the first delta on, if requested.
        arrived: When it was queued, in seconds of ``time.perf_counter``.
        first_token: When its first token was sampled; ``None`` before.
        stepped: When its latest token was sampled; for the engine's thread.
        on_first_token: Called once, when ``first_token`` is known.
        on_end: Called once, when there is an output or an error.
        on_deltas: Called on the loop with new deltas while a ``take`` waits that has returned all
            earlier ones; it saves a switch of tasks. If it returns False, ``take`` returns them.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        *,
        is_streamed: bool,
        generates: bool,
        on_close: Callable[[RequestStream], None],
    ) -> None:
        self.request_id, self.prompt = request_id, prompt
        self.prompt_token_ids, self.params = prompt_token_ids, params
        self.is_streamed, self.generates = is_streamed, generates
        self.prompt_logprobs: Sequence[TokenLogprobs | None] = ()
        self.output: RequestOutput | None = None
        self.error: BaseException | None = None
        self.logprobs: list[list[TokenLogprobs]] = [[] for _ in range(params.n)]
        self.loop = asyncio.get_running_loop()
        self.engine_id: Any = None
        self.stepped: float | None = None
        self.is_closed = False
        self.arrived = time.perf_counter()
        self.first_token: float | None = None
        self.on_first_token: Callable[[RequestStream], None] | None = None
        self.on_end: Callable[[RequestStream, float], None] | None = None
        self.on_deltas: Callable[[list[Delta]], bool] | None = None
        self._on_close = on_close
        self._deltas: list[Delta] = []
        self._waiters: set[asyncio.Future[None]] = set()

    async def take(self) -> list[Delta]:
        """Wait for deltas, and return all since the last call; empty after the last one.

        Raises:
            GenerationError: It failed while it was computed.
            EngineDeadError: The engine has stopped.
        """
        while not self._deltas:
            if self.error is not None:
                raise self.error
            if self.output is not None:
                return []
            await self._wait()
        deltas, self._deltas = self._deltas, []
        return deltas

    async def result(self) -> RequestOutput:
        """The finished output.

        Raises:
            GenerationError: It, or one of its samples, failed while it was computed;
                ``NoTokenLeftError`` if its own parameters are the cause.
            EngineDeadError: The engine has stopped.
        """
        while self.output is None and self.error is None:
            await self._wait()
        if self.error is not None:
            raise self.error
        assert self.output is not None
        for sample in self.output.outputs:
            if sample.error is not None:
                raise sample.error_type(f"sample {sample.index} failed: {sample.error}")
        return self.output

    def close(self) -> None:
        """Abort the request if it still runs; the rest of its output cannot be read any more."""
        if not self.is_closed:
            self.is_closed, self.on_deltas = True, None
            self._on_close(self)

    # --- called on the loop, for the engine's thread ----------------------------------------

    def put(self, deltas: list[Delta], output: RequestOutput | None, now: float) -> None:
        """Add one step's deltas, and the finished output if there is one."""
        if self.first_token is None and any(delta.token_id is not None for delta in deltas):
            self.first_token = now
            if self.on_first_token is not None:
                self.on_first_token(self)
        if self.params.prompt_logprobs is not None:
            for delta in deltas:
                if delta.prompt_logprobs is not None:
                    self.prompt_logprobs = delta.prompt_logprobs.tokens
        if self.is_streamed:
            if self.params.logprobs is not None:
                for delta in deltas:
                    if delta.logprobs is not None:
                        self.logprobs[delta.index].append(delta.logprobs)
            if self.on_deltas is not None and self._is_awaited and self.on_deltas(deltas):
                deltas = []
            self._deltas += deltas
        if output is not None and output.finished:
            self.finish(output)
        elif deltas and self.is_streamed:
            self._wake()

    def finish(self, output: RequestOutput) -> None:
        """Set the finished output."""
        if self.output is None:
            self.output = replace(output, request_id=self.request_id, prompt=self.prompt)
            if output.prompt_logprobs is not None:  # a prompt that is only scored has no delta
                self.prompt_logprobs = output.prompt_logprobs.tokens
            for sample in output.outputs:
                known = self.logprobs[sample.index]
                if sample.logprobs is not None:
                    known.extend(t for t in sample.logprobs.tokens[len(known) :] if t is not None)
            self._end()

    def fail(self, error: BaseException) -> None:
        """Set the error: there will be no output."""
        if self.error is None and self.output is None:
            self.error = error
            self._end()

    def _end(self) -> None:
        self._wake()
        self.close()
        if self.on_end is not None:  # last: no caller waits if it raises
            self.on_end(self, time.perf_counter())

    @property
    def _is_awaited(self) -> bool:
        """Return whether a ``take`` waits that has returned all earlier deltas."""
        return not all(waiter.done() for waiter in self._waiters)

    async def _wait(self) -> None:
        waiter = self.loop.create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

"""The thread that runs ``AsyncLLM``'s engine, and the delivery of deltas to event loops."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..errors import EngineDeadError, GenerationError, RequestError
from .core import Engine
from .outputs import Delta, RequestOutput
from .request import Sequence as OneSequence
from .request_stream import RequestStream

# Parts of error messages of a lost device, after which no step can succeed.
_DEVICE_LOST = ("CUDA error", "device-side assert", "HIP error", "NCCL error", "Xid")


@dataclass(frozen=True)
class StepReport:
    """Counts and times of one step, for metrics; observers get it on the engine's thread."""

    seconds: float
    num_tokens: int
    """Tokens that were sampled."""
    intervals: Mapping[float, int]
    """Times between tokens in seconds, and the number of requests for each."""


class EngineThread:
    """Steps an engine on its own thread, the only one that uses the engine.

    Other threads post functions to its inbox, which are called before the next step.

    Attributes:
        observers: Called after every step, with a ``StepReport``.
        on_death: Called once, with the error, when the engine cannot go on.
        death: That error; ``None`` while the engine goes on.

    Raises:
        RequestError: The engine is in use.
        EngineDeadError: Its device is lost.
    """

    def __init__(self, engine: Engine) -> None:
        engine.require_device()
        self._engine = engine
        self.observers: list[Callable[[StepReport], None]] = []
        self.on_death: Callable[[BaseException], None] | None = None
        self.death: BaseException | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._admitted: dict[Any, RequestStream] = {}  # by the engine's ids
        self._in_step: list[OneSequence] = []
        self._intervals: dict[float, int] = {}  # of the step that was just published
        self._mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}
        self._is_closed = self._has_ended = False
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        if not engine.in_use.acquire(blocking=False):
            raise RequestError(
                "the engine is in use, by an open stream or another AsyncLLM, say: close that first"
            )
        try:
            engine.on_step = self._note_step
            self._thread.start()
        except BaseException:
            engine.in_use.release()
            raise

    def post(self, function: Callable[[], None]) -> None:
        """Call a function between two steps."""
        self._inbox.put(function)
        if self._has_ended:  # after the check of the caller
            self._answer_inbox()

    def close(self) -> None:
        """Stop after the current step; remaining requests fail with EngineDeadError."""
        self._is_closed = True
        self._inbox.put(lambda: None)
        self._thread.join()

    def admit(self, stream: RequestStream, cache_salt: str | None) -> None:
        """Add a request before the next step."""
        self.post(lambda: self._admit(stream, cache_salt))

    def abort(self, stream: RequestStream) -> None:
        """End a request before the next step."""
        self.post(lambda: self._abort(stream))

    # --- on the thread ----------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                self._call_commands(wait=not self._engine.has_unfinished)
                if self._engine.has_unfinished or self._engine.death is not None:
                    self._step()
        except BaseException as error:
            self._die(error)
        finally:
            self._end_all()
            self._engine.on_step = None
            self._engine.in_use.release()

    def _call_commands(self, *, wait: bool) -> None:
        if wait:
            self._inbox.get()()
        for command in self._commands():
            command()

    def _commands(self) -> Iterator[Callable[[], None]]:
        """Yield what is in the inbox, and what is posted meanwhile."""
        with suppress(queue.Empty):
            while True:
                yield self._inbox.get_nowait()

    def _step(self) -> None:
        start = time.perf_counter()
        self._note_step()
        try:
            deltas = self._engine.step()
        except Exception as error:
            self._fail_step(error)
            return
        end = time.perf_counter()
        self._intervals = {}
        if deltas:
            self._publish(deltas, end)
        if self.observers:
            report = StepReport(end - start, len(deltas), self._intervals)
            for observer in self.observers:
                observer(report)

    def _note_step(self) -> None:
        """Remember the requests of the step that begins: they fail if it does."""
        self._in_step = self._engine.scheduler.running.copy()

    def _publish(self, deltas: Sequence[Delta], now: float) -> None:
        """Deliver one step's deltas to their streams, with one wake-up of each event loop."""
        news: dict[Any, list[Delta]] = {}
        for delta in deltas:
            own = news.get(delta.request_id)
            if own is None:
                news[delta.request_id] = [delta]
            else:
                own.append(delta)
        batches: dict[asyncio.AbstractEventLoop, list[News]] = {}
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
            if has_ended and self._engine.is_finished(request_id):
                output = self._engine.take_output(request_id)
                del self._admitted[request_id]
            elif not (stream.is_streamed or is_first):
                continue  # nothing is read before the end
            batches.setdefault(stream.loop, []).append((stream, own, output, now))
        for loop, batch in batches.items():
            mailbox = self._mailboxes.get(loop)
            if mailbox is None:
                self._mailboxes = {k: v for k, v in self._mailboxes.items() if not k.is_closed()}
                mailbox = self._mailboxes[loop] = Mailbox(loop)
            mailbox.post(batch)

    def _admit(self, stream: RequestStream, cache_salt: str | None) -> None:
        # One that is closed by now is admitted, too: its abort comes next, and answers who waits.
        if self._has_ended:
            self._report_end(stream)
            return
        try:
            request_id = self._engine.add_request(
                stream.prompt_token_ids,
                stream.params,
                cache_salt=cache_salt,
                stream=stream.is_streamed,
                token_ids=stream.prompt_token_ids,
                generates=stream.generates,
                arrival_time=stream.arrived,
            )
        except Exception as error:
            call_soon(stream.loop, stream.fail, error)
            return
        stream.engine_id = request_id
        self._admitted[request_id] = stream

    def _abort(self, stream: RequestStream) -> None:
        request_id = stream.engine_id
        if request_id not in self._admitted:
            return
        last = self._engine.abort(request_id)  # if it raises, the stream must still get the error
        output = self._engine.take_output(request_id)
        del self._admitted[request_id]
        call_soon(stream.loop, stream.put, last, output, time.perf_counter())

    def _fail_step(self, error: Exception) -> None:
        """Fail only the requests of a step that raised."""
        if self._engine.death is not None:
            raise self._engine.death
        if type(error).__name__ == "AcceleratorError" or any(w in str(error) for w in _DEVICE_LOST):
            raise error  # the device is lost: _serve ends
        # If nothing was running, the requests that the step would have started are to blame.
        failed = {sequence.request.request_id for sequence in self._in_step} or {*self._admitted}
        for request_id in failed:
            stream = self._admitted.pop(request_id, None)
            self._engine.abort(request_id)
            self._engine.take_output(request_id)
            if stream is not None:
                self._report_failure(stream, error)
        self._engine.check()  # raises, and ends the thread, if a block was lost

    def _report_failure(self, stream: RequestStream, error: Exception) -> None:
        failure = GenerationError(f"a step of this request failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        call_soon(stream.loop, stream.fail, failure)

    def _die(self, error: BaseException) -> None:
        self.death = error
        if self.on_death is not None:
            self.on_death(error)

    def _end_all(self) -> None:
        """Answer all remaining requests, for each of which a caller waits."""
        self._has_ended = True
        self._answer_inbox()
        while self._admitted:
            request_id, stream = self._admitted.popitem()
            with suppress(Exception):  # the LLM may be used again: it must have no requests left
                self._engine.abort(request_id)
                self._engine.take_output(request_id)
            self._report_end(stream)

    def _answer_inbox(self) -> None:
        """Call what is left in the inbox after the end; a thread that posts later calls it, too."""
        for command in self._commands():
            with suppress(Exception):  # an abort reads the device, which may be lost
                command()

    def _report_end(self, stream: RequestStream) -> None:
        reason = self.death or "it was closed"
        error = EngineDeadError(f"the engine has stopped: {reason}")
        call_soon(stream.loop, stream.fail, error)


News = tuple[RequestStream, list[Delta], RequestOutput | None, float]
"""A stream, its deltas of one step, its finished output if there is one, and the time."""


class Mailbox:
    """Queue of deltas from the engine's thread to the streams of one event loop.

    Steps that finish while the loop is busy are delivered together, so a stream then gets the
    deltas of all of them at once. A loop that keeps up is woken once a step.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._steps: deque[list[News]] = deque()
        self._is_due = False

    def post(self, step: list[News]) -> None:
        """Queue one step's news for delivery; called on the engine's thread."""
        if self._loop.is_closed():
            return  # no caller waits
        self._steps.append(step)
        if not self._is_due:
            self._is_due = True
            call_soon(self._loop, self._deliver)

    def _deliver(self) -> None:
        self._is_due = False  # first, because news posted from now on may miss this delivery
        steps = self._steps
        news = steps.popleft() if steps else []
        if steps:
            merged = {entry[0]: entry for entry in news}
            while steps:
                for entry in steps.popleft():
                    earlier = merged.get(entry[0])
                    merged[entry[0]] = entry if earlier is None else _add(earlier, entry)
            news = list(merged.values())
        for stream, deltas, output, now in news:
            try:
                stream.put(deltas, output, now)
            except Exception as error:  # of one connection; other streams are still served
                stream.fail(error)
                stream.close()


def _add(earlier: News, later: News) -> News:
    """Join two steps' news of one stream; the earlier time is kept, for the first token."""
    stream, deltas, output, now = earlier
    return stream, deltas + later[1], later[2] or output, now


def call_soon(
    loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any
) -> None:
    """Call a function on an event loop, unless the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        if not loop.is_closed():  # a closed loop has no waiting caller
            raise

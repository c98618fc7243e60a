"""Handles one completion request: from its prompts to its choices, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from encodings import utf_8
from functools import cached_property
from typing import Any

from starlette.requests import Request

from ..engine.outputs import Delta
from ..engine.request_stream import RequestStream
from .generation import (
    Added,
    TextEvents,
    Usage,
    close_all,
    event_of,
    join,
    note_usage,
    results,
    server_sent_events,
    write_text,
)
from .logprobs import completion_logprobs, prompt_logprobs
from .output_form import output_form
from .schemas.completions import CompletionRequest
from .state import Server, server_of
from .streaming import Write


@dataclass
class _Sample:
    """State of one sample of a stream: what was sent so far."""

    has_begun: bool = False
    num_tokens: int = 0
    num_logprobs: int = 0
    num_chars: int = 0
    """Whole characters of the tokens whose log-probabilities were sent."""
    utf8: utf_8.IncrementalDecoder = field(
        default_factory=lambda: utf_8.IncrementalDecoder("replace")
    )

    @property
    def offset(self) -> int:
        """Offset of its next token in the text; inside of a character, the offset after it."""
        return self.num_chars + bool(self.utf8.buffer)


class Completion:
    """A completion request that the engine is processing.

    Attributes:
        streams: The engine's answers, one a prompt.
    """

    def __init__(self, server: Server, request: Request, body: CompletionRequest) -> None:
        self.server, self.request, self.body = server, request, body
        self.streams: list[RequestStream] = []
        self._head = {
            "id": server.new_id("cmpl", body.request_id),
            "object": "text_completion",
            "created": server.created_now(),
            "model": body.model or server.model_name,
        }
        self._echoes: list[str] = []
        self._samples: list[list[_Sample]] = []

    @classmethod
    async def start(cls, request: Request, body: CompletionRequest) -> Completion:
        """Validate a request and queue its prompts: all of them, or none."""
        server = server_of(request)
        server.check_model(body.model)
        body.check(server.limits)
        prompts = body.prompts(server.limits)
        generates = body.max_tokens != 0
        scored = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            scored = max(scored or 0, body.logprobs)
        params = body.sampling_params(
            server.config,
            max_tokens=body.max_tokens or (None if generates else 1),
            logprobs=body.logprobs,
            prompt_logprobs=scored,
            structured_outputs=output_form(body),
        )
        server.llm.check_capacity(params.n * len(prompts))
        self = cls(server, request, body)
        try:
            for number, prompt in enumerate(prompts):
                stream = await server.submit(
                    request,
                    body,
                    prompt,
                    params,
                    number=number,
                    stream=bool(body.stream),
                    generates=generates,
                )
                self.streams.append(stream)
                self._echoes.append(await self._echo(stream) if body.echo else "")
                self._samples.append([_Sample() for _ in range(params.n)])
        except BaseException:
            close_all(self.streams)
            raise
        return self

    async def _echo(self, stream: RequestStream) -> str:
        if stream.prompt is not None and self.body.truncate_prompt_tokens is None:
            return stream.prompt
        tokenizer = self.server.tokenizer
        if tokenizer is None:
            return ""
        text = await self.server.llm.run_in_worker(
            lambda: tokenizer.decode(
                list(stream.prompt_token_ids),
                skip_special_tokens=self.body.skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )
        return str(text)

    def close(self) -> None:
        """Abort what still runs."""
        close_all(self.streams)

    # --- the whole answer -------------------------------------------------------------------

    async def answer(self) -> dict[str, Any]:
        """The response."""
        outputs = await results(self.streams)
        usage, choices = Usage(), []
        n = self.body.n or 1
        for number, (stream, output) in enumerate(zip(self.streams, outputs, strict=True)):
            usage.add(output)
            for sample in output.outputs:
                choice: dict[str, Any] = {
                    "index": number * n + sample.index,
                    "text": self._echoes[number] + sample.text,
                    "logprobs": self._new_logprobs(number, sample.index),
                    "finish_reason": sample.finish_reason,
                    "stop_reason": sample.stop_reason,
                }
                if self.body.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = prompt_logprobs(
                        self.server.words, stream.prompt_logprobs
                    )
                if self.body.return_token_ids:
                    choice["token_ids"] = list(sample.token_ids)
                    choice["prompt_token_ids"] = list(output.prompt_token_ids)
                choices.append(choice)
        note_usage(self.request, usage)
        return {**self._head, "choices": choices, "usage": usage.report()}

    # --- piece by piece ---------------------------------------------------------------------

    def events(self) -> AsyncIterator[bytes]:
        """The response as server-sent events."""
        usage_event = self._usage_event if self.body.reports_usage else None
        return server_sent_events(self.request, self.streams, self._encode, usage_event)

    def write_text(self, write: Write) -> None:
        """Write events that only add text directly to the connection."""
        if len(self.streams) == 1:
            write_text(self.streams[0], self._text_events, write)

    @cached_property
    def _text_events(self) -> TextEvents | None:
        """Return a builder of events that only add text; ``None`` if events have more than text."""
        body = self.body
        if body.logprobs is not None or body.return_token_ids or body.echo or body.counts_usage:
            return None
        return TextEvents(
            lambda index, text: {**self._head, "choices": [_choice(index, text)]},
            len(self.streams) * (body.n or 1),
        )

    def _encode(self, number: int, deltas: list[Delta]) -> bytes:
        """Return events of a prompt's deltas, one for each sample with new output."""
        if len(self.streams) == 1 and self._text_events is not None:
            data = self._text_events.encode(deltas)
            if data is not None:
                return data
        return "".join(self._event(number, added) for added in join(deltas)).encode()

    def _event(self, number: int, added: Added) -> str:
        body, stream, text = self.body, self.streams[number], added.text
        sample = self._samples[number][added.index]
        sample.num_tokens += len(added.token_ids)
        if not sample.has_begun:
            sample.has_begun = True
            text = self._echoes[number] + text
        has_fields = body.logprobs is not None or body.return_token_ids
        if not (text or added.finish_reason or has_fields):
            return ""
        choice = _choice(number * (body.n or 1) + added.index, text, added.finish_reason)
        if added.finish_reason is not None:
            choice["stop_reason"] = added.stop_reason
        choice["logprobs"] = self._new_logprobs(number, added.index)
        if body.return_token_ids:
            choice["token_ids"] = added.token_ids
        event: dict[str, Any] = {**self._head, "choices": [choice]}
        if body.counts_usage:
            event["usage"] = Usage(len(stream.prompt_token_ids), sample.num_tokens).report()
        return event_of(event)

    def _new_logprobs(self, number: int, index: int) -> dict[str, Any] | None:
        """Return log-probabilities not sent yet; with ``echo`` the prompt's come first."""
        num_top = self.body.logprobs
        if num_top is None:
            return None
        stream, sample = self.streams[number], self._samples[number][index]
        is_first = sample.num_logprobs == 0
        tokens: list[Any] = stream.logprobs[index][sample.num_logprobs :]
        sample.num_logprobs += len(tokens)
        token_ids = [token.token_id for token in tokens]
        if is_first and self.body.echo:
            tokens = [*stream.prompt_logprobs, *tokens]
            token_ids = [*stream.prompt_token_ids, *token_ids]
        offsets = self._offsets(self._echoes[number], sample, token_ids)
        return completion_logprobs(
            self.server.words, tokens, token_ids, num_top=num_top, offsets=offsets
        )

    def _offsets(self, echo: str, sample: _Sample, token_ids: Sequence[int]) -> list[int]:
        """Return where each token begins in the text, in which special tokens may be left out."""
        words, offsets = self.server.words, []
        for token_id in token_ids:
            offsets.append(sample.offset)
            if token_id in words.special_ids:
                if sample.offset < len(echo):
                    is_left_out = not echo.startswith(words.text(token_id), sample.offset)
                else:
                    is_left_out = self.body.skip_special_tokens
                if is_left_out:
                    continue
            data = words.bytes(token_id)
            if not sample.offset and echo and not echo.startswith(" "):
                data = data.removeprefix(b" ")  # SentencePiece begins a text with a space
            sample.num_chars += len(sample.utf8.decode(data))
        return offsets

    def _usage_event(self, usage: Usage) -> str:
        return event_of({**self._head, "choices": [], "usage": usage.report()})


def _choice(index: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}

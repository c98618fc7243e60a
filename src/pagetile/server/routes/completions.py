"""``/v1/completions``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from ...engine.request_stream import RequestStream
from ..body import described, read_body
from ..generation import Usage, close_all, error_event, merged, note_usage, results
from ..logprobs import completion_logprobs, prompt_logprobs
from ..output_form import output_form
from ..schemas.completions import CompletionRequest
from ..state import Server, server_of
from ..streaming import EventStream, until_disconnected

__all__ = ["router"]

router = APIRouter()
Body = Annotated[CompletionRequest, Depends(read_body(CompletionRequest))]


@router.post("/v1/completions", **described(CompletionRequest, streams=True))
async def create_completion(request: Request, body: Body) -> Response:
    """Continue one or more prompts."""
    completion = await _Completion.start(request, body)
    if body.stream:
        return EventStream(
            completion.events(),
            send_seconds=completion.server.limits.send_seconds,
            on_end=lambda: close_all(completion.streams),
        )
    try:
        return JSONResponse(await until_disconnected(request, completion.answer()))
    finally:
        close_all(completion.streams)


class _Completion:
    """One request's prompts on their way through the engine."""

    def __init__(self, server: Server, request: Request, body: CompletionRequest) -> None:
        self.server, self.request, self.body = server, request, body
        self.head = {
            "id": server.new_id("cmpl"),
            "object": "text_completion",
            "created": server.created_now(),
            "model": body.model or server.model_name,
        }
        self.streams: list[RequestStream] = []
        self.echoes: list[str] = []

    @classmethod
    async def start(cls, request: Request, body: CompletionRequest) -> _Completion:
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
                self.echoes.append(await self._echo(stream) if body.echo else "")
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

    async def answer(self) -> dict[str, Any]:
        """The whole response."""
        outputs = await results(self.streams)
        usage, choices = Usage(), []
        n = self.body.n or 1
        for number, (stream, output) in enumerate(zip(self.streams, outputs, strict=True)):
            usage.add(output)
            for sample in output.outputs:
                choice: dict[str, Any] = {
                    "index": number * n + sample.index,
                    "text": self.echoes[number] + sample.text,
                    "logprobs": self._logprobs(stream, sample.index),
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
        return {**self.head, "choices": choices, "usage": usage.report()}

    def _logprobs(self, stream: RequestStream, sample: int) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        tokens: list[Any] = list(stream.logprobs[sample])
        token_ids = [token.token_id for token in tokens]
        if self.body.echo:
            tokens = [*stream.prompt_logprobs, *tokens]
            token_ids = [*stream.prompt_token_ids, *token_ids]
        return completion_logprobs(self.server.words, tokens, token_ids, num_top=self.body.logprobs)

    async def events(self) -> AsyncIterator[bytes]:
        """The response as server-sent events."""
        body, n = self.body, self.body.n or 1
        options = body.stream_options
        prefix = json.dumps(self.head)[:-1] + ', "choices": ['
        usage = Usage()
        num_reported = [[0] * n for _ in self.streams]
        offsets = [[0] * n for _ in self.streams]
        counts: list[list[int]] = [[0] * n for _ in self.streams]
        has_begun = [[False] * n for _ in self.streams]
        counts_usage = options is not None and options.continuous_usage_stats
        is_plain = not (body.logprobs is not None or body.return_token_ids or counts_usage)
        try:
            async for number, deltas in merged(self.streams):
                stream, pieces = self.streams[number], []
                for delta in deltas:
                    sample = delta.index
                    text = delta.text
                    if is_plain and has_begun[number][sample] and delta.finish_reason is None:
                        if text:  # json.dumps of a whole choice takes ten times as long
                            pieces.append(
                                f'data: {prefix}{{"index": {number * n + sample}, "text": '
                                f'{json.dumps(text)}, "logprobs": null, '
                                '"finish_reason": null}]}\n\n'
                            )
                        continue
                    counts[number][sample] += delta.token_id is not None
                    if not has_begun[number][sample]:
                        has_begun[number][sample] = True
                        offsets[number][sample] = len(self.echoes[number])
                        text = self.echoes[number] + text
                    if not (text or delta.finish_reason or body.logprobs is not None
                            or body.return_token_ids):  # fmt: skip
                        continue
                    choice: dict[str, Any] = {
                        "index": number * n + sample,
                        "text": text,
                        "logprobs": None,
                        "finish_reason": delta.finish_reason,
                    }
                    if delta.finish_reason is not None:
                        choice["stop_reason"] = _stop_reason(stream, sample)
                    if body.logprobs is not None:
                        start = num_reported[number][sample]
                        fresh: list[Any] = stream.logprobs[sample][start:]
                        num_reported[number][sample] += len(fresh)
                        ids = [token.token_id for token in fresh]
                        if start == 0 and body.echo:
                            fresh = [*stream.prompt_logprobs, *fresh]
                            ids = [*stream.prompt_token_ids, *ids]
                            offsets[number][sample] = 0
                        choice["logprobs"] = completion_logprobs(
                            self.server.words, fresh, ids, num_top=body.logprobs,
                            offset=offsets[number][sample],
                        )  # fmt: skip
                        offsets[number][sample] += sum(
                            len(self.server.words.bytes(i).decode("utf-8", "ignore")) for i in ids
                        )
                    if body.return_token_ids:
                        choice["token_ids"] = [] if delta.token_id is None else [delta.token_id]
                    tail = "]"
                    if counts_usage:
                        now = Usage(len(stream.prompt_token_ids), counts[number][sample])
                        tail += ', "usage": ' + json.dumps(now.report())
                    pieces.append(f"data: {prefix}{json.dumps(choice)}{tail}}}\n\n")
                if pieces:
                    yield "".join(pieces).encode()
            for stream in self.streams:
                usage.add(await stream.result())
            if options is not None and options.include_usage:
                yield f'data: {prefix}], "usage": {json.dumps(usage.report())}}}\n\n'.encode()
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not any(map(any, has_begun)):
                raise
            yield error_event(error, self.request)
        finally:
            close_all(self.streams)
            note_usage(self.request, usage)


def _stop_reason(stream: RequestStream, sample: int) -> str | int | None:
    output = stream.output
    return output.outputs[sample].stop_reason if output is not None else None

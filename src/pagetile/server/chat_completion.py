"""One chat request: from its messages to the choices of its answer, whole or streamed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request

from ..engine.request import CompletionOutput
from ..engine.request_stream import RequestStream
from .conversation import as_template_messages, as_template_tools
from .errors import ApiError
from .generation import Usage, error_event, note_usage
from .logprobs import chat_logprobs, prompt_logprobs
from .output_form import forced_call_form, output_form
from .schemas.chat import ChatRequest, NamedTool
from .state import Server, server_of
from .tool_parsers import (
    Call,
    ForcedCalls,
    NamedCall,
    Parsed,
    TextOnly,
    ToolParser,
    choose_parser,
)

__all__ = ["ChatCompletion"]


class ChatCompletion:
    """A chat request on its way through the engine.

    Attributes:
        stream: The engine's answer.
    """

    def __init__(
        self, server: Server, request: Request, body: ChatRequest, stream: RequestStream
    ) -> None:
        self.server, self.request, self.body, self.stream = server, request, body, stream
        self._created = server.created_now()
        self._id = server.new_id("chatcmpl")
        last = body.messages[-1].content if body.echo else None
        self._echo = last if isinstance(last, str) else "".join(p.text for p in last or ())

    @classmethod
    async def start(cls, request: Request, body: ChatRequest) -> ChatCompletion:
        """Validate a request, write its messages down as a prompt, and queue it.

        Raises:
            ApiError: It cannot be served.
        """
        server = server_of(request)
        server.check_model(body.model)
        body.check(server.limits)
        server.llm.check_capacity(body.n or 1)
        offers_tools = bool(body.tools) and body.tool_choice != "none"
        more = _check_tools(server, body) if offers_tools else {}
        form = forced_call_form(body) if offers_tools else None
        more["structured_outputs"] = form or output_form(body)
        messages = as_template_messages(body.messages)
        server.check_length(sum(len(message["content"]) for message in messages), "messages")
        token_ids = await server.template.render(
            messages,
            tools=as_template_tools(body.tools) if offers_tools else None,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template=body.chat_template,
            options=_template_options(server, body),
        )
        longest = body.longest
        if longest is None and (room := server.config.sampling_defaults.get("max_tokens")):
            longest = int(room)
        params = body.sampling_params(
            server.config,
            max_tokens=longest,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            **more,
        )
        stream = await server.submit(request, body, token_ids, params, stream=bool(body.stream))
        return cls(server, request, body, stream)

    # --- the whole answer -------------------------------------------------------------------

    async def answer(self) -> dict[str, Any]:
        """The response."""
        output = await self.stream.result()
        usage = Usage()
        usage.add(output)
        note_usage(self.request, usage)
        response = {
            **self._head("chat.completion"),
            "choices": [self._choice(sample) for sample in output.outputs],
            "usage": usage.report(),
        }
        if self.body.prompt_logprobs is not None:
            response["prompt_logprobs"] = prompt_logprobs(
                self.server.words, self.stream.prompt_logprobs
            )
        if self.body.return_token_ids:
            response["prompt_token_ids"] = list(output.prompt_token_ids)
        return response

    def _choice(self, sample: CompletionOutput) -> dict[str, Any]:
        parser = self.parser()
        first, last = parser.feed(sample.text), parser.finish()
        text, calls = self._echo + first.text + last.text, [*first.calls, *last.calls]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not calls else None,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = [_whole(call) for call in self.kept(calls)]
        choice: dict[str, Any] = {
            "index": sample.index,
            "message": message,
            "logprobs": self._logprobs(sample.index, 0),
            "finish_reason": _finish_reason(sample.finish_reason, bool(calls)),
            "stop_reason": sample.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = list(sample.token_ids)
        return choice

    # --- piece by piece ---------------------------------------------------------------------

    async def events(self) -> AsyncIterator[bytes]:
        """The response as server-sent events."""
        body, stream, n = self.body, self.stream, self.body.n or 1
        options = body.stream_options
        head = json.dumps(self._head("chat.completion.chunk"))[:-1]
        parsers = [self.parser() for _ in range(n)]
        num_calls, num_reported, counts = [0] * n, [0] * n, [0] * n
        counts_usage = options is not None and options.continuous_usage_stats
        is_plain = isinstance(parsers[0], TextOnly) and not (
            body.logprobs or body.return_token_ids or counts_usage
        )
        has_begun = False
        usage = Usage()
        try:
            while deltas := await stream.take():
                pieces = []
                if not has_begun:
                    has_begun = True
                    for index in range(n):
                        opening = {"role": "assistant", "content": self._echo}
                        pieces.append(_chunk(head, index, opening, None, None, ""))
                for item in deltas:
                    index, reason = item.index, item.finish_reason
                    if is_plain and reason is None:
                        if item.text:  # json.dumps of every part takes much longer
                            pieces.append(
                                f'data: {head}, "choices": [{{"index": {index}, "delta": '
                                f'{{"content": {json.dumps(item.text)}}}, "logprobs": null, '
                                '"finish_reason": null}]}\n\n'
                            )
                        continue
                    counts[index] += item.token_id is not None
                    parsed = parsers[index].feed(item.text) if item.text else Parsed()
                    if reason is not None:
                        rest = parsers[index].finish()
                        parsed = Parsed(parsed.text + rest.text, [*parsed.calls, *rest.calls])
                    logprobs = self._logprobs(index, num_reported[index])
                    if logprobs is not None:
                        num_reported[index] += len(logprobs["content"])
                    calls = self.kept(parsed.calls)
                    num_calls[index] += len(calls)
                    has_news = parsed.text or calls or reason or (logprobs or {}).get("content")
                    if not (has_news or body.return_token_ids):
                        continue
                    delta: dict[str, Any] = {}
                    if parsed.text or not (calls or reason):
                        delta["content"] = parsed.text
                    if calls:
                        delta["tool_calls"] = [_piece(call) for call in calls]
                    tail = ""
                    if reason is not None:
                        reason = _finish_reason(reason, num_calls[index] > 0)
                        tail = f', "stop_reason": {json.dumps(self._stop_reason(index))}'
                    if body.return_token_ids:
                        token_ids = [] if item.token_id is None else [item.token_id]
                        tail += f', "token_ids": {json.dumps(token_ids)}'
                    usage_now = ""
                    if counts_usage:
                        now = Usage(len(stream.prompt_token_ids), sum(counts))
                        usage_now = f', "usage": {json.dumps(now.report())}'
                    pieces.append(_chunk(head, index, delta, logprobs, reason, tail, usage_now))
                if pieces:
                    yield "".join(pieces).encode()
            usage.add(await stream.result())
            if options is not None and options.include_usage:
                counted = json.dumps(usage.report())
                yield f'data: {head}, "choices": [], "usage": {counted}}}\n\n'.encode()
            yield b"data: [DONE]\n\n"
        except Exception as error:
            if not has_begun:
                raise
            yield error_event(error, self.request)
        finally:
            stream.close()
            note_usage(self.request, usage)

    # --- both -------------------------------------------------------------------------------

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.body.model or self.server.model_name,
        }

    def parser(self) -> ToolParser:
        """What finds calls in a sample's text."""
        body, tools = self.body, self.body.tools or []
        if not tools or body.tool_choice == "none":
            return TextOnly()
        names = [tool.function.name for tool in tools]
        if isinstance(body.tool_choice, NamedTool):
            return NamedCall(body.tool_choice.function.name)
        if body.tool_choice == "required":
            return ForcedCalls(names)
        kind = choose_parser(self.server.config.tool_call_parser, self.server.template.source)
        assert kind is not None  # _check_tools has refused the request otherwise
        return kind(names)

    def kept(self, calls: list[Call]) -> list[Call]:
        """Those of the calls to report: without ``parallel_tool_calls`` the first one."""
        if self.body.parallel_tool_calls is False:
            return [call for call in calls if call.index == 0]
        return calls

    def _logprobs(self, index: int, start: int) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        tokens = self.stream.logprobs[index][start:]
        return chat_logprobs(self.server.words, tokens, num_top=self.body.top_logprobs or 0)

    def _stop_reason(self, index: int) -> str | int | None:
        output = self.stream.output
        return output.outputs[index].stop_reason if output is not None else None


def _check_tools(server: Server, body: ChatRequest) -> dict[str, Any]:
    """Parameters that a request with tools needs.

    Raises:
        ApiError: With status 400: calls could not be asked for, or not be found in the answer.
    """
    if body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool):
        return {}
    kind = choose_parser(server.config.tool_call_parser, server.template.source)
    if kind is None or not server.template.knows("tools"):
        raise ApiError(
            400,
            "tools: this model's chat template does not offer tools. Force a call with tool_choice "
            "'required', or start the server with --chat-template and --tool-call-parser",
            param="tools",
        )
    tags = ("<tool_call>", "<|python_tag|>")
    special = getattr(server.tokenizer, "all_special_tokens", ())
    return {"skip_special_tokens": False} if any(tag in special for tag in tags) else {}


def _template_options(server: Server, body: ChatRequest) -> dict[str, Any]:
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        if not server.template.knows("reasoning_effort"):
            raise ApiError(
                400,
                "reasoning_effort: this model's chat template does not know it",
                param="reasoning_effort",
            )
        options["reasoning_effort"] = body.reasoning_effort
    return options


def _finish_reason(reason: str | None, has_calls: bool) -> str | None:
    return "tool_calls" if reason == "stop" and has_calls else reason


def _whole(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _piece(call: Call) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_whole(call)}


def _chunk(
    head: str,
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None,
    reason: str | None,
    tail: str,
    usage: str = "",
) -> str:
    return (
        f'data: {head}, "choices": [{{"index": {index}, "delta": {json.dumps(delta)}, '
        f'"logprobs": {json.dumps(logprobs)}, "finish_reason": {json.dumps(reason)}{tail}}}]'
        f"{usage}}}\n\n"
    )

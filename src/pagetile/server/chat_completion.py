"""Handles one chat request: from its messages to its answer, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from starlette.requests import Request

from ..engine.outputs import CompletionOutput, Delta
from ..engine.request_stream import RequestStream
from .errors import field_error
from .generation import (
    Added,
    TextEvents,
    Usage,
    event_of,
    join,
    note_usage,
    server_sent_events,
    write_text,
)
from .logprobs import chat_logprobs, prompt_logprobs
from .output_form import forced_call_form, output_form
from .schemas.chat import ChatRequest, NamedTool
from .state import Server, server_of
from .streaming import Write
from .templates import NO_TOOLS
from .tool_parsers import Call, ForcedCalls, NamedCall, Parsed, TextOnly, ToolParser, choose_parser


@dataclass
class _Sample:
    """State of one sample of a stream: what was sent so far."""

    parser: ToolParser
    num_tokens: int = 0
    num_logprobs: int = 0
    num_calls: int = 0

    def parse(self, text: str, *, is_last: bool) -> Parsed:
        """Parse more text; the last call also returns what was held back."""
        parsed = self.parser.feed(text) if text else Parsed()
        if not is_last:
            return parsed
        rest = self.parser.finish()
        return Parsed(parsed.text + rest.text, [*parsed.calls, *rest.calls])


class ChatCompletion:
    """A chat request that the engine is processing.

    Attributes:
        stream: The engine's answer.
    """

    def __init__(
        self, server: Server, request: Request, body: ChatRequest, stream: RequestStream
    ) -> None:
        self.server, self.request, self.body, self.stream = server, request, body, stream
        self._created = server.created_now()
        self._id = server.new_id("chatcmpl", body.request_id)
        self._has_begun = False
        last = body.messages[-1].content if body.echo else None
        self._echo = last if isinstance(last, str) else "".join(p.text for p in last or ())

    @classmethod
    async def start(cls, request: Request, body: ChatRequest) -> ChatCompletion:
        """Validate a request, render its messages as a prompt, and queue it.

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
        token_ids = await server.template.render(
            body.messages,
            tools=body.tools if offers_tools else None,
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

    def close(self) -> None:
        """Abort what still runs."""
        self.stream.close()

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
        parsed = _Sample(self.parser()).parse(sample.text, is_last=True)
        text, calls = self._echo + parsed.text, parsed.calls
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

    def events(self) -> AsyncIterator[bytes]:
        """The response as server-sent events."""
        usage_event = self._usage_event if self.body.reports_usage else None
        return server_sent_events(self.request, [self.stream], self._encode, usage_event)

    def write_text(self, write: Write) -> None:
        """Write events that only add text directly to the connection."""
        write_text(self.stream, self._text_events, write)

    @cached_property
    def _text_events(self) -> TextEvents | None:
        """Return a builder of events that only add text; ``None`` if events have more than text."""
        body = self.body
        if body.logprobs or body.return_token_ids or body.counts_usage:
            return None
        if not isinstance(self._samples[0].parser, TextOnly):
            return None
        return TextEvents(
            lambda index, text: self._chunk([_choice(index, {"content": text})]), len(self._samples)
        )

    @cached_property
    def _samples(self) -> list[_Sample]:
        return [_Sample(self.parser()) for _ in range(self.body.n or 1)]

    def _encode(self, _: int, deltas: list[Delta]) -> bytes:
        """Return events of deltas, one for each sample with new output; the first has the role."""
        if not self._has_begun:
            self._has_begun = True
            opening = {"role": "assistant", "content": self._echo}
            events = [
                event_of(self._chunk([_choice(index, opening)]))
                for index in range(len(self._samples))
            ]
            return "".join(events).encode() + self._encode(0, deltas)
        if self._text_events is not None:
            data = self._text_events.encode(deltas)
            if data is not None:
                return data
        return "".join(map(self._event, join(deltas))).encode()

    def _event(self, added: Added) -> str:
        body, reason, sample = self.body, added.finish_reason, self._samples[added.index]
        sample.num_tokens += len(added.token_ids)
        parsed = sample.parse(added.text, is_last=reason is not None)
        calls = self.kept(parsed.calls)
        sample.num_calls += len(calls)
        logprobs = self._logprobs(added.index, sample.num_logprobs)
        content = logprobs["content"] if logprobs is not None else []
        sample.num_logprobs += len(content)
        if not (parsed.text or calls or reason or content or body.return_token_ids):
            return ""
        delta: dict[str, Any] = {}
        if parsed.text or not (calls or reason):
            delta["content"] = parsed.text
        if calls:
            delta["tool_calls"] = [_piece(call) for call in calls]
        choice = _choice(added.index, delta)
        choice["logprobs"] = logprobs
        if reason is not None:
            choice["finish_reason"] = _finish_reason(reason, sample.num_calls > 0)
            choice["stop_reason"] = added.stop_reason
        if body.return_token_ids:
            choice["token_ids"] = added.token_ids
        return event_of(self._chunk([choice], self._usage_now() if body.counts_usage else None))

    def _usage_now(self) -> Usage:
        num_tokens = sum(sample.num_tokens for sample in self._samples)
        return Usage(len(self.stream.prompt_token_ids), num_tokens)

    def _usage_event(self, usage: Usage) -> str:
        return event_of(self._chunk([], usage))

    def _chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        chunk = {**self._head("chat.completion.chunk"), "choices": choices}
        return chunk if usage is None else {**chunk, "usage": usage.report()}

    # --- both -------------------------------------------------------------------------------

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.body.model or self.server.model_name,
        }

    def parser(self) -> ToolParser:
        """Return a parser of tool calls for one sample's text."""
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
        """Return the calls to report: without ``parallel_tool_calls`` only the first."""
        if self.body.parallel_tool_calls is False:
            return [call for call in calls if call.index == 0]
        return calls

    def _logprobs(self, index: int, start: int) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        tokens = self.stream.logprobs[index][start:]
        return chat_logprobs(self.server.words, tokens, num_top=self.body.top_logprobs or 0)


def _check_tools(server: Server, body: ChatRequest) -> dict[str, Any]:
    """Return parameters that a request with tools needs.

    Raises:
        ApiError: With status 400: the template has no tools, or no parser for calls is known.
    """
    if body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool):
        return {}
    kind = choose_parser(server.config.tool_call_parser, server.template.source)
    if not server.template.knows("tools"):
        raise field_error(NO_TOOLS)
    if kind is None:
        raise field_error(
            "tools: the format of this model's calls is unknown. Force a call with tool_choice "
            "'required', or start the server with --tool-call-parser"
        )
    tags = ("<tool_call>", "<|python_tag|>")
    special = getattr(server.tokenizer, "all_special_tokens", ())
    return {"skip_special_tokens": False} if any(tag in special for tag in tags) else {}


def _template_options(server: Server, body: ChatRequest) -> dict[str, Any]:
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        if not server.template.knows("reasoning_effort"):
            raise field_error("reasoning_effort: this model's chat template does not know it")
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


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

"""Handles one ``/v1/responses`` request, as a chat completion in the Responses API's format."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request

from ..engine.logprobs import TokenLogprobs
from ..engine.outputs import RequestOutput
from ..errors import RequestError
from .chat_completion import ChatCompletion
from .errors import ApiError, to_api_error
from .generation import Usage, note_usage
from .logprobs import chat_logprobs
from .logs import log
from .response_items import Event, ResponseItems
from .schemas.responses import ResponsesRequest
from .tool_parsers import Parsed

# Fields of a chat request, and their names in this API.
_NAMES = {
    "response_format": "text.format",
    "structured_outputs": "text.format",
    "messages": "input",
    "max_tokens": "max_output_tokens",
}


class ModelResponse:
    """A response that the engine is generating.

    Attributes:
        completion: The chat completion that generates its text.
    """

    def __init__(self, body: ResponsesRequest, completion: ChatCompletion) -> None:
        self.body, self.completion = body, completion
        server = completion.server
        self._id = server.new_id("resp")
        self._created = server.created_now()
        self._offers_tools = bool(body.tools) and body.tool_choice != "none"
        self._parser = completion.parser()
        describe = self._describe if body.asks_for_logprobs else None
        self._items = ResponseItems(server.new_id, describe)
        self._num_reported = 0
        self._num_events = 0

    @classmethod
    async def start(cls, request: Request, body: ResponsesRequest) -> ModelResponse:
        """Validate a request and queue it.

        Raises:
            ApiError: It cannot be served.
        """
        body.check()
        try:
            completion = await ChatCompletion.start(request, body.as_chat())
        except (ApiError, RequestError) as error:
            raise _renamed(to_api_error(error)) from None
        return cls(body, completion)

    def close(self) -> None:
        """Abort what still runs."""
        self.completion.close()

    async def answer(self) -> dict[str, Any]:
        """The whole response."""
        output = await self.completion.stream.result()
        self._take(output.outputs[0].text)
        self._end(output)
        return self._finished(output)

    async def events(self) -> AsyncIterator[bytes]:
        """The response as server-sent events."""
        stream, request = self.completion.stream, self.completion.request
        has_begun = False
        try:
            while deltas := await stream.take():
                events: list[Event] = []
                if not has_begun:
                    has_begun = True
                    opening = {"response": self._response("in_progress", [])}
                    events += [("created", opening), ("in_progress", opening)]
                    if not self._offers_tools:
                        events += self._items.open_message()
                events += self._take("".join(delta.text for delta in deltas))
                if events:
                    yield self._encode(events)
            output = await stream.result()
            events = self._end(output)
            response = self._finished(output)
            yield self._encode([*events, (response["status"], {"response": response})])
        except Exception as error:
            if not has_begun:
                raise  # nothing was sent yet: an ordinary response reports it
            log.error("stream failed", request=request.scope, exc=error)
            failure = _failure(to_api_error(error).message)
            response = self._response("failed", [], error=failure)
            yield self._encode([("failed", {"response": response})])
        finally:
            self.close()

    def _take(self, text: str) -> list[Event]:
        """Return the events of new text and tokens."""
        return self._add(self._parser.feed(text)) if text else []

    def _end(self, output: RequestOutput) -> list[Event]:
        """Return the events of text that the parser held back, and of the items' ends."""
        return self._add(self._parser.finish()) + self._items.finish(_item_status(output))

    def _add(self, parsed: Parsed) -> list[Event]:
        tokens = self.completion.stream.logprobs[0][self._num_reported :]
        self._num_reported += len(tokens)
        return self._items.add(parsed.text, tokens, self.completion.kept(parsed.calls))

    def _describe(self, tokens: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        words, num_top = self.completion.server.words, self.body.top_logprobs or 0
        content: list[dict[str, Any]] = chat_logprobs(words, tokens, num_top=num_top)["content"]
        return content

    def _encode(self, events: Sequence[Event]) -> bytes:
        return b"".join(self._event(f"response.{kind}", **fields) for kind, fields in events)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()

    def _finished(self, output: RequestOutput) -> dict[str, Any]:
        usage = Usage()
        usage.add(output)
        note_usage(self.completion.request, usage)
        [sample] = output.outputs
        status, error, details = "completed", None, None
        if sample.finish_reason == "length":
            status, details = "incomplete", {"reason": "max_output_tokens"}
        elif sample.finish_reason != "stop":
            status, error = "failed", _failure("the request was aborted: the server is stopping")
        return self._response(
            status,
            self._items.output,
            error=error,
            incomplete_details=details,
            usage={
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        )

    def _response(self, status: str, output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        body, params = self.body, self.completion.stream.params
        format_ = body.text.format if body.text is not None else None
        shown = {"type": "text"} if format_ is None else format_.model_dump(by_alias=True)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model or self.completion.server.model_name,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": shown},
            "tool_choice": _shown(body.tool_choice) or ("auto" if body.tools else "none"),
            "tools": [_shown(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            **more,
        }


def _item_status(output: RequestOutput) -> str:
    """Return the status of an output item, for which there is no failed status."""
    return "completed" if output.outputs[0].finish_reason == "stop" else "incomplete"


def _renamed(error: ApiError) -> ApiError:
    """Return the error with its field's name in this API."""
    for name, own in _NAMES.items():
        field = (error.param or "").split(".")[0]
        if field == name or (error.param is None and name in error.message):
            error.message, error.param = error.message.replace(name, own, 1), own
            break
    if error.param is not None and error.param.startswith("tools."):
        error.message = error.message.replace(".function", "", 1)
        error.param = error.param.replace(".function", "")
    return error


def _shown(value: BaseModel | str | None) -> Any:
    return value.model_dump() if isinstance(value, BaseModel) else value


def _failure(message: str) -> dict[str, str]:
    return {"code": "server_error", "message": message}

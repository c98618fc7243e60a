"""One ``/v1/responses`` request: a chat completion in the form of the Responses API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request

from ..engine.request import RequestOutput
from ..errors import RequestError
from .chat_completion import ChatCompletion
from .errors import ApiError, to_api_error
from .generation import Usage, note_usage
from .logs import log
from .schemas.responses import ResponsesRequest

__all__ = ["ModelResponse"]

# What errors of a chat request call the fields of this API.
_NAMES = {
    "response_format": "text.format",
    "structured_outputs": "text.format",
    "messages": "input",
    "max_tokens": "max_output_tokens",
}


class ModelResponse:
    """A response on its way through the engine.

    Attributes:
        completion: The chat completion that makes its text.
    """

    def __init__(self, body: ResponsesRequest, completion: ChatCompletion) -> None:
        self.body, self.completion = body, completion
        server = completion.server
        self._id, self._item_id = server.new_id("resp"), server.new_id("msg")
        self._created = server.created_now()
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

    async def answer(self) -> dict[str, Any]:
        """The whole response."""
        output = await self.completion.stream.result()
        return self._finished(output)

    async def events(self) -> AsyncIterator[bytes]:
        """The response as server-sent events."""
        stream, request = self.completion.stream, self.completion.request
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        text, has_begun = "", False
        try:
            while deltas := await stream.take():
                if not has_begun:
                    has_begun = True
                    yield self._opening(place)
                if piece := "".join(delta.text for delta in deltas):
                    text += piece
                    yield self._event(
                        "response.output_text.delta", **place, delta=piece, logprobs=[]
                    )
            response = self._finished(await stream.result())
            [item] = response["output"]
            yield b"".join(
                (
                    self._event("response.output_text.done", **place, text=text, logprobs=[]),
                    self._event("response.content_part.done", **place, part=_part(text)),
                    self._event("response.output_item.done", output_index=0, item=item),
                    self._event(f"response.{response['status']}", response=response),
                )
            )
        except Exception as error:
            if not has_begun:
                raise  # nothing was sent yet: an ordinary response reports it
            log.error("stream failed", request=request.scope, exc=error)
            failure = _failure(to_api_error(error).message)
            response = self._response("failed", [], error=failure)
            yield self._event("response.failed", response=response)
        finally:
            stream.close()

    def _opening(self, place: dict[str, Any]) -> bytes:
        response = self._response("in_progress", [])
        item = self._item("in_progress")
        return b"".join(
            (
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.content_part.added", **place, part=_part("")),
            )
        )

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
        # An item of output has no status for a failure.
        item_status = "completed" if status == "completed" else "incomplete"
        return self._response(
            status,
            [self._item(item_status, _part(sample.text))],
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
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": shown},
            "tool_choice": "none",
            "tools": [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            **more,
        }

    def _item(self, status: str, *parts: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": list(parts),
        }


def _renamed(error: ApiError) -> ApiError:
    """The error with the name that its field has in this API."""
    for name, own in _NAMES.items():
        if error.param == name or (error.param is None and name in error.message):
            error.message, error.param = error.message.replace(name, own, 1), own
            break
    return error


def _failure(message: str) -> dict[str, str]:
    return {"code": "server_error", "message": message}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

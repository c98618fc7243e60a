"""The body of ``/v1/responses``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ..errors import field_error
from .chat import ChatRequest, Function, FunctionName, JsonSchema, PlainFormat
from .common import Body, Items


class ContentPart(Body):
    """A piece of text. Images, files and audio are refused."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None
    """May be sent back from an earlier response; ignored."""


def _joined(content: str | Items[ContentPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class InputMessage(Body):
    """A message of the conversation. The output of an earlier response can be sent back as one."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Items[ContentPart]
    type: Literal["message"] = "message"
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class FunctionCallItem(Body):
    """A call that the model made in an earlier response."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class FunctionCallOutput(Body):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Items[ContentPart]
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


def _kind(item: Any) -> str:
    """Return an input item's type; an item without one is a message."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return _TAGS.get(kind, "input-message") if isinstance(kind, str) else "input-message"


# With a hyphen, which tells errors that they are not fields of the body.
_TAGS = {"function_call": "function-call", "function_call_output": "function-call-output"}


InputItem = Annotated[
    Annotated[InputMessage, Tag("input-message")]
    | Annotated[FunctionCallItem, Tag("function-call")]
    | Annotated[FunctionCallOutput, Tag("function-call-output")],
    Discriminator(_kind),
]


class FunctionTool(Function):
    """A function that the model may call; other tools are refused."""

    type: Literal["function"]


class NamedFunction(FunctionName):
    """A function that must be called."""

    type: Literal["function"]


class NamedSchemaFormat(JsonSchema):
    """JSON that follows a schema."""

    type: Literal["json_schema"]


class TextOptions(Body):
    """Format of the output."""

    format: Annotated[PlainFormat | NamedSchemaFormat, Field(discriminator="type")] | None = None


_SAME = {"model", "temperature", "top_p", "stream", "stop", "ignore_eos", "top_logprobs"}
"""Fields that a chat request has under the same name."""


class ResponsesRequest(Body):
    """Answer a text or a conversation. The server keeps no response after it is sent."""

    input: str | Items[InputItem]
    model: str | None = None
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    tools: Items[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    include: list[Literal["message.output_text.logprobs"]] | None = None
    """Log-probabilities of the message's tokens, and of calls' tokens if there are both."""
    top_logprobs: int | None = Field(None, ge=0)
    """How many of the likeliest alternatives come with each token."""
    metadata: (
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None
    ) = Field(None, max_length=16)
    """Returned with the response."""
    store: bool | None = None
    """Only false."""
    previous_response_id: str | None = None
    """Only null."""

    stop: str | Items[str] | None = None
    ignore_eos: bool = False
    """vLLM's extension; guidellm sets it to get answers of equal length."""

    def check(self) -> None:
        """Refuse options that need stored responses, and an input without messages.

        Raises:
            ApiError: With status 400 and the field's name.
        """
        if self.store:
            raise field_error(
                "store=true: this server keeps no responses; send store=false or leave it out"
            )
        if self.previous_response_id is not None:
            raise field_error(
                "previous_response_id: this server keeps no responses; send the whole "
                "conversation as input"
            )
        if not self.input:
            raise field_error("input is empty: give text or at least one message")
        if self.top_logprobs is not None and not self.asks_for_logprobs:
            raise field_error("top_logprobs needs include=['message.output_text.logprobs']")

    @property
    def asks_for_logprobs(self) -> bool:
        """Whether log-probabilities are to be reported."""
        return bool(self.include)

    def as_chat(self) -> ChatRequest:
        """Return the equivalent chat request."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            for item in self.input:
                _add_item(messages, item)
        return ChatRequest.model_validate(
            {
                **self.model_dump(include=_SAME),
                "messages": messages,
                "max_completion_tokens": self.max_output_tokens,
                "response_format": self._response_format(),
                "logprobs": True if self.asks_for_logprobs else None,
                "parallel_tool_calls": self.parallel_tool_calls if self.tools else None,
                **self._tools(),
            }
        )

    def _tools(self) -> dict[str, Any]:
        choice: Any = self.tool_choice if self.tools or self.tool_choice != "auto" else None
        if isinstance(choice, NamedFunction):
            choice = {"type": "function", "function": {"name": choice.name}}
        functions = [tool.model_dump(exclude={"type"}) for tool in self.tools or ()]
        tools = [{"type": "function", "function": function} for function in functions]
        return {"tools": tools or None, "tool_choice": choice}

    def _response_format(self) -> dict[str, Any] | None:
        format_ = self.text.format if self.text is not None else None
        if format_ is None:
            return None
        if not isinstance(format_, NamedSchemaFormat):
            return {"type": format_.type}
        schema = format_.model_dump(by_alias=True, exclude={"type"})
        return {"type": "json_schema", "json_schema": schema}


def _add_item(
    messages: list[dict[str, Any]], item: InputMessage | FunctionCallItem | FunctionCallOutput
) -> None:
    """Add an item of the input to a chat's messages; calls belong to the message before them."""
    if isinstance(item, InputMessage):
        messages.append({"role": item.role, "content": _joined(item.content)})
    elif isinstance(item, FunctionCallOutput):
        content = _joined(item.output)
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    else:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        messages[-1].setdefault("tool_calls", []).append(call)

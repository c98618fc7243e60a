"""The body of ``/v1/responses``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ..errors import ApiError
from .chat import ChatRequest, JsonObjectFormat, TextFormat
from .common import Body

__all__ = ["ResponsesRequest"]


class ContentPart(Body):
    """A piece of text. Images, files and audio are refused."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Field(max_length=0)] | None = None


class InputMessage(Body):
    """A message of the conversation. The output of an earlier response can be sent back as one."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    type: Literal["message"] = "message"
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None

    @property
    def text(self) -> str:
        """The content in one piece."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class NamedSchemaFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    name: str = Field(max_length=64)
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None
    """Every answer follows the schema exactly, whatever this says."""


class TextOptions(Body):
    """The form of the output."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat, Field(discriminator="type")]
        | None
    ) = None


class ResponsesRequest(Body):
    """Answer a text or a conversation. The server keeps no response after it is sent."""

    input: str | list[InputMessage]
    model: str | None = None
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    metadata: (
        dict[
            Annotated[str, Field(max_length=64)],
            Annotated[str, Field(max_length=512)],
        ]
        | None
    ) = Field(None, max_length=16)
    """Returned with the response."""
    store: bool | None = None
    """Only false."""
    previous_response_id: str | None = None
    """Only null."""

    def check(self) -> None:
        """Refuse what needs a store of responses, and an input without messages.

        Raises:
            ApiError: With status 400 and the field's name.
        """
        if self.store:
            raise ApiError(
                400,
                "store=true: this server keeps no responses; send store=false or leave it out",
                param="store",
            )
        if self.previous_response_id is not None:
            raise ApiError(
                400,
                "previous_response_id: this server keeps no responses; send the whole "
                "conversation as input",
                param="previous_response_id",
            )
        if not self.input:
            raise ApiError(400, "input is empty: give text or at least one message", param="input")

    def as_chat(self) -> ChatRequest:
        """The chat request that has the same answer."""
        messages = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += [{"role": item.role, "content": item.text} for item in self.input]
        return ChatRequest.model_validate(
            {
                "model": self.model,
                "messages": messages,
                "max_completion_tokens": self.max_output_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "stream": self.stream,
                "response_format": self._response_format(),
            }
        )

    def _response_format(self) -> dict[str, Any] | None:
        format_ = self.text.format if self.text is not None else None
        if format_ is None:
            return None
        if not isinstance(format_, NamedSchemaFormat):
            return {"type": format_.type}
        schema = format_.model_dump(by_alias=True, exclude={"type"})
        return {"type": "json_schema", "json_schema": schema}

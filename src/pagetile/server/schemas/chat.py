"""The body of ``/v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ..config import Limits
from ..errors import field_error
from .common import Body, GenerationFields, Items, at_most


class TextPart(Body):
    """A piece of text. Other kinds of parts (images, audio, files) are refused."""

    type: Literal["text"]
    text: str


Content = str | Items[TextPart]


class TextMessage(Body):
    """A message of the user, or an instruction to the model (system, developer)."""

    role: Literal["system", "developer", "user"]
    content: Content
    name: str | None = None


class FunctionCall(Body):
    """A call of a function, its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call that the model made."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class AssistantMessage(Body):
    """An answer of the model. Empty fields of an earlier response may be sent back as null."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    reasoning: str | None = None
    """Passed to the chat template; ``reasoning_content`` is its older name."""
    reasoning_content: str | None = None


class ToolMessage(Body):
    """The result of a tool."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[TextMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Body):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call; only functions are."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """Which function."""

    name: str


class NamedTool(Body):
    """A tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class JsonSchema(Body):
    """A schema for the answer."""

    name: str = Field(max_length=64)
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None
    """Every answer follows the schema exactly, whether true or false."""


class PlainFormat(Body):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class JsonSchemaFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[PlainFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatRequest(GenerationFields):
    """Answer a conversation."""

    messages: Items[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    response_format: ResponseFormat | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """Passed to the chat template, if it has this variable."""
    store: bool | None = None
    """Only false: the server keeps no answers."""
    service_tier: Literal["auto", "default"] | None = None

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    echo: bool = False
    """With ``continue_final_message``: begin the answer with the last message's text."""
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self, limits: Limits) -> None:
        """Refuse what cannot be honoured."""
        super().check(limits)
        at_most("messages", len(self.messages), limits.num_messages)
        if self.top_logprobs is not None and not self.logprobs:
            raise field_error("top_logprobs needs logprobs=true")
        at_most("top_logprobs", self.top_logprobs or 0, limits.num_logprobs)
        if self.max_tokens and self.max_completion_tokens not in (None, self.max_tokens):
            raise field_error(
                f"max_tokens={self.max_tokens} and max_completion_tokens="
                f"{self.max_completion_tokens}: give one of them"
            )
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise field_error("continue_final_message needs a last message of the assistant's")
        is_asked = "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt
        if self.continue_final_message and is_asked:
            raise field_error("continue_final_message and add_generation_prompt exclude each other")
        if self.store:
            raise field_error("store=true: this server keeps no answers")
        if self.echo and not self.continue_final_message:
            raise field_error("echo needs continue_final_message=true")
        self._check_tools(limits)

    def _check_tools(self, limits: Limits) -> None:
        choice, tools = self.tool_choice, self.tools or []
        at_most("tools", len(tools), limits.num_tools)
        names = [tool.function.name for tool in tools]
        if len(set(names)) < len(names):
            raise field_error("tools: two functions have the same name")
        if choice not in (None, "none") and not tools:
            raise field_error("tool_choice needs tools")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise field_error(
                f"tool_choice names {choice.function.name!r}, which is not among the tools"
            )
        if self.parallel_tool_calls is not None and not tools:
            raise field_error("parallel_tool_calls needs tools")
        is_forced = choice == "required" or isinstance(choice, NamedTool)
        for number, tool in enumerate(tools):
            if tool.function.strict and not is_forced and choice != "none":
                raise field_error(
                    f"tools.{number}.function.strict: calls follow their schema for certain only "
                    "with tool_choice 'required' or a named tool"
                )
        is_free = self.response_format is None or self.response_format.type == "text"
        if is_forced and not (is_free and self.structured_outputs is None):
            raise field_error(
                "tool_choice demands a call, and response_format or structured_outputs another "
                "form: give one of them"
            )

    @property
    def longest(self) -> int | None:
        """Return the most tokens of the answer; ``None``: as many as the context allows."""
        return self.max_completion_tokens or self.max_tokens

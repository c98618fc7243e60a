"""Renders conversations as prompts, off the event loop and within a time limit.

Transformers renders templates in Jinja's sandbox, which does not stop endless loops. A template
runs as Python code, so raising an exception in its thread ends it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from ..engine.chat import as_template_message, render_text
from ..errors import RequestError, TemplateError
from .config import ServerConfig
from .errors import field_error
from .schemas.chat import Message, Tool

T = TypeVar("T")

NO_TOOLS = (
    "tools: the chat template does not offer tools to the model. Start the server with one that "
    "does, such as --chat-template chatml"
)

# Arguments of ``apply_chat_template`` and variables that the server sets itself.
_RESERVED = frozenset(
    {
        *("messages", "conversation", "tools", "documents", "chat_template"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "processor_kwargs"),
    }
)


class _TookTooLong(BaseException):
    """Raised inside of a template; not an Exception, so that no template can catch it."""


class ChatTemplate:
    """A checkpoint's chat template.

    Args:
        tokenizer: A Transformers tokenizer, or ``None``.
        config: May have the operator's own template.
        check_length: Refuses a field's number of characters if no context can hold it.
    """

    def __init__(
        self, tokenizer: Any, config: ServerConfig, check_length: Callable[[int, str], None]
    ) -> None:
        self._tokenizer, self._config = tokenizer, config
        self._check_length = check_length
        own = getattr(tokenizer, "chat_template", None)
        if isinstance(own, Mapping):
            own = own.get("default")
        self.source: str | None = config.chat_template or own
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="template")

    def knows(self, name: str) -> bool:
        """Return whether the template has a variable of this name."""
        return self.source is not None and name in self.source

    async def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation.

        Raises:
            ApiError: With status 400: the messages are too long, a call's arguments are not a JSON
                object, there is no template, it refuses the messages, it took too long, or a client
                may not set an option.
        """
        given = [_as_given(message, f"messages.{at}") for at, message in enumerate(messages)]
        self._check_length(sum(len(message["content"]) for message in given), "messages")
        functions = [
            tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})
            for tool in tools or ()
        ]
        if chat_template is not None and not self._config.trust_request_chat_template:
            raise field_error(
                "chat_template: this server uses its own; it was not started with "
                "--trust-request-chat-template"
            )
        for name in options or ():
            if name in _RESERVED:
                raise field_error(
                    f"chat_template_kwargs.{name} is not for a request to set",
                    f"chat_template_kwargs.{name}",
                )
        template = chat_template or self.source
        if self._tokenizer is None or template is None:
            raise field_error(
                "this model has no chat template: it was not trained on conversations. Use "
                "/v1/completions, or start the server with --chat-template",
                "messages",
            )
        if functions and "tools" not in template:
            raise field_error(NO_TOOLS)

        def work() -> str:
            return render_text(
                self._tokenizer,
                given,
                chat_template or self._config.chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=functions or None,
                template_options=options,
            )

        try:
            text = await self._within(work, self._config.limits.template_seconds)
        except RequestError as error:
            code = "chat_template_refuses" if isinstance(error, TemplateError) else None
            raise field_error(str(error), "messages", code) from error
        self._check_length(len(text), "messages")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, lambda: self._tokenizer.encode(text, add_special_tokens=False)
        )

    async def _within(self, work: Callable[[], T], seconds: float) -> T:
        """Return the result of ``work`` on a thread; interrupt it after the time limit."""
        runner = _Interruptible(work)
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._threads, runner)
        timer = loop.call_later(seconds, runner.interrupt)
        try:
            return await future  # type: ignore[no-any-return]
        except _TookTooLong:
            raise field_error(
                f"the chat template took longer than {seconds:g} s for these messages", "messages"
            ) from None
        finally:
            timer.cancel()


def _as_given(message: Message, param: str) -> dict[str, Any]:
    """Return a message with its text joined, and the arguments of calls as objects."""
    try:
        return as_template_message(message.model_dump(exclude_none=True), param)
    except RequestError as error:
        raise field_error(str(error), param) from None


class _Interruptible:
    """A function whose thread can be made to raise."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._is_late = False

    def __call__(self) -> Any:
        with self._lock:
            if self._is_late:
                raise _TookTooLong
            self._thread = threading.get_ident()
        try:
            return self._work()
        finally:
            with self._lock:
                self._thread = None
            if self._is_late:
                _meet_pending_exception()

    def interrupt(self) -> None:
        with self._lock:
            self._is_late = True
            if self._thread is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread), ctypes.py_object(_TookTooLong)
                )


def _meet_pending_exception() -> None:
    """Make an exception that is set but not yet raised come here, not in the pool's code."""
    with suppress(_TookTooLong):
        for _ in range(1000):
            pass


def built_in_template(name: str) -> str:
    """Return the Jinja source of a built-in template (``chatml``, ``plain``) or of a file.

    Raises:
        RequestError: There is none of this name.
    """
    folder = Path(__file__).parent / "chat_templates"
    for path in (folder / f"{name}.jinja", Path(name)):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    known = ", ".join(sorted(path.stem for path in folder.glob("*.jinja")))
    raise RequestError(f"--chat-template {name}: no such file, and none of {known}")


def read_template(name: str | None, model: str | os.PathLike[str] | None) -> str | None:
    """Return the template of a command line; for the shipped checkpoint, which has none, ``plain``.

    Raises:
        RequestError: There is none of this name.
    """
    if name is None:
        return built_in_template("plain") if model is None else None
    return built_in_template(name)

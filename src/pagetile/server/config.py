"""Configuration of a server: model names, API keys, defaults and limits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import RequestError


@dataclass(frozen=True)
class Limits:
    """Limits of requests; what exceeds them is refused with a 4xx status."""

    body_bytes: int = 8 << 20
    num_headers: int = 128
    header_bytes: int = 64 << 10
    body_seconds: float = 60.0
    """Seconds for a client to send its body."""
    num_prompts: int = 1024
    n: int = 128
    num_stops: int = 16
    stop_chars: int = 1024
    num_bad_words: int = 128
    num_logit_biases: int = 1024
    num_logprobs: int = 20
    num_messages: int = 4096
    num_tools: int = 128
    template_seconds: float = 2.0
    grammar_seconds: float = 5.0
    """Seconds to compile a structured-output constraint. The engine limits its size."""
    send_seconds: float = 60.0
    """Seconds for a client to read a piece of a stream before its connection is closed."""


@dataclass(frozen=True)
class ServerConfig:
    """Names, keys, defaults and limits of a server.

    Attributes:
        model_names: Names that requests may use for the model; the first is reported.
        api_keys: Keys, one of which a client must send; empty: no key is needed.
        cors_origins: Origins whose pages may call the server from a browser; none by default.
        chat_template: Jinja source that replaces the tokenizer's own.
        trust_request_chat_template: Whether a request may have its own template.
        tool_call_parser: ``"auto"``, ``"hermes"``, ``"llama3_json"`` or ``"none"``.
        sampling_defaults: Values for sampling fields that a request leaves out.
        show_text: Whether ``/pages`` shows prompts and outputs.
        log_prompts: Whether a request's log line has the text of its prompt.
        limits: See ``Limits``.
    """

    model_names: tuple[str, ...] = ("pagetile-demo",)
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    tool_call_parser: str = "auto"
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    show_text: bool = False
    log_prompts: bool = False
    limits: Limits = field(default_factory=Limits)


def model_name(path: str | os.PathLike[str] | None) -> str:
    """Return the default name of a checkpoint, that of its folder."""
    if path is None:
        return "pagetile-demo"
    return os.path.basename(os.path.abspath(os.fspath(path)))


def read_keys(given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """Return the API keys of the command line, the environment and a file.

    Raises:
        RequestError: A key is empty, or the file has none.
    """
    keys = [*given, *filter(None, [os.environ.get("PAGETILE_API_KEY")])]
    if file is not None:
        lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
        found = [line for line in lines if line]
        if not found:
            raise RequestError(f"{file} has no API key: write one on each line")
        keys += found
    if not all(key.strip() for key in keys):
        raise RequestError("an API key is empty: give a key, or none at all")
    return tuple(dict.fromkeys(keys))

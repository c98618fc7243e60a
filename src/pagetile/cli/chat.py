"""``pagetile chat``: a conversation in the terminal, with a server or a checkpoint."""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console

from ..errors import RequestError, TemplateError
from .options import MODEL, Device, flag, option

EXAMPLES = """
[bold]Examples[/bold]
  pagetile chat http://127.0.0.1:8000
  pagetile chat my-checkpoint --system "Answer in one sentence."
"""

Messages = list[dict[str, str]]
Answer = Callable[[Messages], Iterator[str]]


def chat(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="URL|MODEL",
            help="A server's address, or a checkpoint's folder. Without it, the small model of "
            "Python code that ships with pagetile.",
        ),
    ] = None,
    system: Annotated[
        str | None, option("Sampling", "TEXT", "System message, before the conversation.")
    ] = None,
    max_tokens: Annotated[int, option("Sampling", "N", "Most new tokens of an answer.")] = 512,
    temperature: Annotated[
        float | None,
        option(
            "Sampling",
            "X",
            "Sampling temperature; 0 is greedy. Without it, the checkpoint's own default.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        option("Server", "NAME", "Name of the model on the server. Without it, its first."),
    ] = None,
    api_key: Annotated[
        str | None, option("Server", "KEY", "API key; also read from PAGETILE_API_KEY.")
    ] = None,
    chat_template: Annotated[
        str | None, option(MODEL, "FILE", "Chat template: a Jinja file, or chatml or plain.")
    ] = None,
    device: Device = None,
    raw: Annotated[bool, flag(None, "--raw", "Print the text only, without names.")] = False,
) -> None:
    """Talk with a model.

    Ctrl-C ends an answer, Ctrl-D the conversation.
    """
    options: dict[str, Any] = {"max_tokens": max_tokens}
    if temperature is not None:
        options["temperature"] = temperature
    console = Console(stderr=True, highlight=False)
    is_server = target is not None and target.startswith(("http://", "https://"))
    if not is_server:
        _check_local(target, model=model, api_key=api_key)
    elif chat_template is not None:
        raise RequestError("--chat-template is of a checkpoint: the server has its own")
    elif device is not None:
        raise RequestError(f"--device {device} is for a checkpoint: the server has its own")
    if target is not None and is_server:
        _check_address(target)
        key = api_key or os.environ.get("PAGETILE_API_KEY")
        answer = _remote(target.rstrip("/").removesuffix("/v1"), model, key, options)
    else:
        with console.status("Loading the model"):
            answer = _local(target, chat_template, device, options)
    messages: Messages = [{"role": "system", "content": system}] if system else []
    for said in _lines(raw=raw):
        messages.append({"role": "user", "content": said})
        try:
            text = _print(answer(messages), "" if raw else "model > ")
        except RequestError as error:
            if system and isinstance(error, TemplateError):
                error = RequestError(f"{error}. If it has no system role, leave out --system")
            if not sys.stdin.isatty():
                raise error from None
            console.print(f"pagetile: {error}", style="red", markup=False)
            messages.pop()  # the conversation goes on without it
        else:
            messages.append({"role": "assistant", "content": text})


def _lines(*, raw: bool) -> Iterator[str]:
    """Yield what the user says, without empty lines."""
    if sys.stdin is None:  # closed
        return
    is_typed = sys.stdin.isatty()
    if is_typed:
        with suppress(ModuleNotFoundError):
            import readline  # noqa: F401 (input() edits lines and remembers them with it)
    while True:
        try:
            said = input("you > " if is_typed and not raw else "")
            said.encode()  # in some locales, input() returns other bytes as surrogates
        except EOFError:
            return
        except UnicodeError:
            raise RequestError("standard input is not UTF-8 text") from None
        if said.strip():
            yield said


def _check_address(address: str) -> None:
    """Raise RequestError for an address that is not complete."""
    try:
        parts = urllib.parse.urlsplit(address)
        is_whole = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole:
        raise RequestError(f"{address}: expected an address such as http://127.0.0.1:8000")


def _check_local(target: str | None, *, model: str | None, api_key: str | None) -> None:
    """Raise RequestError for an address without http://, and for a server's options without one."""
    if target is not None and not os.path.exists(target):
        if re.fullmatch(r"[\w.\-]+:\d+(/.*)?", target):
            raise RequestError(f"{target} is not a folder: did you mean http://{target}?")
        if "://" in target:
            raise RequestError(f"{target}: expected an address with http:// or https://")
    if model is not None:
        raise RequestError(
            f"--model {model} chooses among a server's models, but no server's address is given: "
            f"for a checkpoint, pagetile chat {model}"
        )
    if api_key is not None:
        raise RequestError("--api-key is for a server, but no server's address is given")


def _print(pieces: Iterator[str], name: str) -> str:
    """Print an answer as it comes; Ctrl-C ends it, and what there is of it stays."""
    text = ""
    typer.echo(name, nl=False)
    try:
        for piece in pieces:
            text += piece
            typer.echo(piece, nl=False)
            sys.stdout.flush()
    except KeyboardInterrupt:
        typer.echo(" …", nl=False)
    except RequestError:
        typer.echo("")
        raise
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()  # aborts the request
    typer.echo("")
    return text


def _remote(url: str, model: str | None, key: str | None, options: dict[str, Any]) -> Answer:
    headers = {"Content-Type": "application/json"}
    if key:
        if not key.isprintable():
            raise RequestError("the API key has a line break or another control character")
        headers["Authorization"] = f"Bearer {key}"

    def send(path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url + path, data, headers)
        try:
            return urllib.request.urlopen(request, timeout=600)
        except urllib.error.HTTPError as error:
            message, code = _read_error(error)
            kind = TemplateError if code == "chat_template_refuses" else RequestError
            raise kind(f"{url}{path}: {message}") from None
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise RequestError(
                f"{url} cannot be reached: {reason}. Start a server there with pagetile serve, or "
                "give another address"
            ) from None

    if model is None:
        with send("/v1/models") as response:
            model = json.load(response)["data"][0]["id"]

    def answer(messages: Messages) -> Iterator[str]:
        body = {"model": model, "messages": messages, "stream": True, **options}
        with send("/v1/chat/completions", body) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RequestError(event["error"]["message"])
                for choice in event["choices"]:
                    yield choice["delta"].get("content") or ""

    return answer


def _read_error(error: urllib.error.HTTPError) -> tuple[str, Any]:
    """Return a server's message and its code."""
    try:
        detail = json.load(error)["error"]
        return str(detail["message"]), detail.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{error.code} {error.reason}", None


def _local(
    target: str | None, template: str | None, device: str | None, options: dict[str, Any]
) -> Answer:
    from ..engine.chat import render
    from ..engine.llm import LLM
    from ..server.templates import read_template

    source = read_template(template, target)
    llm = LLM(target, device=device, max_num_seqs=1)
    params = replace(llm.get_default_sampling_params(), **options)

    def answer(messages: Messages) -> Iterator[str]:
        prompts = render(llm.engine.tokenizer, messages, source)
        for delta in llm.stream(prompts, params):
            if delta.error is not None:
                raise RequestError(delta.error)
            yield delta.text

    return answer

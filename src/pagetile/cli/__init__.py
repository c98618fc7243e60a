"""The command line: ``generate``, ``serve``, ``chat``, ``plan``, ``explain`` and ``bench``.

An error is one line on stderr. Exit codes: 2 for a user's mistake, 130 for Ctrl-C, 141 if standard
output was closed early, 1 for all others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

from ..errors import PagetileError

__all__ = ["main"]

# Packages, and the extra that installs each.
_EXTRAS = {
    **dict.fromkeys(
        ("typer", "click", "rich", "tqdm", "transformers", "tokenizers", "safetensors"), "engine"
    ),
    "matplotlib": "plots",
    **dict.fromkeys(("fastapi", "uvicorn", "prometheus_client", "pydantic", "llguidance"), "serve"),
}


_VLLM_OPTIONS = {
    "--model": "Give the checkpoint's folder without it, as the first argument",
    "--gpu-memory-utilization": "Give --num-blocks, or memory_fraction of LLM in Python",
    "--num-gpu-blocks-override": "Give --num-blocks",
    "--enable-prefix-caching": "Leave it out: prefixes are shared by default",
    "--no-enable-prefix-caching": "Give --no-prefix-caching",
    "--tensor-parallel-size": "Leave it out: a model runs on one device",
    "--pipeline-parallel-size": "Leave it out: a model runs on one device",
    "--generation-config": "Leave it out for 'auto'; for 'vllm' give --no-generation-config",
    "--speculative-config": "Give --speculative ngram --num-speculative-tokens N",
    "--enable-auto-tool-choice": "Leave it out: on where the chat template has tools",
    "--reasoning-parser": "Leave it out: what a model thinks stays in its text",
    "--trust-remote-code": "Leave it out: no code from a checkpoint is run",
    "--enforce-eager": "Leave it out, or give enforce_eager=True to LLM in Python",
    "--tokenizer": "Put the tokenizer's files into the checkpoint's folder",
    "--lora-modules": "Merge the adapters into the weights",
    "--allowed-origins": "Give --cors-origin",
    "--root-path": "Leave it out: let the proxy remove its prefix from the path",
    **dict.fromkeys(
        ("--ssl-keyfile", "--ssl-certfile"), "Put a proxy in front of the server for HTTPS"
    ),
    **dict.fromkeys(
        ("--disable-log-requests", "--disable-uvicorn-access-log", "--uvicorn-log-level"),
        "Give --quiet to log nothing",
    ),
}
"""vLLM's options that are missing here, and what to use instead; for others see ``LLM_OPTIONS``."""

_PLAIN = {
    "Value error, ": "",
    "Input should be a valid integer, unable to parse string as an integer": "expected an integer",
    "Input should be a valid number, unable to parse string as a number": "expected a number",
    "Input should be greater than or equal to": "expected at least",
    "Input should be less than or equal to": "expected at most",
}
"""Phrases of the option-parsing library, and what is printed instead."""


def main(args: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        args: The words of the command line after ``pagetile``; those of this process if ``None``.

    Returns:
        The exit code.
    """
    # Must be set before torch is imported: its OpenMP threads would wait by spinning. Beside other
    # programs that makes a step 4 to 20 times slower; without it the smallest models lose a fifth.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from .app import run

        return run(sys.argv[1:] if args is None else list(args))
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except (BrokenPipeError, SystemExit):  # rich raises SystemExit where its output was closed
        _silence(sys.stdout)
        return _fail("stopped: standard output was closed", 141)
    except Exception as error:
        if os.environ.get("PAGETILE_DEBUG") == "1":
            raise
        return _fail(*_explain(error))


def _explain(error: Exception) -> tuple[str, int]:
    """Return the message for an error, and the exit code."""
    if isinstance(error, PagetileError):
        return str(error), 2
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in _EXTRAS:
        name = str(error.name).split(".")[0]
        extra = _EXTRAS[name]
        return (
            f"{name} is not installed: pip install 'pagetile[{extra}]', or in a checkout "
            f"pip install -e '.[{extra}]'"
        ), 2
    if hasattr(error, "format_message"):  # a usage error of typer's, whose base class has moved
        context = getattr(error, "ctx", None)
        command = getattr(context, "command_path", "pagetile")
        message = _plain(error.format_message().rstrip("."))
        option = getattr(error, "option_name", "")
        if hint := _VLLM_OPTIONS.get(option) or _explain_option(option):
            message = f"No such option: {option}, which is vLLM's. {hint}"
        end = " See" if message.endswith("?") else ": see"
        return f"{message}{end} {command} --help", 2
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}", 2
    return f"{type(error).__name__}: {error} (PAGETILE_DEBUG=1 shows where)", 1


def _explain_option(name: str) -> str:
    """Return what to do instead of an option of vLLM's ``LLM``; "" if it is none."""
    from ..engine.vllm_names import LLM_OPTIONS

    hint = LLM_OPTIONS.get(name.removeprefix("--").replace("-", "_"), "")
    return hint[:1].upper() + hint[1:]


def _plain(message: str) -> str:
    for phrase, plain in _PLAIN.items():
        message = message.replace(phrase, plain)
    return message


def _fail(message: str, code: int) -> int:
    # Messages of other packages may have line breaks; print one line.
    line = " ".join(f"pagetile: {message}".split())
    try:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    except OSError:
        _silence(sys.stderr)
    return code


def _silence(stream: TextIO) -> None:
    """Discard output that Python would flush at its end, so that it does not fail once more."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

"""Prompts from the command line, a file or a pipe."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import RequestError

BUILT_IN = 'def read_config(path):\n    """Read a configuration file.'


def read_prompts(words: Sequence[str], file: Path | None) -> list[str]:
    """Return the prompts to continue.

    Args:
        words: Prompts of the command line.
        file: A file with one prompt, ``-`` for standard input.

    Raises:
        RequestError: Two sources are given, or the text is empty or not UTF-8.
        OSError: The file cannot be read.
    """
    if words and file is not None:
        raise RequestError("PROMPT and --file are both given: leave one of them out")
    if words:
        return [_check(word, f"prompt {position}") for position, word in enumerate(words)]
    if file is not None and str(file) != "-":
        return [_read(file.read_bytes(), str(file))]
    if file is not None or _is_piped():
        return [_read(sys.stdin.buffer.read(), "standard input")]
    return [BUILT_IN]


def _is_piped() -> bool:
    """Return whether standard input is a pipe or file with text, not just open or closed."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _read(text: bytes, source: str) -> str:
    """Decode without the last line break, which many tokenizers join with the next indentation."""
    prompt = _decode(text, source)
    return prompt.removesuffix("\n").removesuffix("\r") or prompt


def _decode(text: bytes, source: str) -> str:
    if not text:
        raise RequestError(f"{source} is empty: give some text to continue")
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{source} is not UTF-8 text: byte {text[error.start]:#04x} at {error.start}"
        ) from None


def _check(word: str, source: str) -> str:
    """Check a word; bytes that are not UTF-8 come as surrogates from the command line."""
    return _decode(os.fsencode(word), source)

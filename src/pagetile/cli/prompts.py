"""Where prompts come from: the command line, a file, a pipe, or nowhere."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import RequestError

BUILT_IN = 'def read_config(path):\n    """Read a configuration file.'


def read_prompts(words: Sequence[str], file: Path | None) -> list[str]:
    """The prompts to continue.

    Args:
        words: Those of the command line.
        file: One to read, ``-`` for standard input.

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
    """Whether someone has put text into standard input, and not just left it open or closed it."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _read(text: bytes, source: str) -> str:
    """Text without its last line break: many tokenizers join that with the next line's indent."""
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
    """Python keeps bytes of the command line that are not UTF-8 as surrogates."""
    return _decode(os.fsencode(word), source)

"""What a server is started with, read from a command line and files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..errors import RequestError
from .templates import built_in_template

__all__ = ["model_name", "read_keys", "read_template"]


def model_name(path: str | os.PathLike[str] | None) -> str:
    """What a checkpoint is called where no name is given: its folder's."""
    if path is None:
        return "pagetile-demo"
    return os.path.basename(os.path.abspath(os.fspath(path)))


def read_keys(given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """API keys of a command line, the environment and a file.

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


def read_template(name: str | None, model: str | os.PathLike[str] | None) -> str | None:
    """The source of a chat template; for the shipped checkpoint, which has none, a plain one.

    Raises:
        RequestError: There is none of this name.
    """
    if name is None:
        return built_in_template("plain") if model is None else None
    return built_in_template(name)

"""One line a request on stderr, as text or JSON, each with its request id."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any, TextIO


class Log:
    """Writes lines of ``key=value`` or JSON.

    Attributes:
        as_json: Whether lines are JSON objects.
        stream: Where they go; ``None`` is the current ``sys.stderr``.
        is_on: Whether anything is written.
    """

    def __init__(self) -> None:
        self.as_json = False
        self.is_on = True
        self.stream: TextIO | None = None

    def info(self, message: str, **fields: Any) -> None:
        """Write a line."""
        self._write("info", message, fields)

    def error(
        self,
        message: str,
        *,
        request: Mapping[str, Any] | None = None,
        exc: BaseException | None = None,
        **fields: Any,
    ) -> None:
        """Write a line about an error, with the place where it was raised."""
        if request is not None:
            fields["request_id"] = request.get("state", {}).get("request_id")
        if exc is not None:
            fields["error"] = f"{type(exc).__name__}: {exc}"
            frames = traceback.extract_tb(exc.__traceback__)[-3:]
            fields["at"] = " < ".join(f"{f.filename}:{f.lineno}" for f in reversed(frames))
        self._write("error", message, fields)

    def _write(self, level: str, message: str, fields: Mapping[str, Any]) -> None:
        if not self.is_on:
            return
        given = {key: value for key, value in fields.items() if value is not None}
        if self.as_json:
            line = json.dumps(
                {"time": round(time.time(), 3), "level": level, "message": message, **given},
                default=str,
            )
        else:
            clock = time.strftime("%H:%M:%S")
            words = (f"{key}={_word(value)}" for key, value in given.items())
            line = " ".join([clock, level, message, *words])
        try:
            (self.stream or sys.stderr).write(line + "\n")
        except (OSError, ValueError):
            self.is_on = False  # the log cannot be written any more; keep serving


def _word(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    # A line break in a value could forge another log entry.
    return json.dumps(text) if not text.isprintable() or " " in text or '"' in text else text


log = Log()

"""Runs ``pagetile serve`` in a process, for tests, benchmarks and recordings."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

_STOP_SECONDS = 5.0


@dataclass(frozen=True)
class ServerProcess:
    """A server that accepts connections.

    Attributes:
        process: The process; its output is read by a thread.
        url: Its address, without a path.
        printed: Its output until it accepted connections.
    """

    process: subprocess.Popen[str]
    url: str
    printed: str

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port


@contextmanager
def server_process(*arguments: str) -> Iterator[ServerProcess]:
    """Run ``pagetile serve --port 0`` until the block ends, then terminate it.

    Args:
        *arguments: Further ones of the command line.

    Raises:
        RuntimeError: It ended before it accepted connections; the message has its output.
    """
    command = [sys.executable, "-m", "pagetile", "serve", "--port", "0", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
    ) as process:
        reader = threading.Thread(target=_read_rest, args=(process,), daemon=True)
        try:
            printed, url = _read_start(process)
            reader.start()
            yield ServerProcess(process, url, printed)
        finally:
            _stop(process)
            if reader.is_alive():
                reader.join()


def _read_start(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return the output up to the line with the URL, and the URL."""
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if found := re.search(r"(http://\S+)/v1", line):
            return printed, found[1]
    raise RuntimeError(f"the server ended before it accepted connections: {printed}")


def _read_rest(process: subprocess.Popen[str]) -> None:
    """Read and discard the log, because a full pipe would block the server."""
    assert process.stdout is not None
    for _ in process.stdout:
        pass


def _stop(process: subprocess.Popen[str]) -> None:
    """Terminate a process, and kill it if that takes too long."""
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

"""Processes with a time limit that end with the process that starts them.

It imports nothing of the benchmarks, so that a process starts fast. Run as a file it ties the
command that follows to the thread that started it: see ``tethered``.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

_TASK_SECONDS = 150.0
_PR_SET_PDEATHSIG = 1


def tethered(command: Sequence[str]) -> list[str]:
    """Return a command that the kernel kills when the thread that starts it ends, even by a signal.

    Args:
        command: A program by its path, and its arguments.
    """
    if sys.platform != "linux":
        return list(command)
    # -I: without this folder on the path, whose http.py would hide Python's.
    return [sys.executable, "-I", os.path.abspath(__file__), *command]


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class _Worker:
    process: Any
    connection: Connection
    number: int = -1
    """Index of its task."""
    begin: float = 0.0

    def kill(self) -> None:
        """Kill it, and the compilers that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join(10)
        self.connection.close()


def run_ahead(
    function: Callable[[Any], object],
    tasks: Sequence[Any],
    processes: int,
    seconds: float,
    task_seconds: float = _TASK_SECONDS,
    meanwhile: Callable[[], object] = lambda: None,
) -> dict[int, str | None]:
    """Call a function with every task, in processes that are ended when the time is over.

    If a call raises, ends its process, or takes longer than ``task_seconds``, others still run.

    Args:
        function: A module's function, so that a new process can import it.
        tasks: Its arguments.
        processes: How many run at the same time.
        seconds: Time for all together.
        task_seconds: Time for one.
        task_seconds: For one.
        meanwhile: Called here once the processes have started.

    Returns:
        For the index of each task that ended: None, or its failure.
    """
    waiting = deque(range(len(tasks)))
    found: dict[int, str | None] = {}
    end = time.monotonic() + seconds
    busy: list[_Worker] = []
    lost = 0

    def give(worker: _Worker) -> None:
        """Send the next task, or none, which ends the process."""
        if not waiting:
            worker.kill()
            return
        worker.number, worker.begin = waiting.popleft(), time.monotonic()
        with suppress(OSError):  # the process has ended: the next wait notices it
            worker.connection.send(tasks[worker.number])
        busy.append(worker)

    try:
        for _ in range(min(processes, len(tasks))):
            give(_start(function))
        meanwhile()
        while busy and (now := time.monotonic()) < end:
            first = min(worker.begin for worker in busy) + task_seconds
            ready = wait([worker.connection for worker in busy], max(0.0, min(first, end) - now))
            for worker in list(busy):
                if worker.connection in ready:
                    reason, is_alive = _answer(worker)
                elif time.monotonic() >= worker.begin + task_seconds:
                    reason, is_alive = f"took longer than {task_seconds:g} s", False
                else:
                    continue
                found[worker.number] = reason
                busy.remove(worker)
                if is_alive:
                    give(worker)
                    continue
                worker.kill()
                lost += 1
                if waiting and lost <= 2 * processes:  # else processes may always fail to start
                    give(_start(function))
    finally:
        for worker in busy:
            worker.kill()
    return found


def _answer(worker: _Worker) -> tuple[str | None, bool]:
    """A task's failure or None, and whether its process still runs."""
    try:
        reason: str | None = worker.connection.recv()
        return reason, True
    except (EOFError, OSError):
        worker.process.join(1)
        return f"ended its process with {worker.process.exitcode}", False


def _start(function: Callable[[Any], object]) -> _Worker:
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, function), daemon=True)
    process.start()
    there.close()
    return _Worker(process, here)


def _serve(connection: Connection, function: Callable[[Any], object]) -> None:
    """The loop of a process: call the function for each task, and answer None or the failure."""
    _end_with_parent()
    os.setsid()  # a group with the compilers that it starts, to kill all at once
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        reason = None
        try:
            function(task)
        except Exception as error:  # whatever a compiler or a library raises
            lines = str(error).strip().splitlines()
            reason = lines[0] if lines else repr(error)
        connection.send(reason)


if __name__ == "__main__":
    _end_with_parent()
    os.execv(sys.argv[1], sys.argv[1:])

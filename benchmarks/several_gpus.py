"""Measures the records of a machine on several of its GPUs at the same time, a process for each."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from .processes import tethered

ROOT = Path(__file__).parent.parent


def share_out(seconds: Mapping[str, float], count: int) -> list[list[str]]:
    """Divide records among GPUs so that all end at about the same time.

    From the longest record on, each goes to the GPU with the least work so far.

    Examples:
        >>> share_out({"decode": 140, "prefill": 70, "tiles": 55}, 2)
        [['decode'], ['prefill', 'tiles']]
    """
    shares: list[list[str]] = [[] for _ in range(count)]
    loads = [0.0] * count
    for name in sorted(seconds, key=lambda name: -seconds[name]):
        least = loads.index(min(loads))
        shares[least].append(name)
        loads[least] += seconds[name]
    return [share for share in shares if share]


def run_at_once(commands: Sequence[Sequence[str]]) -> int:
    """Run Python modules with their arguments, each with a GPU and an equal part of the cores.

    Prints their lines with the GPU's number before each.

    Returns:
        The largest exit code.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(i) for i in range(len(commands))]
    cores, count = sorted(os.sched_getaffinity(0)), len(commands)
    processes = []
    for number, command in enumerate(commands):
        process = subprocess.Popen(
            tethered([sys.executable, "-m", *command]), cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": gpus[number], "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        own = cores[number * len(cores) // count : (number + 1) * len(cores) // count]
        os.sched_setaffinity(process.pid, own or cores)
        processes.append(process)
    readers = [
        threading.Thread(target=_print_lines, args=(gpus[number], process))
        for number, process in enumerate(processes)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return max(process.wait() for process in processes)


def _print_lines(gpu: str, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            print(f"GPU {gpu} | {line}", end="", flush=True)

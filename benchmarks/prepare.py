"""Compile and verify what records need, in several processes at once, before anything is timed.

Most of a record's time on a fresh machine is compiling: pagetile's kernels, FlexAttention, modules
that FlashInfer builds at first use. Compilers keep their results on disk. Processes run each case
once and discard its times, so that the measuring process has little left to compile. They also
verify their cases, at the sizes and on the inputs that are timed. Nothing is timed meanwhile.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from .case import Case, Check, compile_effort
from .machine import free_read_memory
from .processes import tethered
from .windows import WindowCase

ROOT = Path(__file__).parent.parent
Command = tuple[str, ...]
"""A module and its arguments."""

_BYTES_A_JOB = 8 << 30  # GPU memory; few cases need more at the same time
_CHUNKS_A_JOB = 4
_MARK = "prepared: "  # marks a line with a case's checks


def default_jobs() -> int:
    """Processes that fit into this machine's GPU memory and cores; none without a GPU."""
    if not torch.cuda.is_available():
        return 0
    memory = torch.cuda.get_device_properties(0).total_memory
    return int(max(1, min(len(os.sched_getaffinity(0)) * 5 // 8, memory // _BYTES_A_JOB)))


def list_commands(
    cases: Sequence[Case], jobs: int, uncompiled: Collection[str] = ()
) -> list[Command]:
    """The commands that prepare cases, in the order in which they should start.

    First the cases that compile longest, each in its own process, since the commands that start
    last are ended when the time is over, and since a process that loses the GPU then affects no
    other case. Then the others, a few in each process.

    Args:
        cases: Cases to prepare.
        jobs: Processes at the same time.
        uncompiled: Names of cases whose compiled peers are left out.
    """
    long = [case for case in cases if compile_effort(case) or _chooses_by_timing(case)]
    rest = [case.name for case in cases if case not in long]
    chunks = max(1, min(len(rest), jobs * _CHUNKS_A_JOB))
    parts = [rest[number::chunks] for number in range(chunks)] if rest else []
    parts = [[case.name] for case in _longest_first(long)] + parts
    return [
        (
            "benchmarks", "prepare", *names,
            *(f"--without-compiled={name}" for name in names if name in uncompiled),
        )
        for names in parts
    ]  # fmt: skip


def _longest_first(cases: Sequence[Case]) -> list[Case]:
    """Cases that compile longest first; within a level, classes of cases in turns.

    Cases of one class compile some of the same kernels, and need the same large memory: at the same
    time they would do both twice.
    """
    levels: dict[int, dict[type, list[Case]]] = defaultdict(lambda: defaultdict(list))
    for case in cases:
        levels[compile_effort(case)][type(case)].append(case)
    return [
        case
        for level in sorted(levels, reverse=True)
        for turn in zip_longest(*levels[level].values())
        for case in turn
        if case is not None
    ]


def prepare(
    commands: Sequence[Command],
    jobs: int,
    seconds: float,
    say: Callable[[str], None],
    grace: float = 0.0,
) -> dict[str, list[Check]]:
    """Run commands, ``jobs`` at a time, and return the checks of the cases that they prepared.

    After ``seconds`` none is started, and ``grace`` seconds later all are ended. A case that fails
    here is verified again, and its failure reported, where it is timed.
    """
    cores = max(1, len(os.sched_getaffinity(0)) // jobs)
    limits = {"OMP_NUM_THREADS": str(cores), "TORCHINDUCTOR_COMPILE_THREADS": str(cores)}
    end = time.monotonic() + seconds
    found: dict[str, list[Check]] = {}
    with ThreadPoolExecutor(jobs) as pool:
        runs = {pool.submit(_run, command, limits, end, grace): command for command in commands}
        for number, run in enumerate(as_completed(runs), 1):
            output, problem = run.result()
            for line in output.splitlines():
                if line.startswith(_MARK):
                    name, checks = json.loads(line.removeprefix(_MARK))
                    found[name] = [Check(*check) for check in checks]
                elif not problem and " failed: " in line:
                    problem = line
            words = " ".join(runs[run])
            say(f"prepared {number} of {len(runs)}: {words}{problem and f': {problem}'}")
    return found


def _run(command: Command, limits: dict[str, str], end: float, grace: float) -> tuple[str, str]:
    """A command's output, and its failure; it starts before ``end``, or not at all.

    It is ended, with its compilers, ``grace`` seconds after ``end``.
    """
    left = end - time.monotonic()
    if left <= 0:
        return "", "no time"
    process = subprocess.Popen(
        tethered([sys.executable, "-m", *command]), cwd=ROOT, env={**os.environ, **limits},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    problem = ""
    try:
        output, errors = process.communicate(timeout=left + grace)
        if process.returncode:
            problem = (errors.strip().splitlines() or ["it printed nothing"])[-1]
    except subprocess.TimeoutExpired:
        problem = "the time for preparing was over"
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return output, problem


def prepare_here(cases: Sequence[Case]) -> Iterator[str]:
    """Verify and run each case once; yields lines that ``prepare`` reads, and reasons of failures.

    The choices that a compiler makes by timing candidates may not stay on disk from here, since
    other processes disturb the times. Cases with such peers compile the candidates here, and choose
    among them again where they are timed.
    """
    if any(map(_chooses_by_timing, cases)):
        _keep_no_choices()
    for case in cases:
        try:
            yield _MARK + json.dumps([case.name, case.verify()])
            case.measure(1)
        except Exception as reason:  # prepare the others all the same
            yield f"{case.name} failed: {reason!r}"
        if torch.cuda.is_available():
            free_read_memory()
            torch.cuda.empty_cache()


def _chooses_by_timing(case: Case) -> bool:
    return isinstance(case, WindowCase) and case.has_compiled_peers


def _keep_no_choices() -> None:
    import torch._functorch.config
    import torch._inductor.config

    settings: Any = torch._inductor.config
    settings.fx_graph_cache = settings.autotune_local_cache = False
    autograd: Any = torch._functorch.config
    autograd.enable_autograd_cache = False

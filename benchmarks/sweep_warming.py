"""Compile what a sweep will run before anything is timed, in several processes.

Triton keeps kernels on disk, and so does FlashInfer, whose modules take nvcc a minute. Each process
calls a shape's kernels once over a cache of a few pages, which compiles the same kernels as the
whole cache; or it plans a library's call. What is not ready when the time is over is compiled when
it is called (kernels), or left out with the reason (libraries).
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .processes import run_ahead
from .sweep_shapes import DrawnShape, SweepShape

__all__ = ["COLD", "Task", "Warmed", "module_of", "plan_tasks", "warm_up"]

_PAGES = 2
_MEMORY = 1 / 12
"""Of the GPU's memory, for one process."""


class Task(NamedTuple):
    """One thing to compile."""

    against: str
    """What the shape's class is compared with."""
    shape: SweepShape
    library: str | None = None
    """Whose module is compiled; ``None``: the kernels of this project."""


def plan_tasks(drawn: Sequence[DrawnShape], libraries: Sequence[str]) -> list[Task]:
    """Return what to compile: the libraries' modules, which take longest, then shapes as drawn.

    So of every class as many shapes are ready if the time is over before. Shapes that come at the
    same time are of different classes, and seldom compile the same kernel twice.
    """
    modules: dict[Any, Task] = {}
    own: dict[Task, None] = {}
    for kind, _, _, shape in drawn:
        if kind.against == "matmul":
            continue
        if kind.against == "peers" and shape.block_size:
            for name in libraries:
                modules.setdefault(module_of(shape, name), Task("peers", shape, name))
        own[Task(kind.against, shape)] = None
    return [*modules.values(), *own]


def module_of(shape: SweepShape, library: str) -> tuple[Any, ...]:
    """What a library's module is compiled for."""
    is_decode = max(shape.query_lens) == 1
    return library, is_decode, shape.head_size, shape.v_head_size, shape.kv_dtype


@dataclass(frozen=True)
class Warmed:
    """What came of the tasks."""

    shapes: frozenset[SweepShape]
    """Those whose kernels are ready."""
    failed: dict[tuple[Any, ...], str]
    """Why libraries' modules are not ready, by ``module_of``."""
    reasons: dict[str, str]
    """All that went wrong, by what it is in words."""

    def missing_libraries(self, shape: SweepShape) -> dict[str, str]:
        """Which libraries must not be called for a shape, and why."""
        return {key[0]: why for key, why in self.failed.items() if key == module_of(shape, key[0])}


COLD = Warmed(frozenset(), {}, {})
"""Where nothing is compiled ahead, as on a CPU."""


def warm_up(
    tasks: Sequence[Task], processes: int, seconds: float, meanwhile: Callable[[], object]
) -> Warmed:
    """Compile ahead on this machine's GPU, for so long at most; call ``meanwhile`` here."""
    found = run_ahead(_compile, tasks, processes, seconds, meanwhile=meanwhile)
    shapes, failed, reasons = set(), {}, {}
    for number, task in enumerate(tasks):
        reason = found.get(number, "was not compiled in time")
        if reason is not None:
            reasons[f"{task.library or 'pagetile'} for {task.shape}"] = reason
            if task.library is not None:
                failed[module_of(task.shape, task.library)] = reason
        elif task.library is None:
            shapes.add(task.shape)
    if len(reasons) == len(tasks):  # of processes that cannot share the GPU: no library's fault
        failed = {}
    return Warmed(frozenset(shapes), failed, reasons)


def _compile(task: Task) -> None:
    """Run a task in a process of its own, which it may end."""
    import torch

    # A share for each: what needs more is compiled later, when it is timed.
    torch.cuda.set_per_process_memory_fraction(_MEMORY)
    try:
        _call_once(task)
        torch.cuda.synchronize()
    except Exception:
        try:
            torch.cuda.synchronize()
        except Exception:  # the GPU would answer every later task of this process with it
            traceback.print_exc()
            os._exit(1)
        raise
    finally:
        torch.cuda.empty_cache()


def _call_once(task: Task) -> None:
    """All memory is free once it returns."""
    from .sweep_inputs import SweepInputs, find_own_calls, plan_library

    inputs = SweepInputs(task.shape, "cuda", pages=_PAGES)
    if task.library is not None:
        plan_library(inputs, task.library)
    else:
        for own in find_own_calls(task.against, inputs).values():
            own.call()

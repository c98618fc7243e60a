"""Compile the kernels of a sweep before anything is timed, in several processes.

Triton keeps kernels on disk, and so does FlashInfer, whose modules take nvcc a minute. Each process
calls a shape's kernels once over a cache of a few pages, for which the same kernels are compiled as
for the whole cache; or it plans a library's call. When the time is over, other kernels are compiled
when they are called, and other libraries are left out with the reason.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .processes import run_ahead
from .sweep_shapes import DrawnShape, SweepShape

_PAGES = 2
_MEMORY = 1 / 12
"""GPU memory for one process."""


class Task(NamedTuple):
    """One thing to compile."""

    against: str
    """The peers of the shape's class."""
    shape: SweepShape
    library: str | None = None
    """The library whose module is compiled; ``None``: the kernels of this project."""


def plan_tasks(drawn: Sequence[DrawnShape], libraries: Sequence[str]) -> list[Task]:
    """Return what to compile: the libraries' modules, which take longest, then shapes as drawn.

    So every class has as many shapes ready if the time is over before the end. Shapes compiled at
    the same time are of different classes, and seldom compile the same kernel twice.
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
    """The parameters of the module that a library compiles for a shape."""
    is_decode = max(shape.query_lens) == 1
    return library, is_decode, shape.head_size, shape.v_head_size, shape.kv_dtype


@dataclass(frozen=True)
class Warmed:
    """The results of the tasks."""

    shapes: frozenset[SweepShape]
    """Shapes whose kernels are compiled."""
    failed: dict[tuple[Any, ...], str]
    """Why libraries' modules are not ready, by ``module_of``."""
    reasons: dict[str, str]
    """Each failed task with its reason."""

    def missing_libraries(self, shape: SweepShape) -> dict[str, str]:
        """The libraries that must not be called for a shape, and why."""
        return {key[0]: why for key, why in self.failed.items() if key == module_of(shape, key[0])}


COLD = Warmed(frozenset(), {}, {})
"""For devices without compiling before, as a CPU."""


def warm_up(
    tasks: Sequence[Task], processes: int, seconds: float, meanwhile: Callable[[], object]
) -> Warmed:
    """Compile on this GPU for ``seconds`` at most; call ``meanwhile`` in this process."""
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
    if len(reasons) == len(tasks):  # processes cannot share the GPU: not the libraries' fault
        failed = {}
    return Warmed(frozenset(shapes), failed, reasons)


def _compile(task: Task) -> None:
    """Run a task in a process of its own, which it may crash."""
    import torch

    # Each process has a share of the memory: a shape that needs more is compiled when it is timed.
    torch.cuda.set_per_process_memory_fraction(_MEMORY)
    try:
        _call_once(task)
        torch.cuda.synchronize()
    except Exception:
        try:
            torch.cuda.synchronize()
        except Exception:  # after this every later task of this process would fail
            traceback.print_exc()
            os._exit(1)
        raise
    finally:
        torch.cuda.empty_cache()


def _call_once(task: Task) -> None:
    """Call each kernel once; all memory is free afterwards."""
    from .sweep_inputs import SweepInputs, find_own_calls, plan_library

    inputs = SweepInputs(task.shape, "cuda", pages=_PAGES)
    if task.library is not None:
        plan_library(inputs, task.library)
    else:
        for own in find_own_calls(task.against, inputs).values():
            own.call()

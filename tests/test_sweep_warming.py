"""Compiling before a sweep: what is compiled, and processes that cannot delay it."""

import os
import time
from dataclasses import replace

import pytest
import torch
from benchmarks import processes, sweep_warming
from benchmarks.libraries import COMPILED_WHEN_PLANNED
from benchmarks.processes import run_ahead
from benchmarks.sweep_shapes import CLASSES, SweepShape, draw_in_turns
from benchmarks.sweep_warming import Task, plan_tasks, warm_up

from pagetile.errors import PagetileError

SHAPE = SweepShape((1,), (9,), 2, 2, 64, 64, 16)


def test_every_shape_is_compiled_and_every_module_once():
    kinds = [kind for kind in CLASSES.values() if kind.against != "matmul"]
    drawn = draw_in_turns(kinds, 0, 20)
    tasks = plan_tasks(drawn, COMPILED_WHEN_PLANNED)
    libraries = [task for task in tasks if task.library]
    assert tasks[: len(libraries)] == libraries  # they take longest
    modules = [sweep_warming.module_of(task.shape, task.library) for task in libraries]
    assert len(set(modules)) == len(modules)
    # Decode of 64, 128 and 256, prefill of 64 and 128, for each library.
    assert len(modules) == 5 * len(COMPILED_WHEN_PLANNED)
    assert [task.shape for task in tasks[len(libraries) :]] == [one.shape for one in drawn]
    again = plan_tasks([*drawn, *drawn], COMPILED_WHEN_PLANNED)
    assert again == tasks


def test_a_cpu_compiles_nothing_ahead():
    assert plan_tasks(draw_in_turns([CLASSES["scores"]], 0, 3), COMPILED_WHEN_PLANNED) == []


def test_what_is_not_ready_is_known_with_its_reason(monkeypatch):
    other = replace(SHAPE, head_size=128, v_head_size=128)
    tasks = [
        Task("peers", SHAPE, "flashinfer"), Task("peers", other, "flashinfer"),
        Task("peers", SHAPE), Task("peers", other),
    ]  # fmt: skip
    answers = {1: "nvcc failed", 2: None, 0: None}  # the last was not reached

    def run(function, tasks, processes, seconds, meanwhile):
        meanwhile()
        return answers

    monkeypatch.setattr(sweep_warming, "run_ahead", run)
    called = []
    warmed = warm_up(tasks, 14, 9.0, lambda: called.append(True))
    assert called == [True]
    assert warmed.shapes == {SHAPE}
    assert warmed.missing_libraries(other) == {"flashinfer": "nvcc failed"}
    assert warmed.missing_libraries(SHAPE) == {}
    assert warmed.reasons == {
        f"flashinfer for {other}": "nvcc failed",
        f"pagetile for {other}": "was not compiled in time",
    }
    answers.clear()  # no process could use the GPU: libraries are tried when they are called
    warmed = warm_up(tasks, 14, 9.0, lambda: None)
    assert (warmed.shapes, warmed.missing_libraries(SHAPE)) == (frozenset(), {})


def test_other_tasks_run_if_one_fails_ends_its_process_or_hangs():
    tasks = ["1", "1 / 0", "__import__('os')._exit(3)", "__import__('time').sleep(99)", "2", "3"]
    begin, called = time.monotonic(), []
    found = run_ahead(
        eval, tasks, 2, 60.0, task_seconds=4.0, meanwhile=lambda: called.append(len(called))
    )
    assert found == {
        0: None, 1: "division by zero", 2: "ended its process with 3",
        3: "took longer than 4 s", 4: None, 5: None,
    }  # fmt: skip
    assert called == [0]
    assert time.monotonic() - begin < 40


def test_processes_end_with_their_compilers_when_the_time_is_over(tmp_path):
    """Each task is a compiler that hangs, in a process of its own."""
    path = tmp_path / "pid"
    hanging = f"__import__('subprocess').run('echo $$ > {path}; exec sleep 99', shell=True)"
    begin = time.monotonic()
    assert run_ahead(eval, [hanging, hanging], 1, 4.0) == {}
    assert time.monotonic() - begin < 20
    pid = int(path.read_text())
    for _ in range(100):
        if not _is_alive(pid):
            break
        time.sleep(0.05)
    assert not _is_alive(pid)


def _is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:  # nothing may wait for what init inherits
        return stat.read().rpartition(")")[2].split()[0] != "Z"


def test_processes_that_cannot_start_are_not_started_for_ever(monkeypatch):
    started = []

    start = processes._start

    def count(function):
        started.append(function)
        return start(function)

    monkeypatch.setattr(processes, "_start", count)
    monkeypatch.setattr(processes, "_serve", os._exit)  # wrong arguments: it ends at once
    found = run_ahead(eval, ["1"] * 50, 1, 60.0)
    assert len(started) == 3
    assert set(found.values()) == {"ended its process with 1"}


def test_compiling_runs_own_calls_over_few_pages_or_plans_a_library(monkeypatch):
    import benchmarks.sweep_inputs as inputs_of

    made, planned = [], []

    class Inputs(inputs_of.SweepInputs):
        def __init__(self, shape, device, seed=0, pages=None):
            super().__init__(shape, "cpu", seed, pages)
            made.append((shape, pages, self))

        def attend(self):
            planned.append("pagetile")
            return super().attend()

    monkeypatch.setattr(inputs_of, "SweepInputs", Inputs)
    monkeypatch.setattr(inputs_of, "plan_library", lambda inputs, name: planned.append(name))
    for name in ("set_per_process_memory_fraction", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: None)
    sweep_warming._compile(Task("peers", SHAPE, "flashinfer"))
    sweep_warming._compile(Task("peers", SHAPE))
    assert planned == ["flashinfer", "pagetile"]
    assert [pages for _, pages, _ in made] == [2, 2]
    eight = replace(SHAPE, kv_dtype=torch.float8_e4m3fn)
    planned.clear()
    sweep_warming._compile(Task("bf16", eight))
    assert planned == ["pagetile", "pagetile"]
    with pytest.raises(PagetileError):
        sweep_warming._compile(Task("peers", replace(SHAPE, num_heads=3)))


def test_a_process_that_has_lost_the_gpu_takes_no_other_task(monkeypatch, capsys):
    def fail(*arguments):
        raise RuntimeError("an illegal memory access was encountered")

    ended = []

    def end(code):
        ended.append(code)
        raise SystemExit

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    monkeypatch.setattr(sweep_warming, "_call_once", fail)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(SystemExit):
        sweep_warming._compile(Task("peers", SHAPE))
    assert ended == [1]
    assert "illegal memory access" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(RuntimeError, match="illegal"):
        sweep_warming._compile(Task("peers", SHAPE))

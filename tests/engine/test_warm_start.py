"""A second start finds on disk what the first compiled; ``enforce_eager`` compiles nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model

from pagetile import LLM
from pagetile.engine.runner import Runner
from pagetile.engine.warming import warm_up

ON_A_CPU = """
from numba import njit
from numba.core import event

with event.install_recorder("numba:compile") as recorder:
    from pagetile import LLM, SamplingParams

    llm = LLM(dtype="float32", device="cpu", num_blocks=16)
    prompts, params = [[5, 6, 7] * 6, [9]], SamplingParams(temperature=0, max_tokens=3)
    llm.generate(prompts, params, use_tqdm=False)
    num_compiled = len(recorder.buffer)
    njit(lambda x: x + 1)(1)
print(num_compiled, len(recorder.buffer) > num_compiled)
"""
FOR_A_GPU = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pagetile.engine import triton_draw

types = {
    "chosen": "*i64", "largest": "*fp32", "last_tokens": "*i64", "lengths": "*i32",
    "bests": "*fp32", "scores": "*fp32", "tokens": "*i32", "rows": "*i32", "ints": "*i32",
    "floats": "*fp64", "addresses": "*i64", "vocab_size": "i32", "num_tiles": "i32",
}
kernel = triton_draw.choose_kernel
signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
triton.compile(ASTSource(kernel, signature, {"NUM_TILES": 128}), target=GPUTarget("cuda", 90, 32))
"""


def start(program: str, **environment: str) -> str:
    """The output of a new process, whose sets and dictionaries of strings have another order."""
    hash_seed = 1 if os.environ.get("PYTHONHASHSEED") != "1" else 2
    found = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONHASHSEED": str(hash_seed)} | environment,
        check=True, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    return found.stdout


def find_files(folder: Path) -> dict[Path, int]:
    """Files below a folder, with the times of their last changes."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_second_start_on_a_cpu_compiles_nothing() -> None:
    """The first start is this process, which compiles what no test before has left on disk."""
    exec(ON_A_CPU, {})
    assert start(ON_A_CPU, CUDA_VISIBLE_DEVICES="").split() == ["0", "True"]


def test_a_kernel_for_a_gpu_is_found_by_the_next_process(tmp_path: Path) -> None:
    """Both are new processes: in this one other tests replace functions that kernels call."""
    pytest.importorskip("triton", reason="Triton is not installed: nothing to compile")
    environment = {"TRITON_CACHE_DIR": str(tmp_path)}
    start(FOR_A_GPU, **environment, PYTHONHASHSEED="3")
    written = find_files(tmp_path)
    start(FOR_A_GPU, **environment)
    assert any(path.suffix == ".cubin" for path in written)
    assert find_files(tmp_path) == written


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_an_eager_engine_makes_nothing_at_its_start(
    enforce_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what ``warm_up`` would record and compile, nor memory for graphs."""
    warmed, sizes = [], []

    class Kernels:
        min_saved_tokens = 1

        def make_graphs(self, max_num_batched_tokens: int) -> None:
            sizes.append(max_num_batched_tokens)

    class Watched(Runner):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.kernels = Kernels()  # type: ignore[assignment]

    monkeypatch.setattr("pagetile.engine.core.Runner", Watched)
    monkeypatch.setattr("pagetile.engine.loading.warm_up", lambda *given: warmed.append(given[0]))
    llm = LLM(
        tiny_model("llama"), num_blocks=8, max_num_batched_tokens=128, enforce_eager=enforce_eager
    )
    assert warmed == ([] if enforce_eager else [llm.engine])
    assert sizes == ([] if enforce_eager else [128])


def test_warming_up_runs_what_a_gpu_records_and_then_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Any] = []

    class Kernels:
        def warm_up(self, show: Any) -> None:
            done.append(show)

    monkeypatch.setattr("pagetile.engine.warming.run_made_up", lambda *args: done.append(args))
    engine = LLM(tiny_model("llama"), num_blocks=8, max_num_batched_tokens=128).engine
    assert not done, "a CPU has nothing to record"
    monkeypatch.setattr(engine._runner, "kernels", Kernels())
    warm_up(engine, show := object())  # type: ignore[arg-type]
    assert done == [show, (engine, 3 * 128)]

"""The machine of a record: its name, its versions, and its read bandwidth."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import subprocess
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch

from pagetile.version import find_version

READ_BYTES = 1 << 30
PEERS = {
    "flashinfer": "flashinfer-python",
    "flash_attn": "flash-attn",
    "flash_attn 3": "flash-attn-3",
    "vllm triton": "vllm",
    "vllm flash_attn 3": "vllm",
    "vllm v2": "vllm",
}
"""Packages with kernels that are compared where installed, by the names of contestants."""
_CHANGED = " and changes"
_CODE = ("src", "benchmarks", ":!benchmarks/results")
_PACKAGES = ("torch", "triton", "numba", "transformers", "numpy", *PEERS.values())


def describe() -> dict[str, Any]:
    """The machine, as a record has it."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        **(
            {"gpu": torch.cuda.get_device_name()}
            if torch.cuda.is_available()
            else {"simd": torch.backends.cpu.get_cpu_capability()}
        ),
    }


def describe_run() -> dict[str, Any]:
    """Commit, date and versions, as each case of a record has them: computed once a run."""
    return {
        "commit": _commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def is_clean(commit: str | None) -> bool:
    """Whether a commit has all of the code that was measured."""
    return commit is not None and not commit.endswith(_CHANGED)


class BackgroundLoad:
    """The load that other processes put on the machine from now on; it disturbs the times."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), _cpu_seconds_of_others()

    @property
    def share(self) -> float:
        """Share of all cores' time that other processes and the hypervisor took."""
        start, others = self._start
        elapsed = (time.perf_counter() - start) * (os.cpu_count() or 1)
        # The system counts in ticks of 10 ms: the share over less than one is meaningless.
        return min(1.0, max(0.0, (_cpu_seconds_of_others() - others) / elapsed))


def _cpu_seconds_of_others() -> float:
    total, own = psutil.cpu_times(), psutil.Process().cpu_times()
    idle = total.idle + getattr(total, "iowait", 0.0)
    # The time of guests is included in that of users.
    guests = getattr(total, "guest", 0.0) + getattr(total, "guest_nice", 0.0)
    # Ended child processes, as a benchmark's server, belong to this process.
    children = getattr(own, "children_user", 0.0) + getattr(own, "children_system", 0.0)
    return float(sum(total) - idle - guests - own.user - own.system - children)


def read_all(device: str = "cpu", num_bytes: int = READ_BYTES) -> torch.Tensor:
    """Read memory with the whole machine: the peer of kernels that are bound by reading."""
    return _big_tensor(device, num_bytes).sum()


def free_read_memory() -> None:
    """Free the tensor of ``read_all``; its next call allocates it again."""
    _big_tensor.cache_clear()


@functools.cache
def _big_tensor(device: str, num_bytes: int) -> torch.Tensor:
    # Ones, not zeros: untouched pages all map to the same page of zeros.
    return torch.ones(num_bytes // 4, dtype=torch.float32, device=device)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _versions() -> dict[str, str | None]:
    return {"pagetile": find_version(), **{name: _version(name) for name in _PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    archived = (Path(__file__).parent / "archived.txt").read_text().strip()
    if not archived.startswith("$"):  # `git archive` has put the commit there
        return archived
    commit = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *_CODE)
    return commit + _CHANGED if commit and changed else commit


def _git(*arguments: str) -> str | None:
    here = Path(__file__).parent.parent
    try:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None

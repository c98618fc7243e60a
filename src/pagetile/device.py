"""Hardware queries; no other file makes any."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class DeviceInfo:
    """Properties of a device that plans depend on; tests make their own."""

    kind: str
    """``"cpu"`` or ``"cuda"``."""
    num_workers: int
    """Number of torch's threads on a CPU, or of multiprocessors on a GPU."""
    name: str = ""
    bf16_dot: bool = False
    """Whether kernels on a CPU multiply pairs of bfloat16 (AVX512-BF16)."""
    bf16_tiles: bool = False
    """Whether they multiply tiles of such pairs (AMX)."""
    capability: tuple[int, int] = (0, 0)
    """A GPU's compute capability: (9, 0) is Hopper."""
    shared_memory: int = 0
    """Most bytes of shared memory of a program on a GPU; 0: not known."""

    @property
    def is_small(self) -> bool:
        """Whether a program has only 99 KiB of shared memory, as on consumer GPUs."""
        return 0 < self.shared_memory < 160 << 10

    @staticmethod
    def of(device: torch.device) -> DeviceInfo:
        """Return the device of a tensor."""
        if device.type == "cpu":
            return _cpu(torch.get_num_threads())
        if device.type == "cuda":
            return _cuda(torch.cuda.current_device() if device.index is None else device.index)
        return DeviceInfo(device.type, 1)


@functools.cache
def _cpu(num_threads: int) -> DeviceInfo:
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    name = capabilities.get("cpu_name") or platform.processor() or platform.machine()
    bf16_dot = "avx512bf16" in cpu_features()
    return DeviceInfo("cpu", num_threads, name, bf16_dot, bf16_dot and _may_use_tiles())


@functools.cache
def _may_use_tiles() -> bool:
    """Return whether the target has AMX, after asking Linux to permit it to this process.

    Linux enables the tile registers for all threads of a process that asks, and of its children.
    """
    if sys.platform != "linux" or not {"amx-tile", "amx-bf16"} <= cpu_features():
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18  # numbers of x86-64
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


@functools.cache
def cpu_features() -> frozenset[str]:
    """Return the instruction sets of Numba's target, by LLVM's names.

    The target is the host, or that of ``NUMBA_CPU_NAME`` and ``NUMBA_CPU_FEATURES``. A CPU named
    without features is treated as having none. Empty without Numba.
    """
    try:
        from numba.core.registry import cpu_target
    except ImportError:
        return frozenset()
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return frozenset(name[1:] for name in features.split(",") if name.startswith("+"))


@functools.cache
def vector_registers() -> tuple[int, int]:
    """Return the float32 lanes of a vector register of the target, and how many it has."""
    features = cpu_features()
    if "avx512f" in features:
        return 16, 32
    if "avx2" in features:
        return 8, 16
    return 4, 32 if platform.machine() in ("aarch64", "arm64") else 16


@functools.cache
def _cuda(index: int) -> DeviceInfo:
    properties: Any = torch.cuda.get_device_properties(index)
    return DeviceInfo(
        "cuda",
        properties.multi_processor_count,
        properties.name,
        capability=(properties.major, properties.minor),
        shared_memory=properties.shared_memory_per_block_optin,
    )


def default_device() -> torch.device:
    """Return the default device of models: a GPU if torch finds one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def available_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device, without evicting another process's memory."""
    if device.type == "cuda":
        # torch returns cached memory before it runs out.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        free = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    return min([free, *_left_by_limits()])


def _left_by_limits(root: Path = Path("/sys/fs/cgroup"), own: str | None = None) -> list[int]:
    """Yield the bytes left by each memory limit of Linux's control groups, version 1 or 2."""
    if own is None:
        try:
            own = Path("/proc/self/cgroup").read_text()
        except OSError:
            return []
    found = []
    for _, controllers, path in (line.split(":", 2) for line in own.splitlines()):
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        here = base / path.strip("/")
        for folder in (here, *here.parents):
            with suppress(OSError, ValueError):  # "max" is no limit, and many folders have none
                found.append(_left(folder, *names))
    return found


def _left(folder: Path, limit: str, used: str, idle: str) -> int:
    lines = (folder / "memory.stat").read_text().splitlines()
    stat = dict(line.split() for line in lines)  # the page cache is released on demand
    held = int((folder / used).read_text()) - int(stat.get(idle, 0))
    return max(0, int((folder / limit).read_text()) - held)


@contextmanager
def refusing_to_wait() -> Iterator[None]:
    """Raise RuntimeError wherever torch would make the host wait for a GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it a prototype, once a process
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)

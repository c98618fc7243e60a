"""Cases of moving keys and values on a GPU, against torch's copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagetile.analysis.timing import Times, admit
from pagetile.ops.copy_blocks import copy_blocks
from pagetile.ops.write_kv import write_kv

from .case import Check, Measurement, Target
from .gate import check_kernel
from .gpu_timing import time_host, time_in_turns

COPY = "torch copy of as many bytes"
Calls = dict[str, Callable[[], object]]
_OFFSETS = (0, *(n << 20 for n in (1, 3, 17, 70, 150, 301)))
"""Bytes between the end of a copy's source and its target. On one H200 the same copy took up to 1.5
times as long for some distances; the fastest of these is the peer."""


@dataclass(frozen=True)
class WriteKVCase:
    """``write_kv`` into random slots: ``share of copy bandwidth`` is against torch's copy.

    Bytes counted are those read and those written, each once: new keys and values, quantised
    ones, slots and scales.
    """

    name: str
    num_tokens: int
    targets: tuple[Target, ...] = ()
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype = torch.bfloat16
    scales: str = "none"
    """``"none"``, ``"head"`` or ``"token"``."""
    device: str = "cuda"

    @property
    def about(self) -> str:
        """The problem in one line."""
        types = " to ".join(str(t).removeprefix("torch.") for t in (self.dtype, self.cache_dtype))
        heads = f"{self.num_kv_heads} heads of {self.head_size}, blocks of {self.block_size}"
        scales = "" if self.scales == "none" else f", a scale for each {self.scales}"
        return f"write_kv: {self.num_tokens} tokens, {heads}, {types}{scales}"

    def verify(self) -> list[Check]:
        """Compare every byte of the caches and scales with the reference's."""
        results = []
        for impl in ("auto", "reference"):
            arguments = self._make_inputs()
            write_kv(**arguments, impl=impl)
            results.append([arguments[name] for name in arguments if "_" in name])
        same = [torch.equal(_bytes(a), _bytes(b)) for a, b in zip(*results, strict=True)]
        arguments = self._make_inputs()
        return [
            Check("caches and scales", all(same), f"equal to the reference: {same}"),
            check_kernel("write_kv", lambda: write_kv(**arguments)),
        ]

    def measure(self, repeats: int | None) -> Measurement:
        """Time pagetile, torch's copy, and torch's scatter."""
        arguments = self._make_inputs()
        k, v, k_cache, v_cache, slots = list(arguments.values())[:5]
        num_bytes = sum(t.nbytes for t in (k, v, slots))
        num_bytes += (k.numel() + v.numel()) * k_cache.element_size()
        if self.scales == "token":
            num_bytes += 8 * self.num_tokens * self.num_kv_heads
        calls: Calls = {"pagetile": lambda: write_kv(**arguments), **_copies(num_bytes)}
        absent: dict[str, str] = {}
        if self.scales == "none":
            rows = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
            write_kv(**arguments)
            exact = [to.clone() for to in rows]

            def scatter() -> list[Tensor]:
                return [to.index_copy_(0, slots, x) for to, x in zip(rows, (k, v), strict=True)]

            def judge(name: str, found: list[Tensor]) -> str | None:
                same = map(torch.equal, found, exact)
                return None if all(same) else "wrong: other bytes than write_kv's"

            for to in rows:
                to.zero_()  # as they were before write_kv
            peers, absent = admit({"torch index_copy_": scatter}, judge)
            calls |= peers
        times = _best_copy(time_in_turns(calls, self.device, repeats=repeats))
        times["host, pagetile"] = time_host(lambda: write_kv(**arguments))
        return Measurement(times, _compare(times, num_bytes), absent)

    def _make_inputs(self) -> dict[str, Any]:
        generator = torch.Generator("cuda").manual_seed(0)
        num_blocks = -(-self.num_tokens // self.block_size) + 1
        shape = (num_blocks, self.block_size, self.num_kv_heads)
        new = [
            torch.randn(
                self.num_tokens,
                self.num_kv_heads,
                self.head_size,
                generator=generator,
                device="cuda",
            ).to(self.dtype)
            for _ in range(2)
        ]
        caches = [
            torch.zeros(*shape, self.head_size, dtype=self.cache_dtype, device="cuda")
            for _ in range(2)
        ]
        blocks = torch.randperm(num_blocks, generator=generator, device="cuda")
        slots = blocks[:, None] * self.block_size + torch.arange(self.block_size, device="cuda")
        numbers = torch.zeros(shape, device="cuda")
        if self.scales == "head":
            numbers = torch.linspace(0.01, 0.03, self.num_kv_heads, device="cuda")
        names = ("k", "v", "k_cache", "v_cache", "slot_mapping")
        values = (*new, *caches, slots.flatten()[: self.num_tokens].contiguous())
        scales = {} if self.scales == "none" else {"k_scale": numbers, "v_scale": numbers.clone()}
        return {**dict(zip(names, values, strict=True)), **scales}


@dataclass(frozen=True)
class CopyBlocksCase:
    """``copy_blocks`` of random blocks in the caches of many layers, or to and from the host.

    Metrics are those of ``WriteKVCase``; to and from the host, torch's copy is of pinned memory.
    """

    name: str
    num_pairs: int
    targets: tuple[Target, ...] = ()
    num_caches: int = 64
    block: tuple[int, ...] = (16, 8, 128)
    where: str = "on the GPU"
    """Or ``"to the host"``, ``"from the host"``."""
    device: str = "cuda"

    @property
    def about(self) -> str:
        """The problem in one line."""
        return (
            f"copy_blocks: {self.num_pairs} blocks of {list(self.block)} bfloat16 in "
            f"{self.num_caches} caches, {self.where}"
        )

    def verify(self) -> list[Check]:
        """Compare every byte of every cache with the reference's."""
        results = []
        for impl in ("auto", "reference"):
            caches, pairs = self._make_inputs()
            copy_blocks(caches, pairs, impl=impl)
            torch.cuda.synchronize()
            results.append([_bytes(to) for _, to in caches])
        same = [torch.equal(a, b) for a, b in zip(*results, strict=True)]
        caches, pairs = self._make_inputs()
        return [
            Check("caches", all(same), f"{sum(same)} of {len(same)} equal to the reference"),
            check_kernel("copy_blocks", lambda: copy_blocks(caches, pairs)),
        ]

    def measure(self, repeats: int | None) -> Measurement:
        """Time pagetile and torch's copy; the host's time, also for a single block."""
        caches, pairs = self._make_inputs()
        num_bytes = self.num_pairs * sum(to[0].nbytes for _, to in caches)
        on_gpu = self.where == "on the GPU"
        calls: Calls = {"pagetile": lambda: copy_blocks(caches, pairs)}
        calls |= _copies(2 * num_bytes) if on_gpu else {COPY: _transfer(num_bytes, self.where)}
        # Not captured: each call allocates pinned memory for its pairs.
        times = _best_copy(time_in_turns(calls, self.device, repeats=repeats, captured=False))
        times["host, pagetile"] = time_host(lambda: copy_blocks(caches, pairs), rounds=3)
        times["host, pagetile, 1 block, 2 caches"] = time_host(
            lambda: copy_blocks(caches[:2], pairs[:1])
        )
        return Measurement(times, _compare(times, num_bytes * (2 if on_gpu else 1)))

    def _make_inputs(self) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        generator = torch.Generator("cuda").manual_seed(0)
        shape = (2 * self.num_pairs + 1, *self.block)
        caches = []
        for _ in range(self.num_caches):
            cache = torch.randn(shape, generator=generator, device="cuda").bfloat16()
            if self.where == "on the GPU":
                caches.append((cache, cache))
            elif self.where == "to the host":
                caches.append((cache, torch.zeros(shape, dtype=cache.dtype, pin_memory=True)))
            else:
                caches.append((cache.cpu().pin_memory(), torch.zeros_like(cache)))
        blocks = torch.randperm(shape[0], generator=torch.Generator().manual_seed(0))
        return caches, blocks[: 2 * self.num_pairs].view(2, -1).T.contiguous()


def _copies(num_bytes: int) -> Calls:
    """Torch's copy on the GPU that reads and writes ``num_bytes`` in all, at several distances."""
    half = num_bytes // 2
    memory = torch.empty(2 * half + _OFFSETS[-1], dtype=torch.uint8, device="cuda").random_()
    source = memory[:half]
    return {
        f"{COPY}, {offset >> 20} MiB further": _copying(source, memory[half + offset :][:half])
        for offset in _OFFSETS
    }


def _best_copy(times: dict[str, Times]) -> dict[str, Times]:
    """The times, with only the fastest copy's of torch's."""
    copies = [times[name] for name in times if name.startswith(COPY)]
    rest = {name: time for name, time in times.items() if not name.startswith(COPY)}
    return rest | {COPY: min(copies, key=lambda time: time.median)}


def _transfer(num_bytes: int, where: str) -> Callable[[], object]:
    """Torch's copy between the GPU and pinned memory."""
    there = torch.empty(num_bytes, dtype=torch.uint8, device="cuda").random_()
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    return _copying(there, host) if where == "to the host" else _copying(host, there)


def _copying(source: Tensor, to: Tensor) -> Callable[[], object]:
    return lambda: to.copy_(source, non_blocking=True)


def _compare(times: dict[str, Times], num_bytes: int) -> dict[str, float]:
    own, copy = times["pagetile"].median, times[COPY].median
    return {
        "GB/s": num_bytes / own / 1e9,
        "GB/s of torch's copy": num_bytes / copy / 1e9,
        "share of copy bandwidth": copy / own,
        "host, microseconds": times["host, pagetile"].median * 1e6,
    }


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)

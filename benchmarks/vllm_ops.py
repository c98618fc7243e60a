"""vLLM's operators over x-packed caches on a GPU, in the cases of the table in the design document.

``paged_attention_v1`` and ``_v2``, ``pagetile.paged_attention`` over the same numbers in its own
layout and, where such a vLLM is installed, vLLM's own kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagetile import PagedBatch, paged_attention
from pagetile.analysis.timing import admit, ratio
from pagetile.integrations import vllm_ops
from pagetile.integrations.vllm_ops.attention import _find_implementation
from pagetile.testing import TABLE_POISON

from .case import Check, Measurement, Target, at_least
from .gate import PEER_ERROR, Rows, allowed_error, expected_rows
from .gpu_attention import READ, READ_BYTES
from .gpu_timing import time_in_turns
from .machine import read_all

PARTITION = 512
E4M3 = torch.float8_e4m3fn
_K_SCALE, _V_SCALE = 0.02, 0.015


@dataclass(frozen=True)
class VllmOpsCase:
    """A decode step of sequences of one length, by both operators.

    Metrics: ``GB/s`` of keys and values of the faster operator, its ``share of read bandwidth``,
    and ``x vllm``, against vLLM's faster kernel where it is installed.
    """

    num_seqs: int
    length: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    kv_dtype: torch.dtype = torch.bfloat16
    targets: tuple[Target, ...] = ()
    device: str = "cuda"

    @property
    def name(self) -> str:
        """Its name on the command line."""
        kind = "-e4m3" * (self.kv_dtype == E4M3)
        sizes = f"{self.num_heads}/{self.num_kv_heads}-{self.head_size}"
        return f"vllm-ops-{self.num_seqs}x{self.length}-{sizes}{kind}".replace("/", "-")

    @property
    def about(self) -> str:
        """The problem in one line."""
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_size}"
        kept = str(self.kv_dtype).removeprefix("torch.")
        return f"vllm_ops: {self.num_seqs} x {self.length}, {heads}, {kept}"

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values."""
        per_key = 2 * self.num_kv_heads * self.head_size * self.kv_dtype.itemsize
        return self.num_seqs * self.length * per_key

    def verify(self) -> list[Check]:
        """Rows of both operators at full size, against float64."""
        inputs = Inputs(self, self.device)
        rows, allowed = inputs.rows(), allowed_error(inputs.query.dtype)
        run = _find_implementation(inputs.query.device, self.kv_dtype)
        impl = run.__module__.rpartition(".")[2]
        checks = []
        for name, call in inputs.calls(vllm_ops).items():
            inputs.out.fill_(torch.nan)
            call()
            error = rows.error(inputs.out)
            detail = f"relative error {error:.2g}, allowed {allowed:.2g}"
            checks.append(Check(f"{name} by {impl}, {self.about}", error <= allowed, detail))
        return checks

    def measure(self, repeats: int | None) -> Measurement:
        """Time all in turns by graph replay with a cold cache."""
        inputs = Inputs(self, self.device)
        peers, absent = inputs.vllm_calls()
        own = inputs.calls(vllm_ops) | {"own layout": inputs.own_layout()}
        calls = {**own, **peers, READ: lambda: read_all(self.device, READ_BYTES)}
        times = time_in_turns(calls, self.device, repeats=repeats)
        best = min((times[name] for name in ("v1", "v2")), key=lambda time: time.median)
        metrics = {
            "GB/s": self.num_bytes / best.median / 1e9,
            "share of read bandwidth": self.num_bytes / READ_BYTES * ratio(times[READ], best),
        }
        if peers:
            fastest = min((times[name] for name in peers), key=lambda time: time.median)
            metrics["x vllm"] = ratio(fastest, best)
        return Measurement(times, metrics, absent)


AHEAD_OF_VLLM = (at_least("x vllm", 1),)
VLLM_CASES = tuple(
    replace(case, targets=AHEAD_OF_VLLM)
    for case in (
        VllmOpsCase(64, 4096),
        VllmOpsCase(256, 2048),
        VllmOpsCase(16, 32768),
        VllmOpsCase(1, 131072),
        VllmOpsCase(1, 8192),
        VllmOpsCase(8, 4096),
        VllmOpsCase(64, 1024),
        VllmOpsCase(32, 4096, num_kv_heads=32),
        VllmOpsCase(128, 2048, num_heads=64),
        VllmOpsCase(64, 4096, num_heads=16, head_size=64),
        VllmOpsCase(32, 4096, num_heads=16, num_kv_heads=2, head_size=256),
        VllmOpsCase(64, 4096, kv_dtype=E4M3),
        VllmOpsCase(16, 32768, kv_dtype=E4M3),
        VllmOpsCase(128, 2048, num_heads=64, kv_dtype=E4M3),
    )
)


class Inputs:
    """A case's tensors: blocks in random order, garbage past the end of every table row."""

    def __init__(self, row: VllmOpsCase, device: str = "cuda", seed: int = 0) -> None:
        self.row = row
        generator = torch.Generator(device).manual_seed(seed)
        per_seq = -(-row.length // row.block_size)
        num_blocks = row.num_seqs * per_seq + 3
        kept = (num_blocks, row.block_size, row.num_kv_heads, row.head_size)
        self.is_8_bit = row.kv_dtype.itemsize == 1

        def draw() -> Tensor:
            numbers = torch.randn(kept, generator=generator, device=device, dtype=torch.bfloat16)
            return (numbers * 30).to(row.kv_dtype) if self.is_8_bit else numbers

        self.k_cache, self.v_cache = draw(), draw()
        self.packed = vllm_ops.pack_cache(self.k_cache, self.v_cache)
        if self.is_8_bit:
            self.packed = self.packed[0].view(torch.uint8), self.packed[1].view(torch.uint8)
        order = torch.randperm(num_blocks, generator=generator, device=device)
        used = order[: row.num_seqs * per_seq].int().view(row.num_seqs, per_seq)
        self.tables = torch.nn.functional.pad(used, (0, 2), value=TABLE_POISON)
        self.seq_lens = torch.full((row.num_seqs,), row.length, dtype=torch.int32, device=device)
        shape = (row.num_seqs, row.num_heads, row.head_size)
        self.query = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        self.out = torch.empty_like(self.query)
        parts = (*shape[:2], -(-row.length // PARTITION))
        self.sums = torch.empty(parts, device=device), torch.empty(parts, device=device)
        self.tmp = torch.empty((*parts, row.head_size), device=device, dtype=torch.bfloat16)
        self.scales = tuple(torch.tensor([s], device=device) for s in (_K_SCALE, _V_SCALE))
        self.batch = PagedBatch.decode(self.tables, self.seq_lens, row.length)

    def calls(self, ops: Any) -> dict[str, Callable[[], object]]:
        """Both operators of ``ops``."""
        row = self.row
        rest = (
            self.query, *self.packed, row.num_kv_heads, row.head_size**-0.5, self.tables,
            self.seq_lens, row.block_size, row.length, None, "fp8" if self.is_8_bit else "auto",
            *self.scales,
        )  # fmt: skip
        return {
            "v1": lambda: ops.paged_attention_v1(self.out, *rest),
            "v2": lambda: ops.paged_attention_v2(self.out, *self.sums, self.tmp, *rest),
        }

    def own_layout(self) -> Callable[[], object]:
        """``pagetile.paged_attention`` over the same numbers in its own layout."""
        names = ("k_scale", "v_scale")
        scales: Any = dict(zip(names, self.scales, strict=True)) if self.is_8_bit else {}
        return lambda: paged_attention(self.query, self.k_cache, self.v_cache, self.batch, **scales)

    def rows(self) -> Rows:
        """Random rows of the result in float64."""
        names = ("k_scale", "v_scale")
        scales: Any = dict(zip(names, self.scales, strict=True)) if self.is_8_bit else {}
        return expected_rows(self.query, self.k_cache, self.v_cache, self.batch, **scales)

    def vllm_calls(self) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
        """Calls of vLLM's own kernels that compute the same, and why others are left out."""
        try:
            from vllm import _custom_ops  # type: ignore[import-not-found]
        except ImportError:
            return {}, {"vllm v1": "not installed", "vllm v2": "not installed"}
        calls = {f"vllm {name}": call for name, call in self.calls(_custom_ops).items()}
        rows = self.rows()

        def judge(name: str, result: object) -> str | None:
            error = rows.error(self.out)
            return None if error <= PEER_ERROR else f"wrong: {error:.2g} off float64"

        return admit(calls, judge)

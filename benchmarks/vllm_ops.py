"""vLLM's operators over x-packed caches on a GPU, on the rows of the design's table.

Every row is checked against float64 first (on some of its sequences). Then ``paged_attention_v1``
and ``_v2`` are timed by graph replay with a cold cache, beside ``pagetile.paged_attention`` over
the same numbers in its own layout and, where vLLM is installed with them, vLLM's own kernels::

    python -m benchmarks.vllm_ops [ROW]... [--out FILE.json]
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from pagetile import PagedBatch, paged_attention
from pagetile.integrations import vllm_ops
from pagetile.testing import TABLE_POISON

from .gpu_attention import read_bandwidth
from .gpu_timing import time_gpu
from .machine import describe_run

__all__ = ["ROWS", "Row", "measure"]

PARTITION = 512
E4M3 = torch.float8_e4m3fn
_K_SCALE, _V_SCALE = 0.02, 0.015


@dataclass(frozen=True)
class Row:
    """A decode step: as many sequences of one length."""

    num_seqs: int
    length: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    kv_dtype: torch.dtype = torch.bfloat16
    vllm: float = 0.0
    """GB/s of the better of vLLM's two kernels on an H200, from an earlier run."""

    @property
    def name(self) -> str:
        """How the command line calls it."""
        kind = "-e4m3" * (self.kv_dtype == E4M3)
        sizes = f"{self.num_heads}/{self.num_kv_heads}-{self.head_size}"
        return f"{self.num_seqs}x{self.length}-{sizes}{kind}"

    @property
    def num_bytes(self) -> int:
        """Of all keys and values."""
        per_key = 2 * self.num_kv_heads * self.head_size * self.kv_dtype.itemsize
        return self.num_seqs * self.length * per_key


ROWS = (
    Row(64, 4096, vllm=1216),
    Row(256, 2048, vllm=1245),
    Row(16, 32768, vllm=1242),
    Row(1, 131072, vllm=1103),
    Row(1, 8192, vllm=661),
    Row(8, 4096, vllm=867),
    Row(64, 1024, vllm=1037),
    Row(32, 4096, num_kv_heads=32, vllm=3576),
    Row(128, 2048, num_heads=64, vllm=646),
    Row(64, 4096, num_heads=16, head_size=64, vllm=2291),
    Row(32, 4096, num_heads=16, num_kv_heads=2, head_size=256, vllm=466),
    Row(64, 4096, kv_dtype=E4M3, vllm=613),
    Row(16, 32768, kv_dtype=E4M3, vllm=620),
    Row(128, 2048, num_heads=64, kv_dtype=E4M3, vllm=319),
)


class Inputs:
    """A row's tensors: blocks in random order, garbage past the end of every table row."""

    def __init__(self, row: Row, device: str = "cuda", seed: int = 0) -> None:
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

    def errors(self) -> dict[str, float]:
        """Largest difference of each operator's result from float64, as a part of the largest."""
        found = {}
        for name, call in self.calls(vllm_ops).items():
            self.out.fill_(torch.nan)
            call()
            worst = 0.0
            for seq in {0, self.row.num_seqs // 2, self.row.num_seqs - 1}:
                expected = self._oracle(seq)
                gap = (self.out[seq].double() - expected).abs().max() / expected.abs().max()
                worst = max(worst, float(gap.nan_to_num(torch.inf)))
            found[name] = worst
        return found

    def _oracle(self, seq: int) -> Tensor:
        blocks = self.tables[seq, :-2].long()
        k, v = (
            cache[blocks].flatten(0, 1)[: self.row.length].double()
            for cache in (self.k_cache, self.v_cache)
        )
        if self.is_8_bit:
            k, v = k * self.scales[0].double(), v * self.scales[1].double()
        q = self.query[seq].double().view(self.row.num_kv_heads, -1, self.row.head_size)
        s = torch.einsum("hgd,nhd->hgn", q, k) * self.row.head_size**-0.5
        return torch.einsum("hgn,nhd->hgd", s.softmax(-1), v).flatten(0, 1)


def measure(row: Row) -> dict[str, Any]:
    """Check and time a row: ``GB/s`` of keys and values of each contestant."""
    inputs = Inputs(row)
    errors = inputs.errors()
    if max(errors.values()) > 2**-6:
        return {"row": row.name, "errors": errors, "wrong": True}
    calls = inputs.calls(vllm_ops) | {"own layout": inputs.own_layout()}
    calls |= {f"vllm {name}": call for name, call in _vllm_calls(inputs).items()}
    rates = {
        name: row.num_bytes / time_gpu(call, milliseconds=60).median / 1e9
        for name, call in calls.items()
    }
    best = max(rates["v1"], rates["v2"])
    record = {
        "row": row.name,
        "errors": errors,
        "GB/s": rates,
        "share of read bandwidth": best * 1e9 / read_bandwidth(),
        "x vllm, earlier run": best / row.vllm if row.vllm else None,
    }
    beside = [rate for name, rate in rates.items() if name.startswith("vllm")]
    return record | ({"x vllm": best / max(beside)} if beside else {})


def _vllm_calls(inputs: Inputs) -> dict[str, Callable[[], object]]:
    """Calls of vLLM's own kernels, where a release that has them is installed."""
    try:
        from vllm import _custom_ops  # type: ignore[import-not-found]
    except ImportError:
        return {}
    try:
        calls = inputs.calls(_custom_ops)
        for call in calls.values():
            call()
    except (AttributeError, RuntimeError):
        return {}
    return calls


def main(
    rows: Annotated[list[str] | None, typer.Argument(metavar="[ROW]...")] = None,
    out: Annotated[Path | None, typer.Option(help="Write a record here.")] = None,
) -> None:
    """Measure the rows whose names begin so; all, if none are named."""
    chosen = [row for row in ROWS if not rows or row.name.startswith(tuple(rows))]
    records = []
    for row in chosen:
        records.append(measure(row))
        print(json.dumps(records[-1]), flush=True)
        torch.cuda.empty_cache()
        if out is not None:
            out.write_text(json.dumps({**describe_run(), "rows": records}, indent=1) + "\n")
    if any(record.get("wrong") for record in records):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

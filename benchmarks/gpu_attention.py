"""Cases of paged attention on a GPU: decode against the read bandwidth, prefill against SDPA.

Inputs are made on the GPU: blocks in random order, table entries past a sequence's end far out
of range, and for the correctness gate the poisoned problems of ``pagewise.testing``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pagewise import PagedBatch, paged_attention
from pagewise.ops.paged_attention.plan import Plan
from pagewise.ops.paged_attention.problem import Problem
from pagewise.ops.scales import LARGEST_CODE
from pagewise.testing import TABLE_POISON, PagedCase, compare, make_inputs, oracle, tolerance
from pagewise.tiles.state import AttentionOutput

from .case import Check, Measurement, Target
from .gpu_timing import time_gpu, time_gpu_clean, time_gpu_in_turns, time_host
from .libraries import find_libraries
from .timing import Times

__all__ = [
    "GpuBlockSizesCase",
    "GpuDecodeCase",
    "GpuPrefillCase",
    "Inputs",
    "check_against_float64",
]

READ_GIB = 4
CLEAN = ", clean cache"
_HOST_ROUNDS = 50
SHORT = 1100  # keys of a sequence that is verified: the oracle takes float64 and much memory
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Shape:
    """A model's attention, and how its cache is kept."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    kv_dtype: torch.dtype = torch.bfloat16
    scales: str | None = None

    def __str__(self) -> str:
        """In words."""
        kept = str(self.kv_dtype).removeprefix("torch.")
        kept += f" with a scale for each {self.scales}" if self.scales else ""
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_size}"
        return f"{heads}, blocks of {self.block_size}, {kept}"

    @property
    def bytes_per_key(self) -> int:
        """Of a token's key and value in the cache, scales aside."""
        return 2 * self.num_kv_heads * self.head_size * self.kv_dtype.itemsize


@dataclass(frozen=True)
class GpuDecodeCase:
    """One new token for each of some sequences, as one captured call.

    Metrics: ``GB/s`` of keys and values; ``share of read bandwidth``, of summing 4 GiB in the
    same run; ``x PEER``, among them ``reading alone``, a kernel that only reads the same pages;
    all of these once more for a ``clean cache``; ``host, microseconds`` of an eager call, in the
    round that was disturbed least; ``GB/s / OTHER``, against the same work on other lengths or
    blocks.
    """

    name: str
    seq_lens: tuple[int, ...]
    shape: Shape = Shape()
    targets: tuple[Target, ...] = ()
    beside: tuple[str, tuple[int, ...], Shape] | None = None
    device: str = "cuda"

    @property
    def problem(self) -> Problem:
        """As a plan sees it."""
        shape, num_seqs = self.shape, len(self.seq_lens)
        return Problem(
            num_seqs,
            num_seqs,
            1,
            max(self.seq_lens),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_size,
            shape.head_size,
            shape.block_size,
            torch.bfloat16,
            shape.kv_dtype,
            shape.scales or "none",
        )

    @property
    def about(self) -> str:
        """The problem in one line."""
        return f"decode: {_lengths(self.seq_lens)}, {self.shape}"

    def verify(self) -> list[Check]:
        """Shortened and poisoned, against float64."""
        return check_against_float64(
            self.shape, [min(n, SHORT) for n in self.seq_lens[:8]], decode=True
        )

    def call(self) -> Callable[[], object]:
        """Ours, on its inputs: for a profiler."""
        return Inputs(self.seq_lens, self.shape, decode=True).attend

    def measure(self, repeats: int | None) -> Measurement:
        """Time ours and the peers by graph replay with a cold cache, overwritten and clean."""
        inputs = Inputs(self.seq_lens, self.shape, decode=True)
        calls = {"pagewise": inputs.attend, **_decode_peers(inputs), **find_libraries(inputs)}
        times = {name: time_gpu(call) for name, call in calls.items()}
        times |= {name + CLEAN: time_gpu_clean(call) for name, call in calls.items()}
        metrics = self._rates(times) | self._rates(times, CLEAN)
        times["host, pagewise"] = time_host(inputs.attend, _HOST_ROUNDS)
        metrics["host, microseconds"] = times["host, pagewise"].best * 1e6
        del inputs
        if self.beside:
            name, lengths, shape = self.beside
            other = Inputs(lengths, shape, decode=True)
            times[f"pagewise, {name}"] = time_gpu(other.attend)
            rate = sum(lengths) * shape.bytes_per_key / times[f"pagewise, {name}"].median / 1e9
            metrics[f"GB/s / {name}"] = metrics["GB/s"] / rate
        return Measurement(times, metrics)

    def _rates(self, times: dict[str, Times], ending: str = "") -> dict[str, float]:
        """Ours, and its share of the ceiling, and how it compares: all with one kind of cache."""
        ours, ceiling = times["pagewise" + ending].median, read_bandwidth(ending == CLEAN)
        rate = sum(self.seq_lens) * self.shape.bytes_per_key / ours
        metrics = {
            f"GB/s{ending}": rate / 1e9,
            f"GB/s of reading{ending}": ceiling / 1e9,
            f"share of read bandwidth{ending}": rate / ceiling,
        }
        alike = {name for name in times if name.endswith(CLEAN) == (ending == CLEAN)}
        peers = alike - {"pagewise" + ending}
        return metrics | {f"x {name}": times[name].median / ours for name in sorted(peers)}


@dataclass(frozen=True)
class GpuPrefillCase:
    """Whole prompts, with ``TFLOP/s`` of both products; a causal square counts half.

    Ours over blocks in random order and, as ``in order``, over blocks of 128 side by side; SDPA
    over dense keys and values.
    """

    name: str
    seq_lens: tuple[int, ...]
    shape: Shape = Shape()
    causal: bool = True
    targets: tuple[Target, ...] = ()
    device: str = "cuda"

    @property
    def about(self) -> str:
        """The problem in one line."""
        kind = "causal" if self.causal else "full"
        return f"prefill: {_lengths(self.seq_lens)}, {kind}, {self.shape}"

    @property
    def work(self) -> int:
        """Operations of both products."""
        pairs = sum(n * n // 2 if self.causal else n * n for n in self.seq_lens)
        return 4 * pairs * self.shape.num_heads * self.shape.head_size

    def verify(self) -> list[Check]:
        """Shortened and poisoned, against float64."""
        lengths = [min(n, SHORT) for n in self.seq_lens[:3]]
        return check_against_float64(self.shape, lengths, decode=False, causal=self.causal)

    def call(self) -> Callable[[], object]:
        """Ours, on its inputs: for a profiler."""
        return Inputs(self.seq_lens, self.shape, decode=False, causal=self.causal).attend

    def measure(self, repeats: int | None) -> Measurement:
        """Time ours, SDPA's backends and FlexAttention in turns, by graph replay, cache cold."""
        inputs = Inputs(self.seq_lens, self.shape, decode=False, causal=self.causal)
        ours: Peers = {"pagewise": inputs.attend, "pagewise, in order": inputs.in_order().attend}
        times = time_gpu_in_turns(ours | _prefill_peers(inputs) | find_libraries(inputs))
        peers = {name: time for name, time in times.items() if name not in ours}
        metrics = {
            "TFLOP/s": self.work / times["pagewise"].median / 1e12,
            "TFLOP/s in order": self.work / times["pagewise, in order"].median / 1e12,
        }
        for name, time in peers.items():
            metrics[f"TFLOP/s, {name}"] = self.work / time.median / 1e12
        best = min(time.median for time in peers.values())
        metrics["x best peer"] = best / times["pagewise"].median
        return Measurement(times, metrics)


@dataclass(frozen=True)
class GpuBlockSizesCase:
    """Whole prompts over blocks of several sizes, each in random order, in turns.

    Metrics: ``TFLOP/s, blocks of N``, and ``slowest / fastest`` of them.
    """

    name: str
    seq_lens: tuple[int, ...]
    shape: Shape = Shape()
    sizes: tuple[int, ...] = (1, 8, 16, 64, 128)
    targets: tuple[Target, ...] = ()
    device: str = "cuda"

    @property
    def about(self) -> str:
        """The problem in one line."""
        sizes = ", ".join(map(str, self.sizes))
        about = self._at(self.sizes[0]).about
        return about.replace(f"blocks of {self.sizes[0]},", f"blocks of {sizes},")

    def verify(self) -> list[Check]:
        """Each size, shortened and poisoned, against float64."""
        return [
            check._replace(what=f"blocks of {size}: {check.what}")
            for size in self.sizes
            for check in self._at(size).verify()
        ]

    def measure(self, repeats: int | None) -> Measurement:
        """Time all sizes in turns, by graph replay, cache cold."""
        calls = {f"blocks of {size}": self._at(size).call() for size in self.sizes}
        times = time_gpu_in_turns(calls)
        work = self._at(self.sizes[0]).work
        metrics = {f"TFLOP/s, {name}": work / time.median / 1e12 for name, time in times.items()}
        medians = [time.median for time in times.values()]
        metrics["slowest / fastest"] = min(medians) / max(medians)
        return Measurement(times, metrics)

    def _at(self, size: int) -> GpuPrefillCase:
        return GpuPrefillCase(self.name, self.seq_lens, replace(self.shape, block_size=size))


@functools.cache
def read_bandwidth(is_clean: bool = False) -> float:
    """Bytes a second of summing some memory: the ceiling of what streams its input."""
    numbers = torch.ones(READ_GIB << 28, device="cuda")
    timer = time_gpu_clean if is_clean else time_gpu
    return (READ_GIB << 30) / timer(numbers.sum).median


def _lengths(seq_lens: Sequence[int]) -> str:
    if len(set(seq_lens)) == 1:
        return f"{len(seq_lens)} x {seq_lens[0]}"
    return f"{len(seq_lens)} sequences of {min(seq_lens)} to {max(seq_lens)}"


class Inputs:
    """A call on random numbers, and the same numbers dense for the peers."""

    def __init__(
        self,
        seq_lens: Sequence[int],
        shape: Shape,
        *,
        decode: bool,
        causal: bool = True,
        device: str = "cuda",
    ) -> None:
        self.shape, self.causal, self.seq_lens = shape, causal, tuple(seq_lens)
        generator = torch.Generator(device).manual_seed(0)
        counts = [-(-n // shape.block_size) for n in seq_lens]
        kept = (sum(counts) + 1, shape.block_size, shape.num_kv_heads, shape.head_size)
        self.scales: dict[str, Any] = _make_scales(shape, kept, device)
        self.k_cache, self.v_cache = (_draw(kept, shape, generator) for _ in range(2))
        order = torch.randperm(sum(counts), generator=generator, device=device).int()
        tables = torch.full((len(counts), max(counts)), TABLE_POISON, device=device).int()
        for row, blocks in zip(tables, torch.split(order, counts), strict=True):
            row[: len(blocks)] = blocks
        lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
        tokens = [1] * len(counts) if decode else list(seq_lens)
        starts = torch.tensor([0, *tokens], device=device).cumsum(0).int()
        self.batch = PagedBatch(tables, lengths, starts, max(tokens), max(seq_lens))
        size = (sum(tokens), shape.num_heads, shape.head_size)
        self.q = torch.randn(size, generator=generator, device=device).bfloat16()

    def attend(self, **options: Any) -> AttentionOutput:
        """The call."""
        return paged_attention(
            self.q, self.k_cache, self.v_cache, self.batch, causal=self.causal,
            **self.scales, **options,
        )  # fmt: skip

    def in_order(self) -> Inputs:
        """The same work on large blocks side by side: keys of a sequence in a row, as if dense."""
        block_size = math.gcd(*self.seq_lens, 128)
        large = replace(self.shape, block_size=block_size)
        other = Inputs(self.seq_lens, large, decode=False, causal=self.causal)
        first = torch.tensor([0, *self.seq_lens[:-1]]).cumsum(0).int().cuda() // block_size
        width = other.batch.block_tables.shape[1]
        tables = first[:, None] + torch.arange(width, device="cuda").int()
        other.batch = replace(other.batch, block_tables=tables)
        return other

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """``[num_seqs, heads, length, head_size]`` of sequences of one length."""
        num_seqs, length = len(self.seq_lens), self.seq_lens[0]
        tables = self.batch.block_tables.long()
        k, v = (
            cache[tables].flatten(1, 2)[:, :length].transpose(1, 2).contiguous()
            for cache in (self.k_cache, self.v_cache)
        )
        q = self.q.view(num_seqs, -1, *self.q.shape[1:]).transpose(1, 2).contiguous()
        return q, k, v


def _make_scales(shape: Shape, kept: tuple[int, ...], device: str) -> dict[str, Tensor]:
    if shape.scales is None:
        return {}
    size = kept[:3] if shape.scales == "token" else kept[2:3]
    return {name: torch.rand(size, device=device) / 50 + 0.01 for name in ("k_scale", "v_scale")}


def _draw(kept: tuple[int, ...], shape: Shape, generator: torch.Generator) -> Tensor:
    numbers = torch.randn(kept, generator=generator, device=generator.device).to(torch.bfloat16)
    if shape.kv_dtype not in LARGEST_CODE:
        return numbers.to(shape.kv_dtype)
    return (numbers * 30).clamp(-127, 127).round().to(shape.kv_dtype)


def check_against_float64(
    shape: Shape,
    lengths: Sequence[int],
    *,
    decode: bool,
    causal: bool = True,
    impl: str = "auto",
    cut: Callable[[Problem], Plan] | None = None,
) -> list[Check]:
    """A poisoned problem of some lengths: by whom, and with what plan, if not by choice."""
    case = PagedCase(
        query_lens=tuple(1 if decode else n for n in lengths),
        seq_lens=tuple(lengths),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        block_size=shape.block_size,
        dtype=torch.bfloat16,
        kv_dtype=shape.kv_dtype,
        scales=shape.scales,
        causal=causal,
    )
    inputs = make_inputs(case)
    expected = oracle(inputs)
    there = inputs.to("cuda")
    plan = cut and cut(inputs.problem)
    result = there.attend(out=there.out, impl=impl, plan=plan)  # of NaN: nothing stays unwritten
    result = AttentionOutput(result.out.cpu(), result.lse.cpu())
    comparison = compare(result, inputs, expected, tolerance(inputs, expected))
    return [Check(f"pagewise, {case}", comparison.ratio <= 1, str(comparison))]


Peers = dict[str, Callable[[], Any]]


def _decode_peers(inputs: Inputs) -> Peers:
    """Who reads the pages alone; SDPA over contiguous keys and values, a group's heads as rows.

    SDPA also with a gather.
    """
    from .reading import make_reader  # Triton's

    if len(set(inputs.seq_lens)) > 1:
        return {}
    reader: Peers = {"reading alone": make_reader(inputs.k_cache, inputs.v_cache, inputs.batch)}
    return reader | ({} if inputs.shape.scales else _sdpa_peers(inputs))


def _sdpa_peers(inputs: Inputs) -> Peers:
    q, k, v = inputs.dense()
    q = q.view(*k.shape[:2], -1, q.shape[-1])
    peers = {f"sdpa {name}": _call(backend, q, k, v) for name, backend in _BACKENDS.items()}

    def gather() -> Tensor:
        _, keys, values = inputs.dense()
        return sdpa(q, keys, values)

    peers["gather + sdpa"] = gather
    return {name: peer for name, peer in peers.items() if _runs(peer)}


def _prefill_peers(inputs: Inputs) -> Peers:
    q, k, v = inputs.dense()
    peers = {
        f"sdpa {name}": _call(
            backend, q, k, v, is_causal=inputs.causal, enable_gqa=q.shape[1] > k.shape[1]
        )
        for name, backend in _BACKENDS.items()
    }
    flex = _flex(q, k, v, inputs.causal)
    return {name: peer for name, peer in (*peers.items(), ("flex", flex)) if _runs(peer)}


def _call(backend: SDPBackend, *qkv: Any, **options: Any) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(*qkv, **options)

    return call


def _flex(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Callable[[], Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)
    length = q.shape[2]
    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, "cuda")
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=q.shape[1] > k.shape[1])


def _runs(call: Callable[[], Any]) -> bool:
    """Whether a peer takes the problem: backends refuse some."""
    try:
        call()
    except RuntimeError:
        return False
    return True

"""Cases of paged attention on a GPU: decode against the read bandwidth, prefill against SDPA.

Inputs are ``gpu_inputs``'s, peers ``gpu_peers``'s and those of ``libraries``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from pagetile.ops.paged_attention.problem import Problem

from .case import Check, Measurement, Target
from .gpu_inputs import LLAMA_8B, Inputs, Shape, check_against_float64
from .gpu_peers import Peers, decode_peers, prefill_peers
from .gpu_timing import time_gpu, time_gpu_clean, time_gpu_in_turns, time_host
from .libraries import find_libraries
from .timing import Times

__all__ = ["GpuBlockSizesCase", "GpuDecodeCase", "GpuPrefillCase"]

READ_GIB = 4
CLEAN = ", clean cache"
_HOST_ROUNDS = 25
SHORT = 1100  # keys of a sequence that is verified: the oracle takes float64 and much memory


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
    shape: Shape = LLAMA_8B
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
        """Return pagetile's call on its inputs, for a profiler."""
        return Inputs(self.seq_lens, self.shape, decode=True).attend

    def measure(self, repeats: int | None) -> Measurement:
        """Time pagetile and the peers by graph replay, after an overwritten and a clean cache."""
        inputs = Inputs(self.seq_lens, self.shape, decode=True)
        calls = {"pagetile": inputs.attend, **decode_peers(inputs), **find_libraries(inputs)}
        host = time_host(inputs.attend, _HOST_ROUNDS).seconds
        times = {name: time_gpu(call) for name, call in calls.items()}
        times |= {name + CLEAN: time_gpu_clean(call) for name, call in calls.items()}
        metrics = self._rates(times) | self._rates(times, CLEAN)
        # In two lots: what slows a host down for a moment seldom lasts from one to the other.
        times["host, pagetile"] = Times(host + time_host(inputs.attend, _HOST_ROUNDS).seconds)
        metrics["host, microseconds"] = times["host, pagetile"].best * 1e6
        del inputs
        if self.beside:
            name, lengths, shape = self.beside
            other = Inputs(lengths, shape, decode=True)
            times[f"pagetile, {name}"] = time_gpu(other.attend)
            rate = sum(lengths) * shape.bytes_per_key / times[f"pagetile, {name}"].median / 1e9
            metrics[f"GB/s / {name}"] = metrics["GB/s"] / rate
        return Measurement(times, metrics)

    def _rates(self, times: dict[str, Times], ending: str = "") -> dict[str, float]:
        """Return the metrics of one cache state: rate, share of ceiling, ratio to peers."""
        own, ceiling = times["pagetile" + ending].median, read_bandwidth(ending == CLEAN)
        rate = sum(self.seq_lens) * self.shape.bytes_per_key / own
        metrics = {
            f"GB/s{ending}": rate / 1e9,
            f"GB/s of reading{ending}": ceiling / 1e9,
            f"share of read bandwidth{ending}": rate / ceiling,
        }
        alike = {name for name in times if name.endswith(CLEAN) == (ending == CLEAN)}
        peers = alike - {"pagetile" + ending}
        return metrics | {f"x {name}": times[name].median / own for name in sorted(peers)}


@dataclass(frozen=True)
class GpuPrefillCase:
    """Whole prompts, with ``TFLOP/s`` of both products; a causal square counts half.

    pagetile over blocks in random order and, as ``in order``, over blocks of 128 side by side; SDPA
    over dense keys and values.
    """

    name: str
    seq_lens: tuple[int, ...]
    shape: Shape = LLAMA_8B
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
        """Return pagetile's call on its inputs, for a profiler."""
        return Inputs(self.seq_lens, self.shape, decode=False, causal=self.causal).attend

    def measure(self, repeats: int | None) -> Measurement:
        """Time pagetile, SDPA and FlexAttention in turns, by graph replay, cache cold."""
        inputs = Inputs(self.seq_lens, self.shape, decode=False, causal=self.causal)
        own: Peers = {"pagetile": inputs.attend, "pagetile, in order": inputs.in_order().attend}
        times = time_gpu_in_turns(own | prefill_peers(inputs) | find_libraries(inputs))
        peers = {name: time for name, time in times.items() if name not in own}
        metrics = {
            "TFLOP/s": self.work / times["pagetile"].median / 1e12,
            "TFLOP/s in order": self.work / times["pagetile, in order"].median / 1e12,
        }
        for name, time in peers.items():
            metrics[f"TFLOP/s, {name}"] = self.work / time.median / 1e12
        best = min(time.median for time in peers.values())
        metrics["x best peer"] = best / times["pagetile"].median
        return Measurement(times, metrics)


@dataclass(frozen=True)
class GpuBlockSizesCase:
    """Whole prompts over blocks of several sizes, each in random order, in turns.

    Metrics: ``TFLOP/s, blocks of N``, and ``slowest / fastest`` of them.
    """

    name: str
    seq_lens: tuple[int, ...]
    shape: Shape = LLAMA_8B
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

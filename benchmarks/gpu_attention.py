"""Cases of paged attention on a GPU: decode against the read bandwidth, prefill against SDPA.

Inputs are ``gpu_inputs``'s, peers ``gpu_peers``'s and those of ``libraries``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from pagetile.analysis.timing import Times, admit, ratio
from pagetile.ops.paged_attention.problem import Problem

from .case import Check, Measurement, Target
from .gate import judge_peers
from .gpu_inputs import LLAMA_8B, Inputs, Shape, check_against_float64
from .gpu_peers import Peers, decode_peers, find_absent, prefill_peers, reader
from .gpu_timing import time_host, time_in_turns
from .libraries import find_libraries
from .machine import read_all

READ = "reading 4 GiB"
READ_BYTES = 4 << 30
CLEAN = ", clean cache"
_HOST_ROUNDS = 25
SHORT = 1100  # keys of a sequence that is verified: the oracle takes float64 and much memory


@dataclass(frozen=True)
class GpuDecodeCase:
    """One new token for each of some sequences, as one captured call.

    Metrics: ``GB/s`` of keys and values; ``share of read bandwidth``, against summing 4 GiB in
    turns with the calls; ``x PEER``, among them ``reading alone``, a kernel that only reads the
    same pages; all of these once more for a ``clean cache``; ``host, microseconds`` of an eager
    call, in the least disturbed round; ``GB/s / OTHER``, against other lengths or blocks.
    """

    name: str
    seq_lens: tuple[int, ...]
    shape: Shape = LLAMA_8B
    targets: tuple[Target, ...] = ()
    versus: tuple[str, tuple[int, ...], Shape] | None = None
    has_compiled_peers: bool = True
    """Whether FlexAttention is compared, which compiles; it reads dense keys instead of pages."""
    device: str = "cuda"
    compile_effort: ClassVar[int] = 0
    """See ``case.compile_effort``: without a mask, FlexAttention compiles in seconds."""

    @property
    def problem(self) -> Problem:
        """The problem as a plan is given it."""
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
        """A poisoned, shortened problem, and rows of the timed result at full size."""
        short = [min(n, SHORT) for n in self.seq_lens[:8]]
        poisoned = check_against_float64(self.shape, short, decode=True, device=self.device)
        checks = poisoned + self._inputs().check(self.about)
        if other := self._other_inputs():
            assert self.versus is not None
            _, lengths, shape = self.versus
            checks += other.check(f"decode: {_lengths(lengths)}, {shape}")
        return checks

    def call(self) -> Callable[[], object]:
        """Return pagetile's call on its inputs, for a profiler."""
        return self._inputs().attend

    def _inputs(self) -> Inputs:
        return Inputs(self.seq_lens, self.shape, decode=True, device=self.device)

    def _other_inputs(self) -> Inputs | None:
        """The other problem to time, if there is one."""
        if self.versus is None:
            return None
        _, lengths, shape = self.versus
        return Inputs(lengths, shape, decode=True, device=self.device)

    def measure(self, repeats: int | None) -> Measurement:
        """Time all in turns by graph replay, with an overwritten and with a clean cache."""
        inputs = self._inputs()
        others, unknown = find_libraries(inputs)
        judge = judge_peers(inputs.rows(), inputs.in_tokens)
        dense = decode_peers(inputs, has_flex=self.has_compiled_peers)
        peers, absent = admit(dense | others, judge)
        unknown |= find_absent(inputs, has_flex=self.has_compiled_peers)
        calls: Peers = {"pagetile": inputs.attend, **reader(inputs), **peers}
        calls[READ] = _read(self.device)
        if self.versus and (other := self._other_inputs()):
            calls[f"pagetile, {self.versus[0]}"] = other.attend
        host = time_host(inputs.attend, _HOST_ROUNDS).seconds
        times = time_in_turns(calls, self.device, repeats=repeats)
        metrics = self._metrics(times)
        if self.device == "cuda":
            clean = time_in_turns(calls, self.device, repeats=repeats, clean=True)
            metrics |= {name + CLEAN: value for name, value in self._metrics(clean).items()}
            times |= {name + CLEAN: time for name, time in clean.items()}
        # Two series: what slows a host down for a moment seldom lasts from one to the other.
        times["host, pagetile"] = Times(host + time_host(inputs.attend, _HOST_ROUNDS).seconds)
        metrics["host, microseconds"] = times["host, pagetile"].best * 1e6
        return Measurement(times, metrics, unknown | absent)

    def _metrics(self, times: dict[str, Times]) -> dict[str, float]:
        """The metrics for one cache state: rate, share of reading, ratio to peers."""
        own = times["pagetile"]
        num_bytes = sum(self.seq_lens) * self.shape.bytes_per_key
        metrics = {
            "GB/s": num_bytes / own.median / 1e9,
            "GB/s of reading": READ_BYTES / times[READ].median / 1e9,
            "share of read bandwidth": num_bytes / READ_BYTES * ratio(times[READ], own),
        }
        if self.versus:
            name, lengths, shape = self.versus
            rate = sum(lengths) * shape.bytes_per_key / times[f"pagetile, {name}"].median / 1e9
            metrics[f"GB/s / {name}"] = metrics["GB/s"] / rate
        peers = sorted(name for name in times if not name.startswith("pagetile") and name != READ)
        return metrics | {f"x {name}": ratio(times[name], own) for name in peers}


@dataclass(frozen=True)
class GpuPrefillCase:
    """Whole prompts, with ``TFLOP/s`` of both products; a causal square counts half.

    pagetile reads blocks in random order and, as ``in order``, adjacent blocks of 128; SDPA reads
    dense keys and values.
    """

    name: str
    seq_lens: tuple[int, ...]
    shape: Shape = LLAMA_8B
    causal: bool = True
    targets: tuple[Target, ...] = ()
    device: str = "cuda"
    has_compiled_peers: bool = True
    """Whether FlexAttention is compared, which compiles."""

    @property
    def compile_effort(self) -> int:
        """See ``case.compile_effort``: with caps or wide heads, FlexAttention takes longest."""
        is_long = self.shape.logits_soft_cap is not None or self.shape.head_size > 128
        return (2 if is_long else 1) if self.has_compiled_peers else 0

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
        """A poisoned, shortened problem, and rows of the timed results at full size."""
        lengths = [min(n, SHORT) for n in self.seq_lens[:3]]
        poisoned = check_against_float64(
            self.shape, lengths, decode=False, causal=self.causal, device=self.device
        )
        inputs = self._inputs()
        in_order = inputs.in_order().check(f"{self.about}, in order")
        return poisoned + inputs.check(self.about) + in_order

    def call(self) -> Callable[[], object]:
        """Return pagetile's call on its inputs, for a profiler."""
        return self._inputs().attend

    def _inputs(self) -> Inputs:
        return Inputs(
            self.seq_lens, self.shape, decode=False, causal=self.causal, device=self.device
        )

    def measure(self, repeats: int | None) -> Measurement:
        """Time pagetile, SDPA and FlexAttention in turns, by graph replay, cache cold."""
        inputs = self._inputs()
        own: Peers = {"pagetile": inputs.attend, "pagetile, in order": inputs.in_order().attend}
        others, unknown = find_libraries(inputs)
        judge = judge_peers(inputs.rows(), inputs.in_tokens)
        dense = prefill_peers(inputs, has_flex=self.has_compiled_peers)
        found, absent = admit(dense | others, judge)
        unknown |= find_absent(inputs, has_flex=self.has_compiled_peers)
        times = time_in_turns(own | found, self.device, repeats=repeats)
        peers = {name: time for name, time in times.items() if name not in own}
        metrics = {
            "TFLOP/s": self.work / times["pagetile"].median / 1e12,
            "TFLOP/s in order": self.work / times["pagetile, in order"].median / 1e12,
        }
        for name, time in peers.items():
            metrics[f"TFLOP/s, {name}"] = self.work / time.median / 1e12
        if peers:
            best = min(peers.values(), key=lambda time: time.median)
            metrics["x best peer"] = ratio(best, times["pagetile"])
        return Measurement(times, metrics, unknown | absent)


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
        times = time_in_turns(calls, self.device, repeats=repeats)
        work = self._at(self.sizes[0]).work
        metrics = {f"TFLOP/s, {name}": work / time.median / 1e12 for name, time in times.items()}
        medians = [time.median for time in times.values()]
        metrics["slowest / fastest"] = min(medians) / max(medians)
        return Measurement(times, metrics)

    def _at(self, size: int) -> GpuPrefillCase:
        shape = replace(self.shape, block_size=size)
        return GpuPrefillCase(self.name, self.seq_lens, shape, device=self.device)


def _read(device: str) -> Callable[[], object]:
    """Sum ``READ_BYTES`` of memory, for comparison with kernels that are bound by reading."""
    return lambda: read_all(device, READ_BYTES)


def _lengths(seq_lens: Sequence[int]) -> str:
    if len(set(seq_lens)) == 1:
        return f"{len(seq_lens)} x {seq_lens[0]}"
    return f"{len(seq_lens)} sequences of {min(seq_lens)} to {max(seq_lens)}"

"""Cases of one attention call: decode against the read bandwidth, prefill against SDPA."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagetile.testing import PagedCase, compare, oracle, tolerance
from pagetile.tiles.state import AttentionOutput

from .case import Check, Measurement, Target
from .machine import READ_BYTES, read_all
from .peers import SDPA, make_peers, to_tokens
from .timing import Contestant, Times, ratio, take_turns
from .workload import describe, make_workload, shorten

__all__ = ["AttentionCase"]

READ = "read 1 GiB"
BUSY = "pagetile, right after a torch op"

# The oracle expands K/V to all heads in float64. More keys add time and memory but no new code:
# these are three splits, the last one cut, in whole blocks and a part.
LONGEST_VERIFIED = 1100


@dataclass(frozen=True)
class AttentionCase:
    """``paged_attention`` on one problem, beside its peers, and perhaps beside itself on another.

    Metrics: ``x PEER``, how many times as fast as a peer; ``x sdpa``, as the faster way to call
    SDPA; ``share of read bandwidth``, of the keys and values in our median against the fastest
    reading, and ``by round`` against the reading of the same round, which is kinder where the
    bandwidth itself comes and goes; ``time / OTHER``, on another problem.
    """

    name: str
    problem: PagedCase
    targets: tuple[Target, ...] = ()
    beside: tuple[str, PagedCase] | None = None
    """Another problem to compare with, and its name."""
    device: str = "cpu"

    @property
    def about(self) -> str:
        """The problem in one line."""
        return describe(self.problem)

    def verify(self) -> list[Check]:
        """Compare pagetile and every peer with float64, within the tolerance of the tests."""
        others = [self.beside[1]] if self.beside else []
        return [check for problem in (self.problem, *others) for check in _verify(problem)]

    @torch.inference_mode()
    def measure(self, repeats: int | None) -> Measurement:
        """Time pagetile, the peers, and reading memory, in turns."""
        inputs = make_workload(self.problem)
        contestants = {
            "pagetile": Contestant(inputs.attend),
            BUSY: Contestant(inputs.attend, before=_torch_op),
        }
        for name, peer in make_peers(inputs).items():
            contestants[name] = Contestant(peer)
        if self.beside:
            other = make_workload(self.beside[1])
            contestants[f"pagetile, {self.beside[0]}"] = Contestant(other.attend)
        if _is_decode(self.problem):
            contestants[READ] = Contestant(read_all)
        times = take_turns(contestants, repeats=repeats or 15)
        return Measurement(times, self._metrics(times))

    def _metrics(self, times: dict[str, Times]) -> dict[str, float]:
        own = times["pagetile"]
        fastest = min((times[name] for name in SDPA if name in times), key=lambda t: t.median)
        metrics = {"x sdpa": ratio(fastest, own)}
        for name in ("sdpa, group packed", "gather + sdpa"):
            if name in times:
                metrics[f"x {name}"] = ratio(times[name], own)
        if self.beside:
            metrics[f"time / {self.beside[0]}"] = ratio(own, times[f"pagetile, {self.beside[0]}"])
        if READ in times:
            metrics["GB/s"] = _kv_bytes(self.problem) / own.median / 1e9
            metrics["GB/s of reading"] = READ_BYTES / times[READ].best / 1e9
            metrics["share of read bandwidth"] = metrics["GB/s"] / metrics["GB/s of reading"]
            per_byte = _kv_bytes(self.problem) / READ_BYTES
            metrics["share of it, by round"] = per_byte * ratio(times[READ], own)
        else:
            metrics["GFLOP/s"] = _causal_flops(self.problem) / own.median / 1e9
        return metrics


@torch.inference_mode()
def _verify(problem: PagedCase) -> list[Check]:
    inputs = make_workload(shorten(problem, LONGEST_VERIFIED))
    expected = oracle(inputs)
    allowed = tolerance(inputs, expected)
    results = {"pagetile": inputs.attend(out=inputs.out)}  # of NaN: nothing may stay unwritten
    for name, peer in make_peers(inputs).items():
        results[name] = AttentionOutput(to_tokens(peer()), expected.lse)
    checks = []
    for name, result in results.items():
        comparison = compare(result, inputs, expected, allowed)
        what = f"{name}, {describe(inputs.case)}"
        checks.append(Check(what, comparison.ratio <= 1, str(comparison)))
    return checks


def _is_decode(problem: PagedCase) -> bool:
    return max(problem.query_lens) == 1


def _kv_bytes(problem: PagedCase) -> int:
    slot = problem.num_kv_heads * (problem.head_size + problem.value_size)
    return sum(problem.seq_lens) * slot * problem.cache_dtype.itemsize


def _causal_flops(problem: PagedCase) -> int:
    """Of both products over whole prompts; a causal square counts half."""
    pairs = sum(n * n // 2 for n in problem.seq_lens)
    return 2 * pairs * problem.num_heads * (problem.head_size + problem.value_size)


def _torch_op() -> None:
    """What a layer does before its attention: it leaves torch's threads spinning."""
    torch.ones(1 << 20).sum()

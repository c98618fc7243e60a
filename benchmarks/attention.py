"""Cases of one attention call: decode against the read bandwidth, prefill against SDPA."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagetile import explain_paged_attention
from pagetile.analysis.timing import Times, admit, ratio, take_turns
from pagetile.testing import PagedCase, PagedInputs, compare, oracle, tolerance

from .case import Check, Measurement, Target
from .gate import Rows, check_timed_call, chosen, expected_rows, judge_peers
from .machine import READ_BYTES, read_all
from .peers import SDPA, make_peers, to_tokens
from .workload import describe, make_workload, shorten

READ = "read 1 GiB"
AFTER_TORCH_OP = "pagetile, right after a torch op"

# The oracle expands K/V to all heads in float64. More keys add time and memory but no new code:
# these are three splits, the last one cut, in whole blocks and a part.
LONGEST_VERIFIED = 1100


@dataclass(frozen=True)
class AttentionCase:
    """``paged_attention`` on one problem, compared with its peers, and perhaps another problem.

    Metrics: ``x PEER``, how many times as fast as a peer; ``x sdpa``, as the fastest way to call
    SDPA, one of which packs a group's heads as rows; ``share of read bandwidth``, of reading keys
    and values against reading memory, in turns; ``time / OTHER``, on another problem.
    """

    name: str
    problem: PagedCase
    targets: tuple[Target, ...] = ()
    versus: tuple[str, PagedCase] | None = None
    """A name and another problem to compare with."""
    device: str = "cpu"

    @property
    def about(self) -> str:
        """The problem in one line."""
        return describe(self.problem)

    def verify(self) -> list[Check]:
        """Compare a poisoned, shortened problem, and rows of the timed one at its full size."""
        others = [self.versus[1]] if self.versus else []
        return [check for problem in (self.problem, *others) for check in _verify(problem)]

    @torch.inference_mode()
    def measure(self, repeats: int | None) -> Measurement:
        """Time pagetile, the peers, and reading memory, in turns."""
        inputs = make_workload(self.problem)
        peers, absent = admit(make_peers(inputs), judge_peers(_rows_of(inputs), to_tokens))
        calls = {"pagetile": inputs.attend, AFTER_TORCH_OP: inputs.attend, **peers}
        if self.versus:
            calls[f"pagetile, {self.versus[0]}"] = make_workload(self.versus[1]).attend
        if _is_decode(self.problem):
            calls[READ] = read_all
        times = take_turns(calls, repeats=repeats or 15, before={AFTER_TORCH_OP: _torch_op})
        return Measurement(times, self._metrics(times), absent)

    def _metrics(self, times: dict[str, Times]) -> dict[str, float]:
        own = times["pagetile"]
        fused = [times[name] for name in SDPA if name in times]
        metrics = {"x sdpa": ratio(min(fused, key=lambda t: t.median), own)} if fused else {}
        if "gather + sdpa" in times:
            metrics["x gather + sdpa"] = ratio(times["gather + sdpa"], own)
        if self.versus:
            metrics[f"time / {self.versus[0]}"] = ratio(own, times[f"pagetile, {self.versus[0]}"])
        if READ in times:
            metrics["GB/s"] = _kv_bytes(self.problem) / own.median / 1e9
            metrics["GB/s of reading"] = READ_BYTES / times[READ].median / 1e9
            per_byte = _kv_bytes(self.problem) / READ_BYTES
            metrics["share of read bandwidth"] = per_byte * ratio(times[READ], own)
        else:
            metrics["GFLOP/s"] = _causal_flops(self.problem) / own.median / 1e9
        return metrics


@torch.inference_mode()
def _verify(problem: PagedCase) -> list[Check]:
    short = make_workload(shorten(problem, LONGEST_VERIFIED))
    expected = oracle(short)
    result = short.attend(out=short.out)  # filled with NaN: every element must be written
    comparison = compare(result, short, expected, tolerance(short, expected))
    poisoned = Check(f"poisoned: {describe(short.case)}", comparison.ratio <= 1, str(comparison))
    inputs = make_workload(problem)
    explanation = explain_paged_attention(
        inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch, **inputs.options
    )
    rows = _rows_of(inputs)
    return [
        poisoned,
        *check_timed_call(inputs.attend, chosen(explanation), rows, describe(problem)),
    ]


def _rows_of(inputs: PagedInputs) -> Rows:
    names = ("causal", "k_scale", "v_scale", "logits_soft_cap")
    options = {name: inputs.options[name] for name in names if name in inputs.options}
    return expected_rows(inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch, **options)


def _is_decode(problem: PagedCase) -> bool:
    return max(problem.query_lens) == 1


def _kv_bytes(problem: PagedCase) -> int:
    slot = problem.num_kv_heads * (problem.head_size + problem.value_size)
    return sum(problem.seq_lens) * slot * problem.cache_dtype.itemsize


def _causal_flops(problem: PagedCase) -> int:
    """Operations of both products over whole prompts; a causal square counts half."""
    pairs = sum(n * n // 2 for n in problem.seq_lens)
    return 2 * pairs * problem.num_heads * (problem.head_size + problem.value_size)


def _torch_op() -> None:
    """What a layer runs before attention: it leaves torch's threads spinning."""
    torch.ones(1 << 20).sum()

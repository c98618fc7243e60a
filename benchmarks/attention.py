"""Cases of one attention call: decode against the read bandwidth, prefill against SDPA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from pagewise import paged_attention
from torch import Tensor

from .case import Check, Measurement, Target
from .machine import READ_BYTES, read_all
from .oracle import verify
from .peers import SDPA, peers
from .timing import Contestant, Times, take_turns
from .workload import Inputs, Workload

__all__ = ["AttentionCase"]

READ = "read 1 GiB"
BUSY = "pagewise, right after a torch op"


@dataclass(frozen=True)
class AttentionCase:
    """``paged_attention`` on one workload, beside its peers, and perhaps beside itself on another.

    Metrics: ``x PEER``, how many times as fast as a peer; ``x sdpa``, as the faster way to call
    SDPA; ``share of read bandwidth``, of the keys and values; ``time / OTHER``, on another
    workload.
    """

    name: str
    workload: Workload
    targets: tuple[Target, ...] = ()
    beside: tuple[str, Workload] | None = None
    """Another workload that ours is compared with, and what to call it."""

    @property
    def about(self) -> str:
        """The problem in one line."""
        kind = "prefill" if self.workload.prefill else "decode"
        return f"{kind}: {self.workload}"

    def verify(self) -> list[Check]:
        """Ours and the peers against float64."""
        others = [self.beside[1]] if self.beside else []
        return [check for workload in (self.workload, *others) for check in verify(workload)]

    def measure(self, repeats: int | None) -> Measurement:
        """Time ours, the peers, and reading memory, in turns."""
        inputs = Inputs.of(self.workload)
        ours = _ours(inputs)
        contestants = {"pagewise": Contestant(ours), BUSY: Contestant(ours, before=_torch_op)}
        for name, call in peers(self.workload, inputs).items():
            contestants[name] = Contestant(call)
        if self.beside:
            contestants[f"pagewise, {self.beside[0]}"] = Contestant(_ours(Inputs.of(self.beside[1])))
        if not self.workload.prefill:
            contestants[READ] = Contestant(read_all)
        times = take_turns(contestants, repeats=repeats or 15)
        return Measurement(times, self._metrics(times))

    def _metrics(self, times: dict[str, Times]) -> dict[str, float]:
        ours = times["pagewise"].median
        metrics = {"x sdpa": min(times[name].median for name in SDPA if name in times) / ours}
        for name in ("sdpa, group packed", "gather + sdpa"):
            if name in times:
                metrics[f"x {name}"] = times[name].median / ours
        if self.beside:
            metrics[f"time / {self.beside[0]}"] = ours / times[f"pagewise, {self.beside[0]}"].median
        if self.workload.prefill:
            metrics["GFLOP/s"] = self.workload.flops / ours / 1e9
        else:
            metrics["GB/s"] = self.workload.kv_bytes / ours / 1e9
            metrics["GB/s of reading"] = READ_BYTES / times[READ].best / 1e9
            metrics["share of read bandwidth"] = metrics["GB/s"] / metrics["GB/s of reading"]
        return metrics


def _ours(inputs: Inputs) -> Callable[[], Tensor]:
    return lambda: paged_attention(inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch).out


def _torch_op() -> None:
    """What a layer does before its attention: it leaves torch's threads spinning."""
    torch.ones(1 << 20).sum()

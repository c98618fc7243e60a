"""Cases of linear layers of few tokens on a CPU, beside torch's products and reading memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from pagetile.analysis.timing import ratio, take_turns
from pagetile.fused.small_linear import is_faster_on_cpu, small_linear
from pagetile.fused.small_linear.problem import Problem

from .case import Check, Measurement, Target
from .gate import allowed_error
from .machine import READ_BYTES, read_all

_BYTES = 256 << 20
"""Of all weights of a call, which no cache holds."""


@dataclass(frozen=True)
class LinearCase:
    """``small_linear`` as a model's step calls it: one weight after another.

    Metrics: ``GB/s`` of weights; ``share of read bandwidth``, against reading in turns with the
    calls; ``x torch``, how many times as fast as ``torch.nn.functional.linear``.
    """

    name: str
    num_rows: int
    dtype: torch.dtype
    targets: tuple[Target, ...] = ()
    size: int = 4096
    num_columns: int = 4096
    device: str = "cpu"

    @property
    def about(self) -> str:
        """The problem in one line."""
        dtype = str(self.dtype).removeprefix("torch.")
        rows = f"{self.num_rows} row{'s' * (self.num_rows > 1)}"
        return f"linear: {rows}, weights {self.num_columns} x {self.size}, {dtype}"

    def verify(self) -> list[Check]:
        """Every weight's product against float64; models run this implementation here."""
        x, weights = self._draw()
        allowed = allowed_error(self.dtype)
        worst = 0.0
        for weight, out in zip(weights, self._own(x, weights), strict=True):
            exact = x.double() @ weight.double().T
            worst = max(worst, float((out - exact).norm() / exact.norm()))
        problem = Problem(self.num_rows, self.size, self.num_columns, self.dtype)
        return [
            Check(self.about, worst <= allowed, f"relative distance {worst:.2g} of {allowed:.2g}"),
            Check("models run it", is_faster_on_cpu(problem), "is_faster_on_cpu"),
        ]

    @torch.inference_mode()
    def measure(self, repeats: int | None) -> Measurement:
        """Time pagetile, torch, and reading memory, in turns."""
        x, weights = self._draw()
        calls: dict[str, Callable[[], object]] = {
            "pagetile": partial(self._own, x, weights),
            "torch": lambda: [linear(x, weight) for weight in weights],
            "read 1 GiB": read_all,
        }
        times = take_turns(calls, repeats=repeats or 15)
        own, num_bytes = times["pagetile"], sum(weight.nbytes for weight in weights)
        metrics = {
            "GB/s": num_bytes / own.median / 1e9,
            "share of read bandwidth": num_bytes / READ_BYTES * ratio(times["read 1 GiB"], own),
            "x torch": ratio(times["torch"], own),
        }
        return Measurement(times, metrics)

    def _draw(self) -> tuple[Tensor, list[Tensor]]:
        """Rows and weights at random."""
        generator = torch.Generator().manual_seed(0)
        count = -(-_BYTES // (self.num_columns * self.size * self.dtype.itemsize))
        x = torch.randn(self.num_rows, self.size, generator=generator).to(self.dtype)
        weights = [
            torch.randn(self.num_columns, self.size, generator=generator).to(self.dtype)
            for _ in range(count)
        ]
        return x, weights

    @torch.inference_mode()
    def _own(self, x: Tensor, weights: list[Tensor]) -> list[Tensor]:
        return [small_linear(x, weight, impl="cpu") for weight in weights]

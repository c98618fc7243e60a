"""Cases of tiled attention over dense keys, forward and backward, and of its scores alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pagetile import attention, attention_scores

from .case import Check, Measurement, Target
from .gpu_peers import compile_flex
from .gpu_timing import time_gpu, time_gpu_in_turns
from .timing import Contestant, Times, take_turns

__all__ = ["ScoresCase", "TiledCase"]

VERIFIED = 700  # tokens: float64 scores of all heads are stored
BACKWARD = ", backward"
_BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
}

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From ``[batch, length, heads, head_size]`` to the same of values."""


@dataclass(frozen=True)
class TiledCase:
    """``attention`` and its gradients, beside SDPA's backends and FlexAttention.

    Metrics: ``TFLOP/s`` of two products forward and of five backward, a causal square counting
    half; ``x best peer``, how many times as fast as the fastest of them; both once more for the
    backward pass alone.
    """

    name: str
    batch: int
    length: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    causal: bool = True
    dtype: torch.dtype = torch.bfloat16
    targets: tuple[Target, ...] = ()
    device: str = "cuda"

    @property
    def about(self) -> str:
        """The problem in one line."""
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_size}"
        kind = "causal" if self.causal else "full"
        types = str(self.dtype).removeprefix("torch.")
        return f"attention: {self.batch} x {self.length}, {heads}, {kind}, {types}"

    def verify(self) -> list[Check]:
        """Check a shortened problem, allowing twice SDPA's error in this type."""
        short = replace(self, batch=1, length=min(self.length, VERIFIED))
        leaves, d_out = short._draw()
        exact = short._run(short._by_products, [t.double() for t in leaves], d_out.double())
        eager = short._run(short._by_products, leaves, d_out)
        own = short._run(short._own, leaves, d_out)
        names = ("out", "dq", "dk", "dv")
        terms = short.length * self.num_heads // self.num_kv_heads  # of the longest sums
        rounding = 2 * torch.finfo(self.dtype).eps + torch.finfo(torch.float32).eps * terms**0.5
        checks = []
        for name, got, other, wanted in zip(names, own, eager, exact, strict=True):
            error, allowed = (float((t.double() - wanted).abs().max()) for t in (got, other))
            allowed = 2 * allowed + rounding * float(wanted.abs().max())
            detail = f"error {error:.3g}, allowed {allowed:.3g}"
            checks.append(Check(f"pagetile, {name}, {short.about}", error <= allowed, detail))
        return checks

    def call(self) -> Callable[[], object]:
        """Return pagetile's forward and backward on its inputs, for a profiler."""
        return functools.partial(self._run, self._own, *self._draw())

    def measure(self, repeats: int | None) -> Measurement:
        """Time every contestant's forward and backward pass."""
        leaves, d_out = self._draw()
        contestants: dict[str, Attend] = {"pagetile": self._own, **self._peers()}
        if self.device == "cpu":
            calls = _passes(contestants, leaves, d_out)
            turns = {name: Contestant(call) for name, call in calls.items()}
            times = take_turns(turns, repeats=repeats or 9)
        else:
            torch.cuda.synchronize()
            stream: Any = torch.cuda.Stream  # the default one cannot be captured
            with torch.cuda.stream(stream()):
                times = time_gpu_in_turns(_passes(contestants, leaves, d_out))
        return Measurement(times, self._metrics(times))

    def _metrics(self, times: dict[str, Times]) -> dict[str, float]:
        pairs = self.length**2 // 2 if self.causal else self.length**2
        product = 2 * self.batch * self.num_heads * pairs * self.head_size
        metrics = {}
        for ending, products in (("", 2), (BACKWARD, 5)):
            alike = {n: t.median for n, t in times.items() if n.endswith(BACKWARD) == bool(ending)}
            own = alike.pop("pagetile" + ending)
            metrics[f"TFLOP/s{ending}"] = products * product / own / 1e12
            if alike:
                metrics[f"x best peer{ending}"] = min(alike.values()) / own
        return metrics

    def _draw(self) -> tuple[list[Tensor], Tensor]:
        generator = torch.Generator(self.device).manual_seed(0)
        q, k, v, d_out = (
            torch.randn(
                self.batch, self.length, heads, self.head_size,
                generator=generator, device=self.device,
            ).to(self.dtype)
            for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads, self.num_heads)
        )  # fmt: skip
        return [t.requires_grad_() for t in (q, k, v)], d_out

    def _run(self, attend: Attend, leaves: list[Tensor], d_out: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in leaves]
        out = attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]

    def _own(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=self.causal).out

    def _by_products(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._sdpa(SDPBackend.MATH, q, k, v)

    def _sdpa(self, backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        is_grouped = self.num_heads > self.num_kv_heads
        with sdpa_kernel(backend):
            out = sdpa(q, k, v, is_causal=self.causal, enable_gqa=is_grouped)
        return out.transpose(1, 2)

    def _peers(self) -> dict[str, Attend]:
        if self.device == "cpu":
            return {"sdpa": functools.partial(self._sdpa, SDPBackend.FLASH_ATTENTION)}
        peers: dict[str, Attend] = {
            name: functools.partial(self._sdpa, backend) for name, backend in _BACKENDS.items()
        }
        return {**peers, "flex": self._flex()}

    def _flex(self) -> Attend:
        compiled = compile_flex(self.length if self.causal else None, self.device)
        is_grouped = self.num_heads > self.num_kv_heads

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            tensors = (t.transpose(1, 2) for t in (q, k, v))
            out: Tensor = compiled(*tensors, enable_gqa=is_grouped)
            return out.transpose(1, 2)

        return attend


def _passes(
    contestants: dict[str, Attend], leaves: list[Tensor], d_out: Tensor
) -> dict[str, Callable[[], Any]]:
    """A forward and a backward pass of each: of those that run, and have a gradient."""
    calls: dict[str, Callable[[], Any]] = {}
    for name, attend in contestants.items():
        try:
            out = attend(*leaves)
            backward = functools.partial(torch.autograd.grad, out, leaves, d_out, retain_graph=True)
            backward()
        except (RuntimeError, NotImplementedError):
            continue
        calls[name] = functools.partial(torch.no_grad()(attend), *leaves)
        calls[name + BACKWARD] = backward
    return calls


@dataclass(frozen=True)
class ScoresCase:
    """``attention_scores`` beside torch's batched product, and beside filling the same memory."""

    name: str
    batch: int
    num_heads: int
    length: int
    head_size: int
    dtype: torch.dtype = torch.float16
    targets: tuple[Target, ...] = ()
    device: str = "cuda"

    @property
    def about(self) -> str:
        """The problem in one line."""
        types = str(self.dtype).removeprefix("torch.")
        heads = f"{self.num_heads} heads of {self.head_size}"
        return f"attention_scores: {self.batch} x {self.length}, {heads}, {types}"

    def verify(self) -> list[Check]:
        """Every score is its float64 value, rounded once, and float32's rounding of the sum."""
        q, k = (t[:8] for t in self._draw())
        wide = q.double(), k.double()
        wanted, terms = wide[0] @ wide[1].mT, wide[0].abs() @ wide[1].abs().mT
        allowed = torch.finfo(self.dtype).eps * wanted.abs() + 1e-6 * terms
        errors = (attention_scores(q, k).double() - wanted).abs()
        detail = f"at most {float((errors / allowed).max()):.2f} of what is allowed"
        return [Check(f"pagetile, {self.about}", bool((errors <= allowed).all()), detail)]

    def call(self) -> Callable[[], object]:
        """Return pagetile's call on its inputs, for a profiler."""
        return functools.partial(attention_scores, *self._draw())

    @torch.inference_mode()
    def measure(self, repeats: int | None) -> Measurement:
        """Time pagetile's call, torch's, and filling as much memory."""
        q, k = self._draw()
        shape = (*q.shape[:3], self.length)
        calls: dict[str, Callable[[], Any]] = {
            "pagetile": lambda: attention_scores(q, k),
            "torch matmul": lambda: torch.matmul(q, k.mT),
            "filling as much memory": lambda: torch.ones(
                math.prod(shape) * self.dtype.itemsize // 4, dtype=torch.int32, device=self.device
            ),
        }
        if self.device == "cpu":
            contestants = {name: Contestant(call) for name, call in calls.items()}
            times = take_turns(contestants, repeats=repeats or 9)
        else:
            times = {name: time_gpu(call) for name, call in calls.items()}
        own = times["pagetile"].median
        metrics = {
            "microseconds": own * 1e6,
            "GB/s": math.prod(shape) * self.dtype.itemsize / own / 1e9,
        }
        metrics |= {f"x {n}": t.median / own for n, t in times.items() if n != "pagetile"}
        return Measurement(times, metrics)

    def _draw(self) -> tuple[Tensor, Tensor]:
        """Heads beside each other in a row, as a linear layer leaves them."""
        generator = torch.Generator(self.device).manual_seed(0)
        shape = self.batch, self.length, self.num_heads, self.head_size
        q, k = (
            torch.randn(shape, generator=generator, device=self.device).to(self.dtype)
            for _ in range(2)
        )
        return q.transpose(1, 2), k.transpose(1, 2)

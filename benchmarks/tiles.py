"""Cases of tiled attention over dense keys, forward and backward, and of its scores alone."""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pagetile import attention, attention_scores, explain_attention
from pagetile.analysis.timing import Times, admit, ratio

from .case import COMPILED_ELSEWHERE, Check, Measurement, Target
from .gate import check_kernel, chosen
from .gpu_peers import compile_flex
from .gpu_timing import time_in_turns

_SCORES_AT_ONCE = 64  # batches whose scores are computed in float64 together
CHUNK = 2048  # rows of float64 scores at a time
PEER_ERROR = 2**-4  # of a peer, relative to the norm of the tensor
BACKWARD = ", backward"
NAMES = ("out", "dq", "dk", "dv")
_BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
}

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From q, k and v, ``[batch, length, heads, head_size]``, to the output."""


@dataclass(frozen=True)
class TiledCase:
    """``attention`` and its gradients, against SDPA's backends and FlexAttention.

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
    has_compiled_peers: bool = True
    """Whether FlexAttention is compared, which compiles; never on a CPU."""

    @property
    def compile_effort(self) -> int:
        """See ``case.compile_effort``."""
        return 2 * (self.device == "cuda" and self.has_compiled_peers)

    @property
    def about(self) -> str:
        """The problem in one line."""
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_size}"
        kind = "causal" if self.causal else "full"
        types = str(self.dtype).removeprefix("torch.")
        return f"attention: {self.batch} x {self.length}, {heads}, {kind}, {types}"

    def verify(self) -> list[Check]:
        """The timed call at its own size, with gradients, against float64 of one random KV head.

        The forward pass must equal the named implementation's, bit by bit.
        """
        leaves, d_out = self._draw()
        impl = chosen(explain_attention(*leaves, causal=self.causal))
        own = self._run(self._own, leaves, d_out)
        wanted = self._exact(leaves, d_out)
        checks = []
        for name, got, exact in zip(NAMES, self._of_head(own), wanted, strict=True):
            error, allowed = _distance(got, exact), 4 * torch.finfo(self.dtype).eps + 1e-5
            detail = f"relative distance {error:.2g}, allowed {allowed:.2g}"
            checks.append(Check(f"{impl}: {name}, {self.about}", error <= allowed, detail))
        named = attention(*leaves, causal=self.causal, impl=impl).out
        same = torch.equal(named.detach(), own[0])
        return [*checks, Check(f"the timed call runs {impl}", same, "compared bit by bit")]

    def _of_head(self, tensors: list[Tensor]) -> list[Tensor]:
        """The slices of out, dq, dk and dv that belong to the verified KV head of a sequence."""
        group = self.num_heads // self.num_kv_heads
        at, head = self._verified
        queries, keys = slice(head * group, (head + 1) * group), slice(head, head + 1)
        return [t[at][:, part] for t, part in zip(tensors, (queries, queries, keys, keys))]  # noqa: B905

    @property
    def _verified(self) -> tuple[int, int]:
        rng = random.Random(self.name)
        return rng.randrange(self.batch), rng.randrange(self.num_kv_heads)

    def _exact(self, leaves: list[Tensor], d_out: Tensor) -> list[Tensor]:
        """Out, dq, dk and dv in float64 of one KV head, some rows of queries at a time."""
        d_out = self._of_head([d_out])[0].double()
        q, _, k, v = (t.detach().double() for t in self._of_head([leaves[0], *leaves]))
        k, v, scale = k[:, 0], v[:, 0], self.head_size**-0.5
        out, dq = torch.empty_like(q), torch.empty_like(q)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        keys = torch.arange(self.length, device=q.device)
        for head in range(q.shape[1]):
            for rows in torch.split(keys, CHUNK):
                q_rows, d_rows = q[rows, head], d_out[rows, head]
                scores = q_rows @ k.T * scale
                if self.causal:
                    scores = scores.masked_fill(keys > rows[:, None], -torch.inf)
                weights = scores.softmax(-1)
                out[rows, head] = found = weights @ v
                dv += weights.T @ d_rows
                delta = (d_rows * found).sum(-1, keepdim=True)
                d_scores = weights * (d_rows @ v.T - delta) * scale
                dq[rows, head] = d_scores @ k
                dk += d_scores.T @ q_rows
        return [out, dq, dk[:, None], dv[:, None]]

    def call(self) -> Callable[[], object]:
        """Return pagetile's forward and backward on its inputs, for a profiler."""
        return functools.partial(self._run, self._own, *self._draw())

    def measure(self, repeats: int | None) -> Measurement:
        """Time every contestant's forward and backward pass."""
        # A compiled backward pass that reuses its forward pass's buffers cannot be repeated.
        with torch._functorch.config.patch(donated_buffer=False):
            return self._measure(repeats)

    def _measure(self, repeats: int | None) -> Measurement:
        leaves, d_out = self._draw()
        exact = self._exact(leaves, d_out)

        def judge(name: str, results: list[Tensor]) -> str | None:
            gaps = map(_distance, self._of_head(results), exact)
            worst = max(gaps)
            return None if worst <= PEER_ERROR else f"wrong: {worst:.2g} off float64"

        runs = {
            name: functools.partial(self._run, attend, leaves, d_out)
            for name, attend in self._peers().items()
        }
        found, absent = admit(runs, judge)
        if "flex" not in runs and self.device == "cuda":
            absent["flex"] = COMPILED_ELSEWHERE
        peers = {name: attend for name, attend in self._peers().items() if name in found}
        contestants: dict[str, Attend] = {"pagetile": self._own, **peers}
        with _side_stream(self.device):
            calls = _passes(contestants, leaves, d_out)
            times = time_in_turns(calls, self.device, repeats=repeats)
        return Measurement(times, self._metrics(times), absent)

    def _metrics(self, times: dict[str, Times]) -> dict[str, float]:
        pairs = self.length**2 // 2 if self.causal else self.length**2
        product = 2 * self.batch * self.num_heads * pairs * self.head_size
        metrics = {}
        for ending, products in (("", 2), (BACKWARD, 5)):
            pass_times = {n: t for n, t in times.items() if n.endswith(BACKWARD) == bool(ending)}
            own = pass_times.pop("pagetile" + ending)
            metrics[f"TFLOP/s{ending}"] = products * product / own.median / 1e12
            if pass_times:
                best = min(pass_times.values(), key=lambda time: time.median)
                metrics[f"x best peer{ending}"] = ratio(best, own)
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
        return {**peers, "flex": self._flex()} if self.has_compiled_peers else peers

    def _flex(self) -> Attend:
        @functools.cache
        def compiled() -> Callable[..., Any]:
            return compile_flex(self.length if self.causal else None, self.device)

        is_grouped = self.num_heads > self.num_kv_heads

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            tensors = (t.transpose(1, 2) for t in (q, k, v))
            out: Tensor = compiled()(*tensors, enable_gqa=is_grouped)
            return out.transpose(1, 2)

        return attend


def _passes(
    contestants: dict[str, Attend], leaves: list[Tensor], d_out: Tensor
) -> dict[str, Callable[[], Any]]:
    """A forward and a backward pass of each."""
    calls: dict[str, Callable[[], Any]] = {}
    for name, attend in contestants.items():
        out = attend(*leaves)
        backward = functools.partial(torch.autograd.grad, out, leaves, d_out, retain_graph=True)
        calls[name] = functools.partial(torch.no_grad()(attend), *leaves)
        calls[name + BACKWARD] = backward
    return calls


@contextlib.contextmanager
def _side_stream(device: str) -> Iterator[None]:
    """A stream on which autograd can be captured: the default stream cannot."""
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    stream: Any = torch.cuda.Stream
    with torch.cuda.stream(stream()):
        yield


def _distance(found: Tensor, exact: Tensor) -> float:
    """The distance of two tensors relative to the norm of the second; infinite for NaN."""
    gap = (found.double() - exact).norm() / exact.norm()
    return float(gap.nan_to_num(torch.inf))


@dataclass(frozen=True)
class ScoresCase:
    """``attention_scores`` against torch's batched product and against filling the same memory."""

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
        """Compare every score with float64's, allowing one rounding and float32's in the sum."""
        q, k = self._draw()
        found, worst = attention_scores(q, k), 0.0
        for part in torch.split(torch.arange(self.batch), _SCORES_AT_ONCE):
            wide = q[part].double(), k[part].double()
            wanted, terms = wide[0] @ wide[1].mT, wide[0].abs() @ wide[1].abs().mT
            allowed = torch.finfo(self.dtype).eps * wanted.abs() + 1e-6 * terms
            gap = (found[part].double() - wanted).abs() / allowed
            worst = max(worst, float(gap.nan_to_num(torch.inf).max()))
        detail = f"at most {worst:.2f} of what is allowed"
        return [
            Check(f"all of {self.about}", worst <= 1, detail),
            check_kernel("attention_scores", lambda: attention_scores(q, k)),
        ]

    def call(self) -> Callable[[], object]:
        """Return pagetile's call on its inputs, for a profiler."""
        return functools.partial(attention_scores, *self._draw())

    @torch.inference_mode()
    def measure(self, repeats: int | None) -> Measurement:
        """Time pagetile's call, torch's, and filling as much memory."""
        q, k = self._draw()
        shape = (*q.shape[:3], self.length)
        exact = q[:1].double() @ k[:1].double().mT

        def judge(name: str, scores: Tensor) -> str | None:
            gap = _distance(scores[:1], exact)
            return None if gap <= PEER_ERROR else f"wrong: {gap:.2g} off float64"

        # torch copies both if they have a linear layer's strides, and not if heads are contiguous.
        whole = [t.contiguous() for t in (q, k)]
        products: dict[str, Callable[[], Any]] = {
            "torch matmul": lambda: torch.matmul(q, k.mT),
            "torch matmul contiguous": lambda: torch.matmul(whole[0], whole[1].mT),
        }
        peers, absent = admit(products, judge)
        calls: dict[str, Callable[[], Any]] = {
            "pagetile": lambda: attention_scores(q, k),
            **peers,
            "filling as much memory": lambda: torch.ones(
                math.prod(shape) * self.dtype.itemsize // 4, dtype=torch.int32, device=self.device
            ),
        }
        times = time_in_turns(calls, self.device, repeats=repeats)
        own = times["pagetile"].median
        metrics = {
            "microseconds": own * 1e6,
            "GB/s": math.prod(shape) * self.dtype.itemsize / own / 1e9,
        }
        metrics |= {
            f"x {n}": ratio(t, times["pagetile"]) for n, t in times.items() if n != "pagetile"
        }
        return Measurement(times, metrics, absent)

    def _draw(self) -> tuple[Tensor, Tensor]:
        """Tensors with heads side by side in a row, as a linear layer's output."""
        generator = torch.Generator(self.device).manual_seed(0)
        shape = self.batch, self.length, self.num_heads, self.head_size
        q, k = (
            torch.randn(shape, generator=generator, device=self.device).to(self.dtype)
            for _ in range(2)
        )
        return q.transpose(1, 2), k.transpose(1, 2)

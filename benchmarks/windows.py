"""Window attention with its learned bias and a shifted map's mask, beside the peers' best forms.

The peers are handed what they need, made beforehand and not timed: the dense sum of bias and
mask for SDPA, the gathered bias and the dense mask for eager code. Backward passes end at the
bias; what remains to the table, ours included alone, is ours to lose.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import normalize
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pagetile import rel_offsets, shift_regions, window_attention

from .case import Check, Measurement, Target
from .gpu_peers import runs
from .gpu_timing import time_gpu
from .timing import Contestant, Times, ratio, take_turns

__all__ = ["WindowCase", "WindowInputs", "compare"]

_BACKENDS = {
    "sdpa, cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa, efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_MOST_PEER_BYTES = 32 << 30
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class WindowCase:
    """One call over a map that was shifted by half a window; windows × heads × tokens × size.

    Metrics: ``microseconds`` and, for a call with its gradients, ``both, microseconds``;
    ``x best peer``, forward, and ``x best peer, both``; ``backward / forward``.
    """

    name: str
    grid: tuple[int, ...]
    window: tuple[int, ...]
    num_heads: int
    head_size: int
    images: int = 1
    dtype: torch.dtype = torch.float16
    targets: tuple[Target, ...] = ()
    device: str = "cuda"
    cosine: bool = False
    """Whether as in Swin v2: rows divided by their norms, and a learned scale for each head."""
    is_shifted: bool = True
    """Whether the map was shifted: every other block's is not, and needs no mask."""
    has_compiled_peers: bool = False
    """Whether compiled eager code and FlexAttention take part, forward: each takes a while."""

    @property
    def about(self) -> str:
        """The problem in one line."""
        count = self.images * math.prod(g // w for g, w in zip(self.grid, self.window, strict=True))
        sizes = f"{count} × {self.num_heads} × {math.prod(self.window)} × {self.head_size}"
        cosine = "cosine, " if self.cosine else ""
        added = "bias and regions" if self.is_shifted else "bias"
        return f"windows: {sizes}, {self.dtype}, {cosine}{added}, on {self.device}"

    def verify(self) -> list[Check]:
        """The first and the last windows, and their gradients, against float64."""
        inputs = WindowInputs(self)
        picked = [*range(4), *range(inputs.num_masks - 4, inputs.num_masks)]
        found, exact, eager = (
            inputs.pick(picked).results(how) for how in ("ours", "float64", "eager")
        )
        checks = [
            compare(name, found[name], wanted, eager[name], self.dtype)
            for name, wanted in exact.items()
        ]
        again = inputs.pick(picked).results("ours")
        same = all(torch.equal(found[name], again[name]) for name in found)
        checks.append(Check("two runs give the same bits", same, ""))
        return checks

    def call(self) -> Callable[[], object]:
        """Ours, forward and backward, on its inputs: for a profiler."""
        inputs = WindowInputs(self)
        return inputs.both(inputs.ours)

    def measure(self, repeats: int | None) -> Measurement:
        """Forward, and forward with backward, of all; on a GPU by replayed graphs."""
        inputs = WindowInputs(self)
        calls = {"pagetile": inputs.ours, **inputs.peers()}
        compiled = inputs.compiled_peers() if self.has_compiled_peers else {}
        forward = self._time(
            {name: inputs.forward(call) for name, call in (calls | compiled).items()}, repeats
        )
        both = self._time({name: inputs.both(call) for name, call in calls.items()}, repeats)
        ours, ours_both = forward.pop("pagetile"), both.pop("pagetile")
        metrics = {
            "microseconds": ours.median * 1e6,
            "both, microseconds": ours_both.median * 1e6,
            "backward / forward": ours_both.median / ours.median - 1,
        }
        if forward:
            metrics["x best peer"] = _best(forward, ours)
            metrics["x best peer, both"] = _best(both, ours_both)
        times = {"pagetile": ours, **forward, "pagetile, both": ours_both}
        return Measurement(times | {f"{name}, both": t for name, t in both.items()}, metrics)

    def _time(
        self, calls: dict[str, Callable[[], object]], repeats: int | None
    ) -> dict[str, Times]:
        if self.device == "cuda":
            return {name: time_gpu(call) for name, call in calls.items()}
        contestants = {
            name: Contestant(call, partial(_warm_up, call)) for name, call in calls.items()
        }
        return take_turns(contestants, repeats=repeats or 15)


def _warm_up(call: Callable[[], object]) -> None:
    """Wake threads and caches, as a model's other layers do: a call may take a millisecond."""
    end = time.perf_counter() + 0.005
    while time.perf_counter() < end:
        call()


def _best(peers: dict[str, Times], ours: Times) -> float:
    """How many times the time of the fastest peer is ours, round by round where there are any."""
    best = min(peers.values(), key=lambda times: times.median)
    if len(best.seconds) == len(ours.seconds):
        return ratio(best, ours)
    return best.median / ours.median


def compare(what: str, found: Tensor, exact: Tensor, eager: Tensor, dtype: torch.dtype) -> Check:
    """At most twice as wrong as eager code in the same type, plus a rounding of the largest."""
    error, eager_error = ((x.double() - exact).abs().max().item() for x in (found, eager))
    allowed = 2 * eager_error + 4 * torch.finfo(dtype).eps * exact.abs().max().item()
    return Check(what, error <= allowed, f"error {error:.1e}, allowed {allowed:.1e}")


class WindowInputs:
    """A call on random numbers: views of one packed tensor, as a model's linear layer leaves it."""

    def __init__(self, case: WindowCase) -> None:
        generator = torch.Generator(case.device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=case.device)

        self.dtype = case.dtype
        self.offsets = rel_offsets(case.window).to(case.device)
        shift = tuple(n // 2 for n in case.window)
        regions = shift_regions(case.grid, case.window, shift).to(case.device)
        self.num_masks, num_tokens = regions.shape
        self.regions = regions if case.is_shifted else None
        size = (self.num_masks * case.images, num_tokens, 3, case.num_heads, case.head_size)
        packed = draw(*size).to(case.dtype)
        self.rows = [t.detach() for t in packed.permute(2, 0, 3, 1, 4).unbind(0)]
        self.table = draw(math.prod(2 * n - 1 for n in case.window), case.num_heads)
        self.scale = None  # a logarithm, at which Swin v2 begins
        if case.cosine:
            self.scale = torch.full((case.num_heads,), math.log(10), device=case.device)
        self.dout = draw(*self.rows[0].shape).to(case.dtype)
        self.images = case.images

    def pick(self, windows: list[int]) -> WindowInputs:
        """The same on a few windows of the first image."""
        few = object.__new__(WindowInputs)
        few.__dict__ |= self.__dict__
        few.images, few.regions = 1, None if self.regions is None else self.regions[windows]
        few.rows, few.dout = [t[windows] for t in self.rows], self.dout[windows]
        return few

    def bias(self) -> Tensor:
        """Gathered from the table, ``[num_heads, num_tokens, num_tokens]``."""
        centre = (len(self.table) - 1) // 2
        index = self.offsets[:, None] - self.offsets[None, :] + centre
        return self.table[index.long()].permute(2, 0, 1).contiguous()

    def mask(self) -> Tensor:
        """Dense, ``[windows, 1, num_tokens, num_tokens]``; a zero if nothing was shifted."""
        if self.regions is None:
            return torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.table.device)
        apart = self.regions[:, :, None] != self.regions[:, None, :]
        dense = torch.zeros(apart.shape, dtype=self.dtype, device=apart.device)
        return dense.masked_fill_(apart, -100.0).repeat(self.images, 1, 1)[:, None]

    def results(self, how: str) -> dict[str, Tensor]:
        """The result and all gradients, by name."""
        wide = how == "float64"
        leaves = [t.double() if wide else t for t in (*self.rows, *self.learned)]
        leaves = [t.detach().requires_grad_() for t in leaves]
        q, k, v, table, *scale = leaves
        if how == "eager":
            index = self.offsets[:, None] - self.offsets[None, :] + (len(table) - 1) // 2
            bias = table[index.long()].permute(2, 0, 1).to(self.dtype)
            q, k, factor = self.scaled(q, k, *scale)
            out = _eager(q * factor, k, v, bias, self.mask())
        else:
            out = self.attend(q, k, v, table, *scale, impl="reference" if wide else "auto")
        gradients = torch.autograd.grad(out, leaves, self.dout.to(out.dtype))
        names = ("out", "gradient of q", "of k", "of v", "of the table", "of the scale")
        return dict(zip(names, (out.detach(), *gradients)))  # noqa: B905

    @property
    def learned(self) -> list[Tensor]:
        """The table, and the scale if there is one."""
        return [self.table] if self.scale is None else [self.table, self.scale]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *learned: Tensor, impl: str) -> Tensor:
        """The library's function."""
        table, *scale = learned
        cosine: dict[str, Any] = {"logit_scale": scale[0], "softmax_scale": 1.0} if scale else {}
        return window_attention(
            q, k, v, bias_table=table, rel_offsets=self.offsets, regions=self.regions, impl=impl,
            **cosine,
        ).out  # fmt: skip

    def scaled(self, q: Tensor, k: Tensor, *scale: Tensor) -> tuple[Tensor, Tensor, Any]:
        """What peers multiply: rows as they are or divided by their norms, and q's factor."""
        if not scale:
            return q, k, q.shape[-1] ** -0.5
        factor = scale[0].exp()[:, None, None].to(q.dtype)
        return normalize(q, dim=-1), normalize(k, dim=-1), factor

    def ours(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The call that is timed."""
        return self.attend(q, k, v, *self.learned, impl="auto")

    def peers(self) -> dict[str, Call]:
        """Eager code as in MONAI and timm, and SDPA with a dense mask: those that can run here."""
        bias, mask = self.bias().to(self.dtype), self.mask()
        if mask.numel() * bias.shape[0] * bias.element_size() > _MOST_PEER_BYTES:
            return {}
        scale = self.learned[1:]

        def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, factor = self.scaled(q, k, *scale)
            return _eager(q * factor, k, v, bias, mask)

        def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if scale:
                q, k, factor = self.scaled(q, k, *scale)
                return sdpa(q * factor, k, v, attn_mask=dense, scale=1.0)
            return sdpa(q, k, v, attn_mask=dense)

        peers: dict[str, Call] = {"eager": eager}
        dense = bias + mask
        if bias.device.type == "cpu":
            return peers | {"sdpa": fused}
        for name, backend in _BACKENDS.items():
            call = _with_backend(backend, fused)
            if runs(partial(call, *self.rows)):
                peers[name] = call
        return peers

    def compiled_peers(self) -> dict[str, Call]:
        """Eager code and FlexAttention as ``torch.compile`` makes them for this shape."""
        from torch.nn.attention.flex_attention import flex_attention

        assert self.regions is not None, "these peers are for a shifted map"
        bias, mask, regions = self.bias().to(self.dtype), self.mask(), self.regions.int()
        table, offsets, num_masks = self.table.detach(), self.offsets, self.num_masks
        centre = (len(table) - 1) // 2

        def scaled(q: Tensor, *others: Tensor) -> Tensor:
            return _eager(q * q.shape[-1] ** -0.5, *others)

        eager: Any = torch.compile(scaled, dynamic=False)
        flex: Any = torch.compile(flex_attention, dynamic=False)

        def score(s: Tensor, window: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            s = s + table[offsets[i] - offsets[j] + centre, head]
            at = window % num_masks
            return torch.where(regions[at, i] == regions[at, j], s, s - 100.0)

        calls: dict[str, Call] = {
            "compiled eager": lambda q, k, v: eager(q, k, v, bias, mask),
            "flex": lambda q, k, v: flex(q, k, v, score_mod=score),
        }
        with torch.no_grad():
            return {name: call for name, call in calls.items() if runs(partial(call, *self.rows))}

    def forward(self, call: Call) -> Callable[[], Tensor]:
        """A call without gradients."""

        def timed() -> Tensor:
            with torch.no_grad():
                return call(*self.rows)

        return timed

    def both(self, call: Call) -> Callable[[], object]:
        """A call and its gradients; ours down to the table."""
        leaves = [t.detach().requires_grad_() for t in self.rows]
        more = [t.requires_grad_() for t in self.learned] if call == self.ours else []

        def timed() -> object:
            return torch.autograd.grad(call(*leaves), [*leaves, *more], self.dout)

        return timed


def _eager(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT + bias
    weights: Tensor = (scores + mask).softmax(dim=-1)
    return weights @ v


def _with_backend(backend: SDPBackend, fused: Call) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return fused(q, k, v)

    return call

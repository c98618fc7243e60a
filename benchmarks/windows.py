"""Window attention with a learned bias and the mask of a shifted map, against its peers.

Inputs of peers are prepared untimed: for SDPA the dense sum of bias and mask, allocated so that no
backend has to copy it, for eager code the gathered bias and the dense mask. Heads whose size is no
multiple of 8 are padded with zeros for SDPA and FlexAttention.
Peers compute the gradients of q, k and v; pagetile's time includes the table's as well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import normalize, pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pagetile import explain_window_attention, rel_offsets, shift_regions, window_attention
from pagetile.analysis.timing import Times, admit, ratio, take_turns

from .case import COMPILED_ELSEWHERE, Check, Measurement, Target
from .gate import PEER_ERROR, chosen
from .gpu_timing import time_in_turns

_BACKENDS = {
    "sdpa, cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa, efficient": SDPBackend.EFFICIENT_ATTENTION,
}
COMPILED = ("compiled eager", "flex")
_MOST_PEER_BYTES = 32 << 30
_GROUP_SCORES = 1 << 27  # scores of the windows that are computed at once in float64
_ALIGNMENT = 8  # elements: heads and mask rows that SDPA's backends take without a copy
_MOST_ROUNDING = 16  # units of rounding that eager code may be off; up to 10 measured
NAMES = ("out", "gradient of q", "of k", "of v", "of the table", "of the scale")


@dataclass(frozen=True)
class Peer:
    """One way to compute the call."""

    call: Callable[..., Tensor]
    """A function of q, k and v that returns the output."""
    rows: list[Tensor]
    """q, k and v in the form that it takes."""
    dout: Tensor
    learned: list[Tensor] = field(default_factory=list)
    """Parameters whose gradients it computes as well."""

    def forward(self) -> Callable[[], Tensor]:
        """The call without gradients."""

        def timed() -> Tensor:
            with torch.no_grad():
                return self.call(*self.rows)

        return timed

    def both(self) -> Callable[[], object]:
        """The call and its gradients."""
        rows = [t.detach().requires_grad_() for t in self.rows]
        learned = [t.requires_grad_() for t in self.learned]

        def timed() -> object:
            return torch.autograd.grad(self.call(*rows), [*rows, *learned], self.dout)

        return timed


@dataclass(frozen=True)
class WindowCase:
    """One call on a map shifted by half a window: windows × heads × tokens × size.

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
    """Whether as in Swin v2: q and k are normalised, with a learned scale for each head."""
    is_shifted: bool = True
    """Whether the map was shifted: every second block of a Swin is not, and has no mask."""
    has_compiled_peers: bool = False
    """Whether compiled eager code and FlexAttention are compared, which take time to compile."""

    @property
    def compile_effort(self) -> int:
        """See ``case.compile_effort``."""
        return 2 if self.has_compiled_peers else int(self.device == "cuda")

    @property
    def about(self) -> str:
        """The problem in one line."""
        count = self.images * math.prod(g // w for g, w in zip(self.grid, self.window, strict=True))
        sizes = f"{count} × {self.num_heads} × {math.prod(self.window)} × {self.head_size}"
        cosine = "cosine, " if self.cosine else ""
        added = "bias and regions" if self.is_shifted else "bias"
        return f"windows: {sizes}, {self.dtype}, {cosine}{added}, on {self.device}"

    def verify(self) -> list[Check]:
        """Compare the timed implementation, at full size, with float64, and so all gradients.

        ``measure`` lets pagetile choose. Here the chosen implementation is called by name, and must
        equal a call that chooses, bit by bit.
        """
        inputs = WindowInputs(self)
        chosen = inputs.implementation()
        found, timed = inputs.results(chosen), inputs.results("auto")
        exact, eager = inputs.in_groups("float64"), inputs.in_groups("eager")
        rows = len(inputs.dout) * inputs.dout.shape[2]
        checks = [
            compare(
                f"{chosen}: {name}", found[name], wanted, eager[name], self.dtype,
                num_rows=rows if name in NAMES[4:] else 0,
            )
            for name, wanted in exact.items()
        ]  # fmt: skip
        same = all(torch.equal(found[name], timed[name]) for name in found)
        checks.append(Check(f"the timed call runs {chosen}, with the same bits again", same, ""))
        return checks

    def call(self) -> Callable[[], object]:
        """Pagetile's call, forward and backward, on its inputs: for a profiler."""
        return WindowInputs(self).pagetile().both()

    def measure(self, repeats: int | None) -> Measurement:
        """Time forward, and forward with backward, of all; on a GPU by replayed graphs."""
        inputs = WindowInputs(self)
        peers, absent = inputs.peers()
        if self.has_compiled_peers:
            peers |= inputs.compiled_peers()
        elif self.device == "cuda":
            absent |= dict.fromkeys(COMPILED, COMPILED_ELSEWHERE)
        exact = inputs.in_groups("float64")
        calls, wrong = admit({n: way.forward() for n, way in peers.items()}, judge_by(exact))
        gradients, no_gradient = admit({n: peers[n].both() for n in calls}, judge_by(exact))
        absent |= wrong | {f"{name}, both": reason for name, reason in no_gradient.items()}
        own = inputs.pagetile()
        forward = self._time({"pagetile": own.forward(), **calls}, repeats)
        both = self._time({"pagetile": own.both(), **gradients}, repeats)
        mine, mine_both = forward.pop("pagetile"), both.pop("pagetile")
        metrics = {
            "microseconds": mine.median * 1e6,
            "both, microseconds": mine_both.median * 1e6,
            "backward / forward": mine_both.median / mine.median - 1,
        }
        if forward:
            metrics["x best peer"] = _best(forward, mine)
        if both:
            metrics["x best peer, both"] = _best(both, mine_both)
        times = {"pagetile": mine, **forward, "pagetile, both": mine_both}
        times |= {f"{name}, both": time for name, time in both.items()}
        return Measurement(times, metrics, absent)

    def _time(
        self, calls: dict[str, Callable[[], object]], repeats: int | None
    ) -> dict[str, Times]:
        if self.device == "cuda":
            return time_in_turns(calls, self.device, repeats=repeats)
        before = {name: partial(_warm_up, call) for name, call in calls.items()}
        return take_turns(calls, repeats=repeats or 15, before=before)


def _warm_up(call: Callable[[], object]) -> None:
    """Wake threads and fill caches, as a model's other layers do: a call may take a millisecond."""
    end = time.perf_counter() + 0.005
    while time.perf_counter() < end:
        call()


def _best(peers: dict[str, Times], own: Times) -> float:
    """The time of the fastest peer over pagetile's, round by round."""
    return ratio(min(peers.values(), key=lambda times: times.median), own)


def judge_by(exact: dict[str, Tensor]) -> Callable[[str, Any], str | None]:
    """A function that says what is wrong with a peer's outputs, or gradients of q, k and v."""

    def judge(name: str, results: Any) -> str | None:
        is_output = isinstance(results, Tensor)
        wanted = [exact["out"]] if is_output else [exact[name] for name in NAMES[1:4]]
        found = [results] if is_output else results[:3]
        worst = max(
            float(((a[..., : b.shape[-1]].double() - b).norm() / b.norm()).nan_to_num(torch.inf))
            for a, b in zip(found, wanted, strict=True)
        )
        return None if worst <= PEER_ERROR else f"wrong: {worst:.2g} off float64"

    return judge


def compare(
    what: str,
    found: Tensor,
    exact: Tensor,
    eager: Tensor,
    dtype: torch.dtype,
    *,
    num_rows: int = 0,
) -> Check:
    """Check that an error is at most twice that of eager code in the same type, plus rounding.

    Eager code's error counts only up to a bound, so that wrong eager code excuses nothing.
    ``num_rows`` is the number of rows that a parameter's gradient sums in float32.
    """
    error, eager_error = ((x.double() - exact).abs().max().item() for x in (found, eager))
    unit = torch.finfo(dtype).eps * exact.abs().max().item()
    summing = torch.finfo(torch.float32).eps * exact.abs().max().item() * num_rows**0.5
    allowed = 2 * min(eager_error, _MOST_ROUNDING * unit) + 4 * unit + summing
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
        self.scale = None  # a logarithm; Swin v2 initialises it with log 10
        if case.cosine:
            self.scale = torch.full((case.num_heads,), math.log(10), device=case.device)
        self.dout = draw(*self.rows[0].shape).to(case.dtype)
        self.images = case.images

    # --- parts -----------------------------------------------------------------------------------

    @property
    def learned(self) -> list[Tensor]:
        """The bias table, and the scale if there is one."""
        return [self.table] if self.scale is None else [self.table, self.scale]

    @property
    def softmax_scale(self) -> float:
        """The factor of q·k without a learned scale, from the size of an unpadded head."""
        return float(self.rows[0].shape[-1] ** -0.5)

    def pick(self, windows: list[int]) -> WindowInputs:
        """The same call on a few of the windows."""
        few = object.__new__(WindowInputs)
        few.__dict__ |= self.__dict__
        few.images = 1
        if self.regions is not None:
            few.regions = self.regions[[window % self.num_masks for window in windows]]
        few.rows, few.dout = [t[windows] for t in self.rows], self.dout[windows]
        return few

    def groups(self) -> Iterator[WindowInputs]:
        """All windows, in groups whose scores fit into memory in float64."""
        num_windows, num_heads, num_tokens = self.dout.shape[:3]
        size = max(1, _GROUP_SCORES // (num_heads * num_tokens**2))
        for first in range(0, num_windows, size):
            yield self.pick([*range(first, min(first + size, num_windows))])

    def bias(self) -> Tensor:
        """The bias from the table, ``[num_heads, num_tokens, num_tokens]``."""
        centre = (len(self.table) - 1) // 2
        index = self.offsets[:, None] - self.offsets[None, :] + centre
        return self.table[index.long()].permute(2, 0, 1).contiguous()

    def mask(self) -> Tensor:
        """The dense mask, ``[windows, 1, num_tokens, num_tokens]``; 0 for an unshifted map."""
        if self.regions is None:
            return torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.table.device)
        differs = self.regions[:, :, None] != self.regions[:, None, :]
        dense = torch.zeros(differs.shape, dtype=self.dtype, device=differs.device)
        return dense.masked_fill_(differs, -100.0).repeat(self.images, 1, 1)[:, None]

    def dense_mask(self) -> Tensor:
        """The sum of bias and mask, whose rows begin at multiples of 16 bytes.

        SDPA's backends copy a mask with other strides in every call.
        """
        dense = self.bias().to(self.dtype) + self.mask()
        columns = dense.shape[-1]
        return pad(dense, (0, -columns % _ALIGNMENT))[..., :columns]

    def padded_rows(self) -> list[Tensor]:
        """q, k, v and dout with head sizes padded with zeros to a multiple of 8."""
        tensors = [*self.rows, self.dout]
        extra = -self.dout.shape[-1] % _ALIGNMENT
        return [pad(t, (0, extra)) for t in tensors] if extra else tensors

    def scaled(self, q: Tensor, k: Tensor, *scale: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Inputs of the product as peers take them, normalised or not, and the factor of q."""
        if not scale:
            return q, k, self.softmax_scale
        factor = scale[0].exp()[:, None, None].to(q.dtype)
        return normalize(q, dim=-1), normalize(k, dim=-1), factor

    # --- results ---------------------------------------------------------------------------------

    def implementation(self) -> str:
        """The implementation that pagetile chooses for this call."""
        return chosen(explain_window_attention(*self.rows, **self._options(*self.learned)))

    def results(self, how: str) -> dict[str, Tensor]:
        """The output and all gradients, by name; ``how``: an ``impl``, "float64" or "eager"."""
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
            out = self.attend(q, k, v, table, *scale, impl="reference" if wide else how)
        gradients = torch.autograd.grad(out, leaves, self.dout.to(out.dtype))
        return dict(zip(NAMES, (out.detach(), *gradients)))  # noqa: B905

    def in_groups(self, how: str) -> dict[str, Tensor]:
        """``results`` of all windows, a group at a time; gradients of parameters are summed."""
        parts = [group.results(how) for group in self.groups()]
        return {
            name: torch.cat([part[name] for part in parts])
            if name in NAMES[:4]
            else torch.stack([part[name] for part in parts]).sum(dim=0)
            for name in parts[0]
        }

    def _options(self, *learned: Tensor) -> dict[str, Any]:
        table, *scale = learned
        cosine: dict[str, Any] = {"logit_scale": scale[0], "softmax_scale": 1.0} if scale else {}
        options = {"bias_table": table, "rel_offsets": self.offsets, "regions": self.regions}
        return options | cosine

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *learned: Tensor, impl: str) -> Tensor:
        """``pagetile.window_attention``."""
        return window_attention(q, k, v, impl=impl, **self._options(*learned)).out

    # --- what is timed ---------------------------------------------------------------------------

    def pagetile(self) -> Peer:
        """The call that is timed: pagetile chooses its implementation."""

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.attend(q, k, v, *self.learned, impl="auto")

        return Peer(call, self.rows, self.dout, self.learned)

    def peers(self) -> tuple[dict[str, Peer], dict[str, str]]:
        """Eager code as in MONAI and timm, SDPA with a dense mask, and peers left out."""
        bias, mask = self.bias().to(self.dtype), self.mask()
        if mask.numel() * bias.shape[0] * bias.element_size() > _MOST_PEER_BYTES:
            return {}, dict.fromkeys(("eager", *_BACKENDS), "out of memory: a dense mask")
        scale = self.learned[1:]
        dense = self.dense_mask()

        def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, factor = self.scaled(q, k, *scale)
            return _eager(q * factor, k, v, bias, mask)

        def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if scale:
                q, k, factor = self.scaled(q, k, *scale)
                return sdpa(q * factor, k, v, attn_mask=dense, scale=1.0)
            return sdpa(q, k, v, attn_mask=dense, scale=self.softmax_scale)

        peers = {"eager": Peer(eager, self.rows, self.dout)}
        *rows, dout = self.padded_rows()
        if bias.device.type == "cpu":
            return peers | {"sdpa": Peer(fused, rows, dout)}, {}
        backends = {
            name: Peer(_with_backend(backend, fused), rows, dout)
            for name, backend in _BACKENDS.items()
        }
        return peers | backends, {}

    def compiled_peers(self) -> dict[str, Peer]:
        """Eager code and FlexAttention, compiled with autotuning for this shape."""
        from torch.nn.attention.flex_attention import flex_attention

        assert self.regions is not None, "these peers are for a shifted map"
        bias, mask, regions = self.bias().to(self.dtype), self.mask(), self.regions.int()
        table, offsets, num_masks = self.table.detach(), self.offsets, self.num_masks
        centre = (len(table) - 1) // 2
        scale = self.softmax_scale

        def scaled(q: Tensor, *others: Tensor) -> Tensor:
            return _eager(q * scale, *others)

        def score(s: Tensor, window: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            s = s + table[offsets[i] - offsets[j] + centre, head]
            at = window % num_masks
            return torch.where(regions[at, i] == regions[at, j], s, s - 100.0)

        how: Any = {"dynamic": False, "mode": "max-autotune-no-cudagraphs"}
        eager: Any = torch.compile(scaled, **how)
        flex: Any = torch.compile(flex_attention, **how)
        *rows, dout = self.padded_rows()
        ways = (
            Peer(lambda q, k, v: eager(q, k, v, bias, mask), self.rows, self.dout),
            Peer(lambda q, k, v: flex(q, k, v, score_mod=score, scale=scale), rows, dout),
        )
        return dict(zip(COMPILED, ways, strict=True))


def _eager(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT + bias
    weights: Tensor = (scores + mask).softmax(dim=-1)
    return weights @ v


def _with_backend(backend: SDPBackend, fused: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return fused(q, k, v)

    return call

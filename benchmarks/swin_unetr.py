"""A training step of MONAI's SwinUNETR, patched and as released: time and peak memory.

A step is a forward pass under autocast and a backward pass. Two copies of one model take turns, and
CUDA events time each step, launches included. At batch 1 the host takes longer than the kernels, so
each model is timed again after ``torch.cuda.make_graphed_callables`` made CUDA graphs of its
forward and backward pass, which is one line in a training loop.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pagetile.analysis.timing import EventClock, Times, ratio, take_turns
from pagetile.fused.instance_norm import api as norm_api
from pagetile.integrations import swin
from pagetile.integrations.swin import attend
from pagetile.ops.window_attention import operator as window_operator

from .case import Check, Measurement, Target
from .gate import check_calls

MONAI, PAGETILE = "MONAI", "pagetile"
GRAPHED = ", graphed"  # suffix of a contestant's name
WARMUP, REPEATS = 3, 12
NUM_ATTENTIONS, NUM_NORMS = 8, 20  # calls of a step: ten residual blocks have two norms each


@dataclass(frozen=True)
class SwinUnetrCase:
    """Metrics: ``x MONAI``, the speed relative to MONAI; ``peak / MONAI``, of peak memory.

    ``x MONAI, kernels`` compares the kernels alone, ``x MONAI, graphed`` a graphed patched model
    with MONAI's as released, and ``x MONAI, both graphed`` with MONAI's graphed. A checkpointed
    model cannot be graphed, because it reads the state of the random generator.
    """

    name: str
    image: tuple[int, int, int]
    feature_size: int
    batch_size: int = 1
    dtype: torch.dtype = torch.bfloat16
    use_checkpoint: bool = False
    targets: tuple[Target, ...] = ()
    device: str = "cuda"
    compile_effort: ClassVar[int] = 2
    """See ``case.compile_effort``."""

    @property
    def about(self) -> str:
        """The problem in one line."""
        size = "×".join(map(str, (self.batch_size, *self.image)))
        kept = ", checkpointed" if self.use_checkpoint else ""
        return f"SwinUNETR, {self.feature_size} features, {size}, {self.dtype}{kept}"

    def verify(self) -> list[Check]:
        """Compare maps and gradients of patched parts with MONAI's in float32 without TF32.

        The encoder has all attentions, and the first two residual blocks all kinds of norms; ten
        blocks after one another would amplify rounding too much. In the timed type, MONAI's own
        distance from float32 is the reference. The implementations that "auto" chooses in the timed
        step are named, and its calls must equal calls that name them, bit by bit.
        """
        models, x = self._models(), self._input()
        checks = []
        with torch.backends.cudnn.flags(allow_tf32=False):
            for what, results in ("encoder", _of_encoder), ("residual blocks", _of_blocks):
                exact = results(models[MONAI], x, torch.float32)
                yardstick = _distance(results(models[MONAI], x, self.dtype), exact)
                for dtype, allowed in ((torch.float32, 1e-3), (self.dtype, 2 * yardstick)):
                    gap = _distance(results(models[PAGETILE], x, dtype), exact)
                    detail = f"relative distance {gap:.1e}, allowed {allowed:.1e}"
                    checks.append(Check(f"{what}, {dtype}", gap <= allowed, detail))
        return [*checks, *self._check_implementations(models[PAGETILE], x)]

    def _check_implementations(self, model: nn.Module, x: Tensor) -> list[Check]:
        """Name and verify what the timed step runs; norms have no kernel on a CPU."""
        from pagetile.integrations.swin.frameworks import monai_blocks

        step = partial(_step, model, x, self.dtype)
        return [
            check_calls(
                "attentions", step, attend, "window_attention", window_operator,
                at_least=NUM_ATTENTIONS,
            ),
            check_calls(
                "norms", step, monai_blocks, "instance_norm", norm_api,
                at_least=NUM_NORMS, may_be_reference=self.device == "cpu",
            ),
        ]  # fmt: skip

    def measure(self, repeats: int | None) -> Measurement:
        """Time the models in turns, then measure each one's peak with the other on the CPU."""
        models, x = self._models(), self._input()
        steps = {name: partial(_step, model, x, self.dtype) for name, model in models.items()}
        times = _take_turns(steps, repeats)
        peaks = {}
        for name, other in ((MONAI, PAGETILE), (PAGETILE, MONAI)):
            models[other].cpu()
            peaks[name] = _peak(models[name], x, self.dtype)
            models[other].cuda()
        kernels = {name: _kernel_seconds(model, x, self.dtype) for name, model in models.items()}
        metrics = {
            "x MONAI": ratio(times[MONAI], times[PAGETILE]),
            "x MONAI, kernels": kernels[MONAI] / kernels[PAGETILE],
            "ms of kernels": kernels[PAGETILE] * 1e3,
            "ms of kernels, MONAI": kernels[MONAI] * 1e3,
            "peak / MONAI": peaks[PAGETILE] / peaks[MONAI],
            "peak MiB": peaks[PAGETILE] / 2**20,
            "peak MiB of MONAI": peaks[MONAI] / 2**20,
        }
        if not self.use_checkpoint:
            for model in models.values():
                _graph(model, x, self.dtype)
            graphed = {name + GRAPHED: step for name, step in steps.items()}
            times |= _take_turns(graphed, repeats)
            patched = times[PAGETILE + GRAPHED]
            metrics["x MONAI, graphed"] = times[MONAI].median / patched.median
            metrics["x MONAI, both graphed"] = ratio(times[MONAI + GRAPHED], patched)
        return Measurement(times, metrics)

    def _models(self) -> dict[str, nn.Module]:
        from monai.networks.nets import SwinUNETR

        torch.manual_seed(0)
        model = SwinUNETR(
            in_channels=4,
            out_channels=3,
            feature_size=self.feature_size,
            use_checkpoint=self.use_checkpoint,
        ).to(self.device)
        patched = copy.deepcopy(model)
        report = swin.patch(patched)
        assert len(report.attentions) == NUM_ATTENTIONS, report
        return {MONAI: model, PAGETILE: patched}

    def _input(self) -> Tensor:
        return torch.randn(self.batch_size, 4, *self.image, device=self.device)


def _step(model: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Forward under autocast and backward; gradients start from None."""
    model.zero_grad(set_to_none=True)
    with torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32):
        out: Tensor = model(x)
    loss = out.float().square().mean()
    # float16 would lose small gradients, so the loss is scaled, as in training.
    torch.autograd.backward(loss * (2**12 if dtype == torch.float16 else 1))
    return out.detach()


def _take_turns(calls: Mapping[str, Callable[[], object]], repeats: int | None) -> dict[str, Times]:
    """Time each call by events, launches included."""
    return take_turns(calls, repeats=repeats or REPEATS, warmup=WARMUP, clock=EventClock())


def _graph(model: nn.Module, x: Tensor, dtype: torch.dtype) -> None:
    """Make graphs of the model's forward and backward, and check their gradients."""
    _step(model, x, dtype)
    launched = _gradient(model)
    model.zero_grad(set_to_none=True)
    # Casts of weights must be part of the graph, so autocast's cache is off.
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32, cache_enabled=False):
        torch.cuda.make_graphed_callables(model, (x.clone(),), allow_unused_input=True)
    _step(model, x * 0, dtype)  # overwrites earlier results
    _step(model, x, dtype)
    gap = (_gradient(model) - launched).norm() / launched.norm()
    assert gap < 0.01, f"gradients of the graphs are off by {gap:.1e}"


def _gradient(model: nn.Module) -> Tensor:
    """A copy of all gradients as one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _kernel_seconds(model: nn.Module, x: Tensor, dtype: torch.dtype, steps: int = 3) -> float:
    """Seconds of a step's kernels one after another, without gaps between launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            _step(model, x, dtype)
        torch.cuda.synchronize()
    events = profile.key_averages()
    kernels = [each for each in events if each.device_type.name == "CUDA"]
    microseconds = sum(float(each.self_device_time_total) for each in kernels)
    return microseconds / steps / 1e6


def _peak(model: nn.Module, x: Tensor, dtype: torch.dtype) -> int:
    """Peak bytes during a step, weights and gradients included."""
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    _step(model, x, dtype)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _of_encoder(model: nn.Module, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The encoder's maps, and the gradients of its attentions."""
    encoder: Any = model.swinViT
    return _results(encoder, x, dtype, ".attn.")


def _of_blocks(model: nn.Module, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Maps and gradients of residual blocks with and without a convolution of the residual."""
    unetr: Any = model
    inner = x.new_empty(len(x), unetr.encoder2.layer.conv1.out_channels, *x.shape[2:])
    inner = inner[..., ::2, ::2, ::2].normal_(generator=torch.Generator(x.device).manual_seed(0))
    blocks = (unetr.encoder1, x), (unetr.encoder2, inner)
    return [each for block, given in blocks for each in _results(block, given, dtype, ".conv")]


def _results(module: nn.Module, x: Tensor, dtype: torch.dtype, learned: str) -> list[Tensor]:
    """A module's maps, and gradients of the parameters whose names contain ``learned``."""
    module.zero_grad(set_to_none=True)
    with torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32):
        maps = module(x)
    maps = [maps] if isinstance(maps, Tensor) else maps
    # The maps are normalised, so the sum of their squares would have no gradient.
    torch.autograd.backward([_weigh(each.float()) for each in maps])
    found = [each.detach().float().cpu() for each in maps]
    for name, parameter in module.named_parameters():
        if learned in name and parameter.grad is not None:
            found.append(parameter.grad.cpu())
    module.zero_grad(set_to_none=True)
    assert len(found) > len(maps), learned
    return found


def _weigh(values: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, values.numel(), device=values.device)
    return values.flatten() @ weights


def _distance(found: list[Tensor], exact: list[Tensor]) -> float:
    """The largest relative distance of the tensors, each relative to its own norm."""
    gaps = [
        ((one - other).norm() / other.norm().clamp(min=1e-12)).item()
        for one, other in zip(found, exact, strict=True)
    ]
    return max(gap if math.isfinite(gap) else math.inf for gap in gaps)

"""Replaces linear modules, during a step of few tokens, by products near the bandwidth of memory.

On a CPU all linear modules are replaced, on a GPU the head. ``fusion`` replaces most of them again,
with the layer that they are in. A module is recognised by its parameters and its result, and more
tokens run its own code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..device import DeviceInfo
from ..fused.small_linear import (
    Problem,
    is_faster,
    is_faster_in_ring,
    is_faster_on_cpu,
    small_linear,
)
from .fused import Replacement, call_or_none, own_forward


def find_linears(model: nn.Module) -> list[Replacement]:
    """Return the replacements of a model's linear modules on a CPU."""
    found: list[Replacement] = []
    for module in model.modules():
        forward = forward_of_few(module, "cpu")
        if forward is not None:
            found.append((module, "forward", forward))
    return found


@torch.no_grad()
def forward_of_few(module: nn.Module, impl: str) -> Callable[[Tensor], Tensor] | None:
    """Return a linear module's forward by ``small_linear`` where that is faster."""
    if not is_linear(module):
        return None
    own = type(module).forward
    weight: Any = module.weight
    if impl == "cpu" and not _choose(weight[:2], weight, impl):
        return None
    if own is not nn.Linear.forward and not _multiplies(module, own):
        return None

    def forward(x: Tensor) -> Tensor:
        weight: Any = module.weight
        chosen = _choose(x, weight, impl)
        if chosen:
            return small_linear(x, weight, bias=getattr(module, "bias", None), impl=chosen)
        return own(module, x)  # type: ignore[no-any-return]

    return forward


def _multiplies(module: Any, own: Callable[..., Any]) -> bool:
    """Return whether a module's forward is one product for random rows."""
    weight, bias = module.weight, getattr(module, "bias", None)
    x = torch.randn(2, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    found = call_or_none(own, module, x)
    return isinstance(found, Tensor) and torch.equal(nn.functional.linear(x, weight, bias), found)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module has only a matrix ``[out, in]`` and at most a bias as parameters."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    weight, bias = tensors.pop("weight", None), tensors.pop("bias", None)
    return (
        own_forward(module) is not None
        and type(weight) is nn.Parameter
        and weight.ndim == 2
        and not tensors
        and not any(True for _ in module.children())
        and (bias is None or (type(bias) is nn.Parameter and bias.shape == weight.shape[:1]))
    )


def _choose(x: Tensor, weight: Tensor, impl: str) -> str:
    """Return the implementation of ``small_linear`` to run; ``""``: torch's product is faster."""
    if x.dtype != weight.dtype or not weight.is_contiguous():
        return ""
    rows, size = weight.shape
    problem = Problem(x.numel() // max(1, x.shape[-1]), size, rows, x.dtype)
    if impl == "cpu":
        return impl if is_faster_on_cpu(problem) else ""
    is_aligned = weight.data_ptr() % 16 == 0
    if impl == "triton" and is_aligned and is_faster_in_ring(problem, DeviceInfo.of(x.device)):
        return "hopper_ring"
    return impl if is_faster(problem) else ""

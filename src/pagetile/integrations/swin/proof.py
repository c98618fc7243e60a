"""No module is patched on trust: a copy of it must compute the same, patched and not.

Frameworks change between releases, and quietly: Transformers 5.23 adds Swinv2's shift mask twice.
A module whose copy differs is left alone, with the difference as the reason.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from .attend import hooks_of
from .swapped import Swaps, restore

__all__ = ["difference"]

TOLERANCE = 1e-6  # of float64 results whose parameters and inputs are of order one


def difference(module: nn.Module, swaps: Swaps) -> str | None:
    """Why ``module`` would not compute the same when patched, or None if it would.

    A copy in float64, on the CPU, with random parameters, runs a small trial both ways.
    """
    if any(parameter.is_meta for parameter in module.parameters()):
        return "its parameters are on the meta device: load them, then patch"
    try:
        found, expected = _both(module, swaps)
    except Exception as error:  # whatever a trial run may raise in another release
        return f"a trial run failed with {type(error).__name__}: {error}"
    if found.shape != expected.shape:
        return f"this release gives {list(expected.shape)} where we give {list(found.shape)}"
    if expected.numel() == 0:
        return None
    gap = ((found - expected).abs().max() / expected.abs().max()).item()
    if not gap <= TOLERANCE:
        return f"this release computes something else: results differ by {gap:.0e}"
    return None


def _both(module: nn.Module, swaps: Swaps) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    copied = _randomised(module, random)
    trial = swaps[type(module)].trial
    results = []
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for swap in (True, False):
            for child in copied.modules():
                restore(child)
                if swap and type(child) in swaps:
                    child.__class__ = swaps[type(child)]
            inputs = torch.Generator().manual_seed(1)

            def randn(*shape: int, inputs: torch.Generator = inputs) -> Tensor:
                return torch.randn(*shape, generator=inputs, dtype=torch.float64, device="cpu")

            results.append(trial(copied, randn))
    return results[0], results[1]


def _randomised(module: nn.Module, random: torch.Generator) -> Any:
    """A copy whose every parameter matters, and which nobody watches.

    Fresh models start with zeros and ones.
    """
    copied = copy.deepcopy(module).to("cpu", torch.float64).eval()
    for child in copied.modules():
        for hooks in hooks_of(child):
            hooks.clear()
    with torch.no_grad():
        for parameter in copied.parameters():
            width = max(1, parameter.shape[-1] if parameter.ndim > 1 else 1)
            values = torch.randn(
                parameter.shape, generator=random, dtype=torch.float64, device="cpu"
            )
            parameter.copy_(values / width**0.5)
    return copied

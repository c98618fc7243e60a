"""Checks on a copy that a patched module computes the same as the original.

Frameworks change between releases: Transformers 5.23 adds Swinv2's shift mask twice. A module whose
copy differs is left alone, with the difference as the reason.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .attend import hooks_of
from .masks import dense_mask
from .swapped import Randn, Swaps, restore

TOLERANCE = 1e-6  # of float64 results whose parameters and inputs are of order one


def difference(module: nn.Module, swaps: Swaps) -> str | None:
    """Return why ``module`` would not compute the same when patched, or None if it would.

    A copy in float64 with random parameters runs on a small input on the CPU, patched and not.
    """
    if any(parameter.is_meta for parameter in module.parameters()):
        return "its parameters are on the meta device: load them, then patch"
    for parameter in module.parameters():
        if is_traceable_wrapper_subclass(parameter):
            kind = type(parameter).__name__
            return f"its parameters are of type {kind}: patch before they are sharded or converted"
    try:
        found, expected = _both(module, swaps)
    except Exception as error:  # another release may raise anything
        return f"a trial run failed with {type(error).__name__}: {error}"
    if found.shape != expected.shape:
        return f"this release returns {list(expected.shape)}, pagetile {list(found.shape)}"
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
    """A copy without hooks and with random parameters, since zeros and ones could hide errors."""
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


def windows(num_tokens: int, dim: int, randn: Randn) -> tuple[Tensor, Tensor]:
    """Trial inputs: two images of two windows each, and a mask of -1.

    A mask of -100 would hide errors in the weights that it suppresses.
    """
    thirds = torch.arange(num_tokens, device="cpu") % 3
    regions = torch.stack((torch.zeros_like(thirds), thirds))
    mask = dense_mask(regions, torch.float64)
    assert mask is not None
    return randn(4, num_tokens, dim), mask / 100


def mask_of(mask: Tensor | None) -> Tensor:
    """Return the mask that a layer passes to its attention, dense; empty for None."""
    dense = dense_mask(mask, torch.float64)
    return torch.empty(0) if dense is None else dense

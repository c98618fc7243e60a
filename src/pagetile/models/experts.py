"""Replaces a mixture's experts, during a step, by kernels that do not wait for the routing.

Transformers keeps a layer's experts in one module with stacked weights. Its loop over experts, and
in float32 its grouped product, reads the routing on the host, so a CUDA graph cannot capture them.
``moe_experts`` computes the same in four launches::

    experts.forward(hidden_states, experts, weights)  ->  moe_experts(...)

An experts module is recognised by the shapes of its parameters and by its output for random
tokens, which also shows how gate and up are laid out and which activation is used. The router is
not replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PagetileError
from ..fused.moe import moe_experts
from ..fused.moe.problem import Expert
from ..fused.moe.reference import activate
from .fused import Replacement, call_or_none, difference, own_forward

_NAMES = {"gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"}

_MOST_PAIRS = 2048
"""With more pairs of tokens and experts, as in a prefill, the module's own grouped product runs."""

_NEAR = {torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}


@torch.no_grad()
def find_experts(model: nn.Module, impl: str) -> list[Replacement]:
    """Return the replacements of a model's experts."""
    found: list[Replacement] = []
    for module in model.modules():
        forward = _replace(module, impl)
        if forward is not None:
            found.append((module, "forward", forward))
    return found


def _replace(module: nn.Module, impl: str) -> Callable[..., Tensor] | None:
    function = own_forward(module)
    known = None if function is None else _recognise(module, function)
    if function is None or known is None:
        return None
    expert, options = known
    places = _places(module)

    def forward(x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        if experts.numel() <= _MOST_PAIRS and _places(module) == places:  # not moved since
            try:
                return moe_experts(x, experts, weights, expert, **options, impl=impl)
            except PagetileError:  # not supported: run the module's own code
                pass
        return function(module, x, experts, weights)  # type: ignore[no-any-return]

    return forward


def _places(module: Any) -> tuple[int, int]:
    return module.gate_up_proj.data_ptr(), module.down_proj.data_ptr()


def _recognise(module: nn.Module, function: FunctionType) -> tuple[Expert, dict[str, Any]] | None:
    """Return a module's weights and the options of ``moe_experts``, if that computes the same."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    is_stacked = {"gate_up_proj", "down_proj"} <= tensors.keys() <= _NAMES
    if not is_stacked or not all(_is_plain(tensor) for tensor in tensors.values()):
        return None
    for expert in _layouts(tensors):
        hidden_size = expert.gate.shape[2]
        given = _random_tokens(hidden_size, len(expert.gate), expert.gate)
        own = call_or_none(function, module, *given)
        if not isinstance(own, Tensor) or own.shape != given[0].shape:
            return None
        for options in _activations(module):
            if not _has_activation(module, options):
                continue
            made = moe_experts(*given, expert, **options, impl="reference")
            if difference(made, own) <= _NEAR[made.dtype]:
                return expert, options
    return None


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a parameter is an ordinary one, and not a shard (DTensor)."""
    return type(tensor) is nn.Parameter and tensor.dtype in _NEAR


def _layouts(tensors: dict[str, Tensor]) -> Iterator[Expert]:
    """Yield every layout of the weights that their shapes allow, as views."""
    both, down = tensors["gate_up_proj"], tensors["down_proj"]
    both_bias, down_bias = (tensors.get(f"{name}_proj_bias") for name in ("gate_up", "down"))
    if both.dim() != 3 or down.dim() != 3 or (both_bias is None) != (down_bias is None):
        return
    for rows, columns in ((both, down), (both.mT, down.mT)):
        num_experts, hidden_size, inner_size = columns.shape
        if rows.shape != (num_experts, 2 * inner_size, hidden_size):
            continue
        for gate, up in (
            (slice(inner_size), slice(inner_size, None)),
            (slice(0, None, 2), slice(1, None, 2)),
        ):
            biases: tuple[Tensor, ...] = ()
            if both_bias is not None and down_bias is not None:
                biases = both_bias[:, gate], both_bias[:, up], down_bias
            yield Expert(rows[:, gate], rows[:, up], columns, *biases)


def _activations(module: nn.Module) -> Iterator[dict[str, Any]]:
    yield {"activation": "silu"}
    alpha, limit = (getattr(module, name, None) for name in ("alpha", "limit"))
    if isinstance(alpha, float) and isinstance(limit, float):
        yield {"activation": "clamped", "alpha": alpha, "limit": limit}


def _has_activation(module: Any, options: dict[str, Any]) -> bool:
    """Return whether the module's own gating agrees, for values far beyond any usual limit."""
    apply = getattr(module, "_apply_gate", None)
    if apply is None:
        return False
    values = torch.tensor([-300.0, -20, -7, -3, -1, -0.1, 0, 0.1, 1, 3, 6.9, 7, 7.1, 20, 300])
    gate, up = (grid.flatten() for grid in torch.meshgrid(values, values, indexing="ij"))
    halves, pairs = torch.cat([gate, up]), torch.stack([gate, up], 1).flatten()
    made = activate(
        gate, up, options["activation"], options.get("alpha", 1.0), options.get("limit", 0.0)
    )
    return any(
        isinstance(own, Tensor)
        and own.shape == made.shape
        and torch.allclose(own, made, 1e-5, 1e-6)
        for own in (call_or_none(apply, both) for both in (halves, pairs))
    )


def _random_tokens(
    hidden_size: int, num_experts: int, like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return 3 tokens, up to 2 experts for each, and their weights."""
    generator = torch.Generator().manual_seed(0)
    num_tokens, top_k = 3, min(2, num_experts)
    x = torch.randn(num_tokens, hidden_size, generator=generator)
    chosen = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :top_k]
    weights = torch.rand(num_tokens, top_k, generator=generator) + 0.5
    return x.to(like), chosen.contiguous().to(like.device), weights.to(like)

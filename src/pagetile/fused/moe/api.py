"""The experts of a mixture-of-experts layer: a fixed number of launches that never synchronise.

Transformers' own loop over the experts reads from the device which of them were chosen, as does its
grouped product in float32, so a CUDA graph cannot record them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...device import DeviceInfo
from ...errors import DTypeError, ShapeError
from ...ops.dispatch import choose
from ...ops.eager import needs_gradient
from ...shapes import Form, check_device, forms, is_dense
from ..rows import check_name
from .problem import Expert, Problem

IMPLEMENTATIONS = ("triton", "reference")

ACTIVATIONS = ("silu", "clamped")
"""``silu(g) * u``; gpt-oss's ``g * sigmoid(alpha * g) * (u + 1)`` with ``g`` at most ``limit`` and
``u`` between ``-limit`` and ``limit``."""


def moe_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    expert: Expert,
    *,
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """``sum_j weights[t, j] * down_e(activation(gate_e(x[t]), up_e(x[t])))``, e = experts[t, j].

    Products and the sum are in float32; the activation's result is rounded to the type of ``x``. A
    token's result depends on the number of other tokens, but not on their values.

    Args:
        x: ``[num_tokens, hidden_size]`` float32, float16 or bfloat16.
        experts: int64 ``[num_tokens, top_k]``, each below ``num_experts``, which is not checked.
        weights: ``[num_tokens, top_k]`` of any floating type.
        expert: The weights, of the type of ``x``.
        activation: One of ``ACTIVATIONS``.
        alpha: For "clamped".
        limit: For "clamped".
        impl: ``auto``, ``triton`` or ``reference``, which alone has a gradient.

    Returns:
        Like ``x``, without gaps.

    Raises:
        ShapeError: Sizes disagree.
        DTypeError: ``experts`` is not int64, or the weights have another type than ``x``.
        UnsupportedError: The named ``impl`` cannot run this; the message says why.

    Examples:
        >>> import torch
        >>> w = Expert(torch.randn(4, 16, 8), torch.randn(4, 16, 8), torch.randn(4, 8, 16))
        >>> x, chosen = torch.randn(3, 8), torch.tensor([[0, 2], [1, 3], [2, 0]])
        >>> moe_experts(x, chosen, torch.full((3, 2), 0.5), w).shape
        torch.Size([3, 8])
    """
    tensors = {name: value for name, value in expert._asdict().items() if value is not None}
    is_learned = needs_gradient(x, weights, *tensors.values())
    module = _dispatch(
        *forms(x=x, experts=experts, weights=weights),
        *forms(**tensors),
        tuple(tensors),
        is_learned,
        activation,
        impl,
    )
    out: Tensor = module.run(x, experts, weights, expert, activation, alpha, limit)
    return out


@functools.lru_cache(maxsize=1024)
def _dispatch(*arguments: Any) -> Any:
    """Check tensors of these forms, and choose the module that runs."""
    *found, names, is_learned, activation, impl = arguments
    x, experts, weights, *rest = (Form(*form) for form in found)
    expert = dict(zip(names, rest, strict=True))
    check_name("activation", activation, ACTIVATIONS)
    gate, up = expert["gate"], expert["up"]
    if len(x.shape) != 2 or len(gate.shape) != 3:
        raise ShapeError(
            f"x is {list(x.shape)} and gate {list(gate.shape)}, expected [num_tokens, hidden_size] "
            "and [num_experts, inner_size, hidden_size]"
        )
    num_experts, inner_size, hidden_size = gate.shape
    expected = {
        "gate": (num_experts, inner_size, x.shape[1]),
        "up": gate.shape,
        "down": (num_experts, hidden_size, inner_size),
        "gate_bias": (num_experts, inner_size),
        "up_bias": (num_experts, inner_size),
        "down_bias": (num_experts, hidden_size),
    }
    for name, tensor in expert.items():
        if tuple(tensor.shape) != tuple(expected[name]):
            raise ShapeError(
                f"{name} is {list(tensor.shape)}, expected {list(expected[name])} for gate "
                f"{list(gate.shape)} and x {list(x.shape)}"
            )
        if tensor.dtype != x.dtype:
            raise DTypeError(f"{name} is {tensor.dtype}, expected {x.dtype} as x")
    if len(expert) not in (3, 6) or up.strides != gate.strides:
        raise ShapeError("gate and up need the same strides, and all biases or none are given")
    if len(experts.shape) != 2 or experts.shape != weights.shape or experts.shape[0] != x.shape[0]:
        raise ShapeError(
            f"experts is {list(experts.shape)} and weights {list(weights.shape)}, expected "
            f"[{x.shape[0]}, top_k] both"
        )
    if experts.dtype != torch.int64 or not weights.dtype.is_floating_point:
        raise DTypeError(
            f"experts is {experts.dtype} and weights {weights.dtype}, expected int64 and floating"
        )
    check_device("x", x.device, experts=experts, weights=weights, **expert)
    problem = Problem(
        num_tokens=x.shape[0],
        top_k=experts.shape[1],
        dtype=x.dtype,
        weight_dtype=weights.dtype,
        is_contiguous=all(is_dense(t.shape, t.strides) for t in (x, experts, weights)),
        needs_gradient=is_learned,
    )
    return choose(__package__, IMPLEMENTATIONS, problem, DeviceInfo.of(x.device), impl)

"""A linear layer with norm and epilogue by torch's own operations."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from ..gated_activation import gated_activation
from ..rms_norm import Norm, rms_norm


def run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    activation: str,
    residual: Tensor | None,
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = functional.linear,
    impl: str = "reference",
) -> Tensor:
    """``[..., num_columns]``, with the products of ``linear``, norm and activation of ``impl``."""
    if norm is not None:
        x = rms_norm(x, norm.weight, eps=norm.eps, kind=norm.kind, impl=impl)
    y = linear(x, weight, bias)
    if activation:
        y = gated_activation(y, activation, impl=impl)
    return y if residual is None else residual + y


def run_parts(x: Tensor, weight: Tensor) -> Tensor:
    """``[1, ..., num_columns]``."""
    return functional.linear(x.float(), weight.float())[None]

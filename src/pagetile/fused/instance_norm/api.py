"""Instance norm, residual and leaky ReLU in one operation, as between a block's convolutions.

On a GPU each of the three passes over memory, and torch's instance norm gives a whole channel to
one thread block: 19 of the 46 ms of a patched SwinUNETR's training step. Used by
``integrations/swin``; not public.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ...device import DeviceInfo
from ...errors import DTypeError, ShapeError, UnsupportedError, plural
from ...ops.attention_checks import as_number
from ...ops.dispatch import choose
from ...ops.eager import has_dispatch_observers, has_tangent, is_batched
from ...shapes import check_device, check_tensors, given
from . import reference
from .problem import Problem

IMPLEMENTATIONS = ("triton", "reference")


def instance_norm(
    x: Tensor,
    residual: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual_eps: float | None = None,
    negative_slope: float = 0.01,
    impl: str = "auto",
) -> Tensor:
    """Return ``leaky_relu(norm(x) + residual)``; a channel of an image gets mean 0, variance 1.

    Sums are float32 with one rounding, and the same bits on every call. For the gradient, the
    kernels keep ``out``, which the next layer keeps as well, and either ``x`` or the residual.

    Args:
        x: Floating ``[batch, channels, *grid]``, by any strides.
        residual: Like ``x``, of any floating type. ``None``: nothing is added.
        eps: Added to the variance of a channel of ``x``.
        residual_eps: Added to the variance of a channel of the residual, which is then normalised
            too. ``None``: the residual is added without a norm.
        negative_slope: The factor of negative sums.
        impl: ``auto``, ``triton`` or ``reference``. Compilers and tracers get the reference.

    Returns:
        Like ``x``, contiguous.

    Raises:
        ShapeError: ``x`` has fewer than 3 dimensions, or ``residual`` another shape.
        DTypeError: An argument has a type that it does not take.
        UnsupportedError: The named ``impl`` cannot run this; the message says why.

    Examples:
        >>> x = torch.randn(2, 3, 8, 8)
        >>> instance_norm(x, x.square(), residual_eps=1e-5).shape
        torch.Size([2, 3, 8, 8])
    """
    tensors = (x,) if residual is None else (x, residual)
    check_tensors(x=x, **given(residual=residual))
    if has_torch_function(tensors):  # keeps the metadata of MONAI's tensors
        found: Tensor = handle_torch_function(
            instance_norm, tensors, x, residual, eps=eps, residual_eps=residual_eps,
            negative_slope=negative_slope, impl=impl,
        )  # fmt: skip
        return found
    if residual is not None and residual.shape != x.shape:
        raise ShapeError(f"residual is {list(residual.shape)}, expected {list(x.shape)} as x")
    check_device("x", x.device, residual=residual)
    if not x.is_floating_point():
        raise DTypeError(f"x is {str(x.dtype).removeprefix('torch.')}, expected a floating type")
    if x.ndim < 3:
        raise ShapeError(
            f"x has {plural(x.ndim, 'dimension')}, expected at least 3: batch, channels, grid"
        )
    eps, negative_slope = as_number("eps", eps), as_number("negative_slope", negative_slope)
    x, residual = _strip(x), None if residual is None else _strip(residual)
    if impl == "auto" and (has_dispatch_observers(x, residual) or has_tangent(x, residual)):
        impl = "reference"
    if impl != "reference":
        problem = _describe(x, residual, eps, residual_eps, negative_slope)
        chosen = choose(__package__, IMPLEMENTATIONS, problem, DeviceInfo.of(x.device), impl)
        if chosen is not reference:
            # Contiguous, as torch makes them for its own norm.
            x, residual = x.contiguous(), None if residual is None else residual.contiguous()
            fused: Tensor = _Fused.apply(chosen, problem, x, residual)  # type: ignore[no-untyped-call]
            return fused
    return reference.run(x, residual, eps, residual_eps, negative_slope)


def _strip(x: Tensor) -> Tensor:
    """Drop a subclass that overrides functions; keep one that overrides operators."""
    has_dispatch = type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return x if type(x) is Tensor or has_dispatch else x.as_subclass(Tensor)


def _describe(
    x: Tensor,
    residual: Tensor | None,
    eps: float,
    residual_eps: float | None,
    negative_slope: float,
) -> Problem:
    channels, size = math.prod(x.shape[:2]), math.prod(x.shape[2:])
    if residual is None:
        return Problem(channels, size, x.dtype, eps, negative_slope)
    return Problem(
        channels,
        size,
        x.dtype,
        eps,
        negative_slope,
        "plain" if residual_eps is None else "norm",
        residual.dtype,
        residual_eps or 0.0,
    )


class _Fused(torch.autograd.Function):
    """An implementation with a gradient of its own."""

    @staticmethod
    def forward(
        ctx: Any, chosen: Any, problem: Problem, x: Tensor, residual: Tensor | None
    ) -> Tensor:
        residual = None if residual is None else _align(residual)
        out, source, kept = chosen.run(problem, _align(x), residual)
        ctx.chosen, ctx.problem = chosen, problem
        ctx.save_for_backward(out, source, kept)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        gradients: Any = _Gradients.apply if torch.is_grad_enabled() else _run_gradients
        return None, None, *gradients(ctx.chosen, ctx.problem, grad, *ctx.saved_tensors)


def _run_gradients(chosen: Any, problem: Problem, grad: Tensor, *saved: Tensor) -> Any:
    if is_batched(grad):
        raise UnsupportedError(
            "a fused instance norm does not support batched gradients: unpatch the model"
        )
    return chosen.run_gradients(problem, _align(grad.contiguous()), *saved)


def _align(x: Tensor) -> Tensor:
    """A copy, if ``x`` does not begin at a multiple of 16 bytes."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


class _Gradients(torch.autograd.Function):
    """The gradients under autograd; differentiating them raises."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        return _run_gradients(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise UnsupportedError(
            "the gradients of a fused instance norm cannot be differentiated: unpatch the model, "
            "or name impl='reference'"
        )

"""A residual addition with the norm of what is added and the norm of the sum in one launch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...device import DeviceInfo
from ...errors import ShapeError
from ...ops.dispatch import choose
from ...ops.eager import needs_gradient
from ...shapes import Form, check_device, check_dtype, form, is_dense
from ..rms_norm import KINDS, Norm
from ..rows import RowsProblem, check_name

IMPLEMENTATIONS = ("cpu", "triton", "reference")


def add_norm(
    residual: Tensor,
    x: Tensor,
    *,
    before: Norm | None = None,
    after: Norm | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """``hidden = residual + before(x)``, and ``after(hidden)``, each rounded to the type.

    Args:
        residual: ``[..., size]`` float32, float16 or bfloat16, without gaps.
        x: Likewise; or float32 ``[num_parts, ..., size]``, summed in this order and rounded first.
        before: Norm of ``x``; ``None``: ``x`` is added without a norm.
        after: Norm of the sum; ``None``: no norm.
        impl: ``auto``, ``cpu``, ``triton`` or ``reference``, which alone has a gradient.

    Returns:
        The sum, and its norm or ``None``.

    Raises:
        ShapeError: Sizes disagree.
        UnsupportedError: The named ``impl`` cannot run this; the message says why.

    Examples:
        >>> import torch
        >>> x = torch.full((1, 4), 1.5)
        >>> add_norm(x, x, after=Norm(torch.arange(4.0), 0.0, "scaled"))
        (tensor([[3., 3., 3., 3.]]), tensor([[0., 1., 2., 3.]]))
    """
    norms = tuple(None if n is None else (form(n.weight), n.kind) for n in (before, after))
    weights = [n.weight for n in (before, after) if n is not None]
    is_learned = needs_gradient(residual, x, *weights)
    module = _dispatch(form(residual), form(x), norms, is_learned, impl)
    found: tuple[Tensor, Tensor | None] = module.run(residual, x, before, after)
    return found


@functools.lru_cache(maxsize=1024)
def _dispatch(residual: Any, x: Any, norms: tuple[Any, ...], is_learned: bool, impl: str) -> Any:
    """Check tensors of these forms, and choose the module that runs."""
    residual, x = Form(*residual), Form(*x)
    num_parts = x.shape[0] if len(x.shape) == len(residual.shape) + 1 else 0
    if residual.shape != (x.shape[1:] if num_parts else x.shape) or not residual.shape:
        raise ShapeError(f"x is {list(x.shape)}, expected {list(residual.shape)} like residual")
    check_dtype("x", x, torch.float32 if num_parts else residual.dtype)
    weights = {f"weight {at}": Form(*norm[0]) for at, norm in enumerate(norms) if norm is not None}
    for weight in weights.values():
        if weight.shape != x.shape[-1:]:
            raise ShapeError(f"a weight is {list(weight.shape)}, expected [{x.shape[-1]}]")
    for norm in norms:
        if norm is not None:
            check_name("kind", norm[1], KINDS)
    check_device("residual", residual.device, x=x, **weights)
    problem = RowsProblem(
        size=x.shape[-1],
        num_rows=residual.shape[:-1].numel(),
        dtype=residual.dtype,
        is_regular=all(is_dense(t.shape, t.strides) for t in (residual, x, *weights.values())),
        needs_gradient=is_learned,
        norm_dtypes=tuple(weight.dtype for weight in weights.values()),
    )
    return choose(__package__, IMPLEMENTATIONS, problem, DeviceInfo.of(x.device), impl)

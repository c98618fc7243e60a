"""The public operation: contract, checks, and the choice of an implementation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...device import DeviceInfo
from ...errors import ShapeError
from ...shapes import Form, bind, check_device, check_dtype, check_tensors, form
from ...tiles.types import ALL_FLOATS
from ..attention_checks import as_number, check_contiguous_rows, default_scale, refuse_learned_scale
from ..dispatch import choose
from ..eager import autocast_type, call_uncompiled, has_dispatch_observers, needs_gradient
from . import reference
from .problem import Problem

FormFields = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
"""What ``form`` returns."""

IMPLEMENTATIONS = ("triton", "cpu", "reference")
"""In the order in which ``impl="auto"`` tries them."""


def attention_scores(
    q: Tensor, k: Tensor, *, softmax_scale: float | None = 1.0, impl: str = "auto"
) -> Tensor:
    """Every query's product with every key: ``q kᵀ * softmax_scale``, and nothing else.

    No softmax, no mask: for inspecting scores, and for methods built on them.
    Attention itself never stores them (see ``attention``). Gradients are the reference's.

    Args:
        q: ``[batch, num_heads, q_len, head_size]`` float32, float16, bfloat16, or float64 on the
            reference. Last dimension contiguous; other strides are free.
        k: ``[batch, num_heads, k_len, head_size]``, of the same type.
        softmax_scale: Multiplies every product. ``None`` is ``head_size ** -0.5``.
        impl: ``"auto"``, or one of ``"triton"``, ``"cpu"``, ``"reference"``: a named one runs or
            raises.

    Returns:
        ``[batch, num_heads, q_len, k_len]`` in the type of ``q`` (under autocast, in the one that
        it computes products in), accumulated in float32.

    Raises:
        ShapeError: Sizes disagree; the message names both arguments.
        DTypeError: ``q`` is not floating, or ``k`` of another type.
        UnsupportedError: The named ``impl`` cannot run this; the message says why.

    Example:
        >>> q, k = torch.randn(2, 4, 12, 343, 16).unbind()
        >>> attention_scores(q, k, softmax_scale=0.25).shape
        torch.Size([4, 12, 343, 343])
    """
    if impl != "auto" and torch.compiler.is_compiling():
        return call_uncompiled(attention_scores, q, k, softmax_scale=softmax_scale, impl=impl)
    check_tensors(q=q, k=k)
    dtype = autocast_type(q)
    if dtype is not None:
        q, k = (x.to(dtype) if x.dtype != torch.float64 else x for x in (q, k))
    if type(softmax_scale) is not float:
        refuse_learned_scale(softmax_scale)
        scale = default_scale(q) if softmax_scale is None else softmax_scale
        softmax_scale = as_number("softmax_scale", scale)
    is_differentiated = needs_gradient(q, k)
    if impl == "auto" and has_dispatch_observers(q, k):  # they know these operations
        problem = _validate(q, k, softmax_scale, is_differentiated)
        return reference.run(problem, q, k, softmax_scale)
    run = _prepare(form(q), form(k), softmax_scale, is_differentiated, impl)
    return run(q, k)


@functools.lru_cache(maxsize=1024)
def _prepare(
    q: FormFields, k: FormFields, softmax_scale: float, is_differentiated: bool, impl: str
) -> Callable[[Tensor, Tensor], Tensor]:
    """Validate calls of these forms, choose an implementation, and return what runs them."""
    forms = Form(*q), Form(*k)
    problem = _validate(*forms, softmax_scale, is_differentiated)
    module = choose(__package__, IMPLEMENTATIONS, problem, DeviceInfo.of(forms[0].device), impl)
    run: Callable[[Tensor, Tensor], Tensor] = module.prepare(problem, *forms, softmax_scale)
    return run


def _validate(
    q: Tensor | Form, k: Tensor | Form, softmax_scale: float, is_differentiated: bool
) -> Problem:
    """Check tensors or their forms, and the scale."""
    sizes = bind(q=(q, "batch num_heads q_len head_size"), k=(k, "batch num_heads k_len head_size"))
    check_dtype("q", q, *ALL_FLOATS)
    check_dtype("k", k, q.dtype)
    check_device("q", q.device, k=k)
    check_contiguous_rows(q=q, k=k)
    if sizes["head_size"] == 0:
        raise ShapeError("q has head_size=0, expected at least 1")
    if not math.isfinite(softmax_scale):
        raise ShapeError(f"softmax_scale is {softmax_scale}, expected a finite number, or None")
    return Problem(**sizes, dtype=q.dtype, needs_gradient=is_differentiated)

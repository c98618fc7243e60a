"""``attention_scores``: contract, checks, and the choice of an implementation."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ...device import DeviceInfo
from ...errors import ShapeError
from ...shapes import (
    Form,
    bind,
    check_contiguous_rows,
    check_device,
    check_dtype,
    check_tensors,
    form,
    guard,
)
from ...tiles.types import ALL_FLOATS
from ..attention_checks import default_scale, settle_scale
from ..dispatch import choose
from ..eager import (
    PLAIN_TYPES,
    autocast_type,
    call_uncompiled,
    check_readable,
    has_dispatch_observers,
    in_forward_mode,
    needs_gradient,
)
from . import reference
from .problem import Problem

FormFields = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
"""The type of a tensor's ``form``."""

IMPLEMENTATIONS = ("triton", "cpu", "reference")
"""The order in which ``impl="auto"`` tries implementations."""


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

    Examples:
        >>> q, k = torch.randn(2, 4, 12, 343, 16).unbind()
        >>> attention_scores(q, k, softmax_scale=0.25).shape
        torch.Size([4, 12, 343, 343])
    """
    if torch.compiler.is_compiling():
        if impl != "auto":
            return call_uncompiled(attention_scores, q, k, softmax_scale=softmax_scale, impl=impl)
    elif type(q) in PLAIN_TYPES and type(softmax_scale) is float and not q.is_nested:
        call = _calls.get((q.shape, softmax_scale, impl))
        if call is not None and call.matches(q, k):
            return call.run(q, k)
    return _find_and_run(q, k, softmax_scale, impl)


def _find_and_run(q: Tensor, k: Tensor, softmax_scale: float | None, impl: str) -> Tensor:
    """Validate and dispatch a call that no cached call matches, and run it."""
    check_tensors(q=q, k=k)
    given_q, given_k, dtype = q, k, autocast_type(q)
    if dtype is not None:
        q, k = (x.to(dtype) if x.dtype != torch.float64 else x for x in (q, k))
    scale = settle_scale(softmax_scale, default_scale(q))
    has_gradient = needs_gradient(q, k)
    if impl == "auto" and has_dispatch_observers(q, k):
        # The reference consists of torch operations, which every observer can record.
        return reference.run(_validate(q, k, has_gradient), q, k, scale)
    if q.is_neg() or k.is_neg() or torch._C._are_functorch_transforms_active():
        check_readable("attention_scores", q=q, k=k)
    call = _prepare(form(q), form(k), scale, has_gradient, impl)
    if q is given_q and k is given_k and not in_forward_mode():
        key = q.shape, scale, impl
        if _calls.get(key) is call:  # the second time in a row
            call.guard = guard(q, k)
        elif len(_calls) >= _MOST_CALLS:
            _calls.clear()
        _calls[key] = call
    return call.run(q, k)


class _CachedCall:
    """A validated form of call (shapes, strides, types, device) and the function that runs it."""

    __slots__ = ("guard", "run")

    def __init__(self, run: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.run = run
        self.guard: Callable[..., bool] | None = None
        """Set when a call repeats, so that calls that do not repeat are not slowed down."""

    def matches(self, q: Tensor, k: Tensor) -> bool:
        """Return whether a call has this form, and no observer or autograd mode is active."""
        is_like = self.guard is not None and self.guard(q, k)
        # The guard detects autocast and batched tensors, but not every mode.
        return is_like and not in_forward_mode() and not has_dispatch_observers()


_MOST_CALLS = 1024
_calls: dict[tuple[torch.Size, float, str], _CachedCall] = {}
"""The last call for each shape of ``q``, scale and ``impl``; most calls are found here."""


@functools.lru_cache(maxsize=1024)
def _prepare(
    q: FormFields, k: FormFields, softmax_scale: float, has_gradient: bool, impl: str
) -> _CachedCall:
    """Validate calls of these forms, choose an implementation, and cache its function."""
    forms = Form(*q), Form(*k)
    problem = _validate(*forms, has_gradient)
    module = choose(__package__, IMPLEMENTATIONS, problem, DeviceInfo.of(forms[0].device), impl)
    return _CachedCall(module.prepare(problem, *forms, softmax_scale))


def _validate(q: Tensor | Form, k: Tensor | Form, has_gradient: bool) -> Problem:
    """Check tensors or their forms, and return their problem."""
    sizes = bind(q=(q, "batch num_heads q_len head_size"), k=(k, "batch num_heads k_len head_size"))
    check_dtype("q", q, *ALL_FLOATS)
    check_dtype("k", k, q.dtype)
    check_device("q", q.device, k=k)
    check_contiguous_rows(q=q, k=k)
    if sizes["head_size"] == 0:
        raise ShapeError("q has head_size=0, expected at least 1")
    return Problem(**sizes, dtype=q.dtype, needs_gradient=has_gradient)

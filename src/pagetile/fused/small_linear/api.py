"""A linear layer of few rows, with the norm before it and the epilogue after it in one launch."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from ...device import DeviceInfo
from ...errors import ShapeError
from ...ops.dispatch import choose
from ...ops.eager import needs_gradient
from ...shapes import Form, check_device, form, is_dense
from ..gated_activation import ACTIVATIONS
from ..rms_norm import KINDS, Norm
from ..rows import check_name
from .problem import Problem

IMPLEMENTATIONS = ("cpu", "triton", "reference")
_IN_PARTS = ("triton", "reference")


def small_linear(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    activation: str = "",
    residual: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """``residual + activate(norm(x) @ weight.T + bias)``, each step rounded as torch rounds it.

    Args:
        x: ``[..., size]`` float32, float16 or bfloat16; up to 4 rows, of 16-bit types up to 64; on
            a CPU any number, of a multiple of 32 numbers.
        weight: ``[num_columns, size]``, of the same type and without gaps; with ``activation``
            ``[2 * num_columns, size]``, the rows of the gate first. Weight, bias and the norm's
            weight are read while the previous kernel still runs, so it must not write them.
        bias: ``[weight.shape[0]]``.
        norm: An RMS norm of ``x``, of up to 4 rows; of up to 64 by ``hopper``, of none by
            ``hopper_ring``.
        activation: ``""``, or one of ``gated_activation``'s: the result is then
            ``activation(gate) * up``.
        residual: ``[..., num_columns]``, added last.
        impl: ``auto``, ``cpu``, ``triton``, ``reference``, which alone has a gradient, or one that
            runs only if it is named, ``hopper`` or ``hopper_ring``. The last two take any number
            of rows. ``auto`` does not compare speeds: see ``is_faster``, ``is_faster_on_cpu`` for
            ``cpu``, ``is_resident`` for ``hopper`` and ``is_faster_in_ring`` for ``hopper_ring``.

    Returns:
        ``[..., num_columns]`` without gaps.

    Raises:
        ShapeError: Sizes disagree.
        UnsupportedError: The named ``impl`` cannot run this; the message says why.

    Examples:
        >>> import torch
        >>> x, weight = torch.ones(1, 3), torch.ones(2, 3)
        >>> small_linear(x, weight, residual=torch.tensor([[0.5, -3.0]]))
        tensor([[3.5000, 0.0000]])
    """
    is_learned = needs_gradient(*(t for t in (x, weight, bias, residual) if t is not None))
    forms = (None if t is None else form(t) for t in (x, weight, bias, residual))
    norm_form = None if norm is None else (form(norm.weight), norm.kind)
    names = (impl,) if impl in ("hopper", "hopper_ring") else IMPLEMENTATIONS
    module = _dispatch(*forms, norm_form, activation, is_learned, impl, names)
    out: Tensor = module.run(x, weight, bias, norm, activation, residual)
    return out


def partial_products(x: Tensor, weight: Tensor, *, impl: str = "auto") -> Tensor:
    """Split-K products whose sum over the first dimension is ``x @ weight.T``, for ``add_norm``.

    A product with few columns has too few programs for a GPU unless K is split, too.

    Args:
        x: ``[..., size]`` float16 or bfloat16, up to 64 rows; any number by ``hopper_ring``.
        weight: ``[num_columns, size]``, of the same type and without gaps. It is read while the
            previous kernel still runs, so that kernel must not write it.
        impl: ``auto``, ``triton``, ``reference``, which gives one part, or ``hopper_ring``, which
            runs only if it is named (``is_faster_in_parts_on_hopper``).

    Returns:
        Float32 ``[num_parts, ..., num_columns]``.

    Raises:
        ShapeError: Sizes disagree.
        UnsupportedError: The named ``impl`` cannot run this; the message says why.
    """
    is_learned = needs_gradient(x, weight)
    forms = form(x), form(weight), None, None
    names = ("hopper_ring",) if impl == "hopper_ring" else _IN_PARTS
    module = _dispatch(*forms, None, "", is_learned, impl, names)
    out: Tensor = module.run_parts(x, weight)
    return out


@functools.lru_cache(maxsize=1024)
def _dispatch(
    x: Any, weight: Any, bias: Any, residual: Any, norm: Any, activation: str, is_learned: bool,
    impl: str, names: tuple[str, ...],
) -> Any:  # fmt: skip
    """Check tensors of these forms, and choose the module of ``names`` that runs."""
    x, weight = Form(*x), Form(*weight)
    others = {"weight": weight}
    if activation:
        check_name("activation", activation, ACTIVATIONS)
    if len(weight.shape) != 2 or x.shape[-1:] != weight.shape[1:] or x.shape[-1] == 0:
        raise ShapeError(
            f"weight is {list(weight.shape)}, expected rows like those of x {list(x.shape)}"
        )
    num_columns, rest = divmod(weight.shape[0], 2 if activation else 1)
    if rest:
        raise ShapeError(f"weight has {weight.shape[0]} rows, expected as many of gate and of up")
    if bias is not None:
        others["bias"] = Form(*bias)
        if others["bias"].shape != weight.shape[:1]:
            raise ShapeError(f"bias is {list(bias[0])}, expected [{weight.shape[0]}]")
    if residual is not None:
        others["residual"] = Form(*residual)
        if others["residual"].shape != (*x.shape[:-1], num_columns):
            raise ShapeError(
                f"residual is {list(residual[0])}, expected {[*x.shape[:-1], num_columns]}"
            )
    if norm is not None:
        others["norm.weight"] = Form(*norm[0])
        check_name("kind", norm[1], KINDS)
        if others["norm.weight"].shape != x.shape[-1:]:
            raise ShapeError(f"norm.weight is {list(norm[0][0])}, expected [{x.shape[-1]}]")
    check_device("x", x.device, **others)
    problem = Problem(
        num_rows=x.shape[:-1].numel(),
        size=x.shape[-1],
        num_columns=num_columns,
        dtype=x.dtype,
        is_gated=bool(activation),
        has_norm=norm is not None,
        is_regular=all(
            other.dtype == x.dtype
            and is_dense(other.shape, other.strides, rows_apart=name == "residual")
            for name, other in others.items()
        )
        and is_dense(x.shape, x.strides, rows_apart=True),
        needs_gradient=is_learned,
    )
    return choose(__package__, names, problem, DeviceInfo.of(x.device), impl)

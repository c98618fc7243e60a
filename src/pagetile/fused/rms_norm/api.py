"""RMS norm as Transformers' models compute it, in one launch instead of eight."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch import Tensor

from ...device import DeviceInfo
from ...errors import ShapeError
from ...ops.dispatch import choose
from ...ops.eager import has_dispatch_observers, needs_gradient
from ...shapes import Form, check_device, forms
from ..rows import RowsProblem, check_name, fold

IMPLEMENTATIONS = ("cpu", "triton", "reference")

KINDS = ("rounded", "scaled", "shifted")
"""Kinds of weighting: Llama's rounds to the type of ``x`` and multiplies by ``weight``; gpt-oss's
multiplies and then rounds; Gemma's multiplies by ``1 + weight`` and then rounds."""


class Norm(NamedTuple):
    """The arguments of ``rms_norm`` beside ``x``: one norm of a model."""

    weight: Tensor
    eps: float
    kind: str


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float, kind: str = "rounded", impl: str = "auto"
) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension, computed in float32.

    Args:
        x: ``[..., size]`` float32, float16 or bfloat16, by any strides.
        weight: ``[size]``, of the same type.
        eps: Added to the mean of the squares.
        kind: One of ``KINDS``: when to round, and what to multiply by.
        impl: ``auto``, ``cpu``, ``triton`` or ``reference``, which alone has a gradient.

    Returns:
        Like ``x``, without gaps, its dimensions in the order of those of ``x`` in memory.

    Raises:
        ShapeError: ``weight`` is not one number for each of a row's.
        UnsupportedError: The named ``impl`` cannot run this; the message says why.

    Examples:
        >>> import torch
        >>> rms_norm(torch.full((2, 4), 3.0), torch.arange(4.0), eps=0.0)[1]
        tensor([0., 1., 2., 3.])
    """
    if impl == "auto" and has_dispatch_observers(x, weight):
        impl = "reference"
    module = _dispatch(*forms(x=x, weight=weight), needs_gradient(x, weight), kind, impl)
    out: Tensor = module.run(x, weight, eps, kind)
    return out


@functools.lru_cache(maxsize=1024)
def _dispatch(x: Any, weight: Any, is_learned: bool, kind: str, impl: str) -> Any:
    """Check tensors of these forms, and choose the module that runs."""
    x, weight = Form(*x), Form(*weight)
    check_name("kind", kind, KINDS)
    if x.shape[-1:] != weight.shape or not weight.shape:
        raise ShapeError(f"weight is {list(weight.shape)}, expected the last of x {list(x.shape)}")
    check_device("x", x.device, weight=weight)
    problem = RowsProblem(
        size=x.shape[-1],
        num_rows=x.shape[:-1].numel(),
        dtype=x.dtype,
        is_regular=fold(x.shape, x.strides) is not None,
        needs_gradient=is_learned,
        norm_dtypes=(weight.dtype,),
    )
    return choose(__package__, IMPLEMENTATIONS, problem, DeviceInfo.of(x.device), impl)

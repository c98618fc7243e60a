"""SwiGLU, GeGLU and their like: ``activation(gate) * up`` of one product's two halves."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from ...device import DeviceInfo
from ...errors import ShapeError
from ...ops.dispatch import choose
from ...ops.eager import needs_gradient
from ...shapes import Form, form, is_dense
from ..rows import RowsProblem, check_name

IMPLEMENTATIONS = ("cpu", "triton", "reference")

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")
"""``gelu`` is exact, by the error function."""


def gated_activation(gate_up: Tensor, activation: str, *, impl: str = "auto") -> Tensor:
    """``activation(gate) * up``, the activation rounded to the type before it is multiplied.

    Args:
        gate_up: ``[..., 2 * size]`` float32, float16 or bfloat16: the gate, then the other.
        activation: One of ``ACTIVATIONS``.
        impl: ``auto``, ``cpu``, ``triton`` or ``reference``, which alone has a gradient.

    Returns:
        ``[..., size]`` without gaps.

    Raises:
        ShapeError: A row has an odd number of numbers.
        UnsupportedError: The named ``impl`` cannot run this; the message says why.

    Examples:
        >>> import torch
        >>> gated_activation(torch.tensor([[-1.0, 2.0, 10.0, 10.0]]), "relu")
        tensor([[ 0., 20.]])
    """
    module = _dispatch(form(gate_up), activation, needs_gradient(gate_up), impl)
    out: Tensor = module.run(gate_up, activation)
    return out


@functools.lru_cache(maxsize=1024)
def _dispatch(gate_up: Any, activation: str, is_learned: bool, impl: str) -> Any:
    """Check a tensor of this form, and choose the module that runs."""
    gate_up = Form(*gate_up)
    check_name("activation", activation, ACTIVATIONS)
    if not gate_up.shape or gate_up.shape[-1] % 2:
        raise ShapeError(f"gate_up is {list(gate_up.shape)}, expected an even last dimension")
    problem = RowsProblem(
        size=gate_up.shape[-1] // 2,
        num_rows=gate_up.shape[:-1].numel(),
        dtype=gate_up.dtype,
        is_regular=is_dense(gate_up.shape, gate_up.strides),
        needs_gradient=is_learned,
    )
    return choose(__package__, IMPLEMENTATIONS, problem, DeviceInfo.of(gate_up.device), impl)

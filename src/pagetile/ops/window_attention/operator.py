"""Window attention as a torch operator, with a fake implementation and a gradient.

``torch.compile`` and ``torch.export`` see one node, checkpointing may recompute it, and between
forward and backward only the inputs, the output and its log-sum-exp are kept. Plain eager code
bypasses the operator (``ops/eager``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...device import DeviceInfo
from ..dispatch import choose
from ..eager import (
    align_saved,
    check_readable,
    choose_gradient,
    has_dispatch_observers,
    make_calls,
    refuse_second_derivative,
    refuse_tangents,
)
from .checks import check, check_values
from .problem import Gradients, Operands, Problem, empty_like

IMPLEMENTATIONS = ("cpu", "hopper", "triton", "reference")
"""The order in which ``impl="auto"`` tries implementations."""

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias_table, Tensor? rel_offsets, Tensor? bias, "
    "Tensor? regions, Tensor? mask, Tensor? logit_scale, float mask_value, float softmax_scale, "
    "float qk_norm_eps, str impl"
)
_LEARNED = ("q", "k", "v", "bias_table", "bias", "logit_scale")


def operands(*inputs: Any) -> Operands:
    """The operator's inputs by name, without the last one, ``impl``."""
    return Operands(*inputs[:-1])


def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)``."""
    refuse_tangents("window_attention", *inputs)
    if has_dispatch_observers(*inputs):
        check(operands(*inputs))  # checked here so that errors do not come from inside a compiler
        out, lse = _operator_call(*inputs)
    else:
        out, lse = _function(*inputs)
    return out, lse


def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    x = operands(*inputs)
    problem, module = _choose(x, inputs[-1])
    try:
        out, lse = module.forward(problem, x)
    except RuntimeError:
        check_readable("window_attention", q=x.q, k=x.k, v=x.v)
        raise
    return _lay_out(out), lse.contiguous()


def _backward(*inputs: Any) -> tuple[Tensor, ...]:
    """Gradients in the order of ``_LEARNED``; empty tensors for inputs that were not given.

    The number of results is fixed, because batching rules do not support lists.
    """
    *call, out, lse, dout, dlse = inputs
    x = operands(*call)
    # Hooks on saved tensors may change strides, too.
    out, lse = align_saved(_lay_out(out)), lse.contiguous()
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    problem, module = _choose(x, call[-1])
    gradients: Gradients = module.backward(problem, x, out, lse, dout, dlse)
    rows = (_lay_out(gradient) for gradient in (gradients.q, gradients.k, gradients.v))
    learned = (gradients.bias_table, gradients.bias, gradients.logit_scale)
    others = (lse.new_empty(0) if found is None else found.contiguous() for found in learned)
    return *rows, *others


_operator = torch.library.custom_op(
    "pagetile::window_attention",
    _forward,
    mutates_args=(),
    schema=f"({_INPUTS}) -> (Tensor out, Tensor lse)",
)
_operator_backward = torch.library.custom_op(
    "pagetile::window_attention_backward",
    _backward,
    mutates_args=(),
    schema=f"({_INPUTS}, Tensor out, Tensor lse, Tensor dout, Tensor? dlse) -> ("
    + ", ".join(f"Tensor d_{name}" for name in _LEARNED)
    + ")",
)


@_operator.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    q = inputs[0]
    wide = torch.promote_types(q.dtype, torch.float32)
    return empty_like(q), q.new_empty(q.shape[:3], dtype=wide)


@_operator_backward.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    x = operands(*inputs[:-4])
    learned = (x.bias_table, x.bias, x.logit_scale)
    lse = inputs[-3]
    return (
        *(empty_like(x.q) for _ in range(3)),
        *(
            lse.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)
            for tensor in learned
        ),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors = [value if isinstance(value, Tensor) else None for value in inputs]
    ctx.save_for_backward(*tensors, *output)
    ctx.constants = [None if isinstance(value, Tensor) else value for value in inputs]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: a checkpoint recomputes on every access
    *tensors, out, lse = saved
    backward = choose_gradient(_backward, _backward_call, dout, dlse, *saved)
    inputs = [
        constant if tensor is None else tensor
        for tensor, constant in zip(tensors, ctx.constants, strict=True)
    ]
    if dout is None:
        dout = torch.zeros_like(out)
    found = zip(_LEARNED, backward(*inputs, out, lse, dout, dlse), strict=True)
    x = operands(*inputs)
    gradients = {name: gradient for name, gradient in found if getattr(x, name) is not None}
    return *(gradients.get(name) for name in Operands.__dataclass_fields__), None


_backward_call = refuse_second_derivative(_operator_backward)
_function, _operator_call = make_calls(
    "WindowAttention", _forward, _operator, _setup_context, _differentiate
)


def _choose(x: Operands, impl: str) -> tuple[Problem, Any]:
    problem = check(x)
    check_values(x)
    assert __package__ is not None
    device = DeviceInfo.of(x.q.device)
    return problem, choose(__package__, IMPLEMENTATIONS, problem, device, impl)


def _lay_out(result: Tensor) -> Tensor:
    """Return ``result`` with the strides of ``empty_like``, as the fake implementation promises."""
    by_token = result.transpose(1, 2)
    return result if by_token.is_contiguous() else by_token.contiguous().transpose(1, 2)

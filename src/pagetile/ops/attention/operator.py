"""The custom operator ``pagetile::attention``, with a fake implementation and a gradient.

A compiler traces it as one node. It saves its arguments, ``out`` and ``lse`` for the backward pass;
the scores are computed again. Plain eager code bypasses the operator (``ops/eager``).
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
    without_autocast,
)
from .block_mask import BlockMask
from .checks import check, check_starts
from .problem import Lengths, Options, Problem

IMPLEMENTATIONS = ("hopper", "triton", "cpu", "reference")
"""The order in which ``impl="auto"`` tries implementations."""

BACKWARD = {
    "hopper": ("hopper_backward", "triton_backward"),
    "triton": ("triton_backward",),
    "cpu": ("cpu_backward",),
    "reference": ("reference",),
}
"""Implementations of the gradients, for each one of the forward pass, in the order of trial."""

NONDETERMINISTIC = {"hopper_backward"}
"""Implementations with atomics, skipped under ``torch.use_deterministic_algorithms``."""

Rows = tuple[Tensor, Tensor, Tensor]


def attend(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Return ``out`` and ``lse``, by the operator only under tracing and compilers."""
    refuse_tangents("attention", *inputs)
    out, lse = (_operator_call if has_dispatch_observers(*inputs) else _function)(*inputs)
    return out, lse


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? alibi_slopes, Tensor? sinks, Tensor? block_mask, SymInt? max_query_len, "
    "SymInt? max_seq_len, float softmax_scale, bool causal, SymInt? sliding_window, "
    "float? logits_soft_cap, int block_q, int block_k, str impl"
)
_NUM_TENSORS = 8  # of the inputs, which come first
_SINKS = 6  # their place among them


def _read(*inputs: Any) -> tuple[Rows, Lengths, Options]:
    """The operator's inputs by name; the last, ``impl``, chooses the implementation."""
    q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, mask, *numbers, _ = inputs
    max_query_len, max_seq_len, softmax_scale, causal, sliding_window, *numbers = numbers
    logits_soft_cap, block_q, block_k = numbers
    block_mask = None if mask is None else BlockMask(mask, block_q, block_k)
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_query_len, max_seq_len)
    options = Options(
        softmax_scale, causal, sliding_window, logits_soft_cap, alibi_slopes, sinks, block_mask
    )  # fmt: skip
    return (q, k, v), lengths, options


def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    rows, lengths, options = _read(*inputs)
    q, k, v = rows
    problem = check(*rows, lengths, options)
    check_starts(problem, q, k, lengths)
    device = DeviceInfo.of(q.device)
    module = choose(__package__, IMPLEMENTATIONS, problem, device, inputs[-1])
    try:
        with without_autocast(q):
            out, lse = module.run(problem, *rows, lengths, options)
    except RuntimeError:
        check_readable("attention", q=q, k=k, v=v)
        raise
    return out, lse


_operator: Any = torch.library.custom_op(
    "pagetile::attention", _forward, mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)"
)


@_operator.register_fake  # type: ignore[untyped-decorator]
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    rows, lengths, options = _read(*inputs)
    problem = check(*rows, lengths, options)
    q = rows[0]
    out = q.new_empty(*q.shape[:-1], problem.v_head_size)
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


def _backward(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, *inputs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``q``, ``k`` and ``v``."""
    rows, lengths, options = _read(*inputs)
    problem = check(*rows, lengths, options)
    device = DeviceInfo.of(d_out.device)
    module = _choose_backward(problem, device, inputs[-1])
    if d_out.stride(-1) != 1:
        d_out = d_out.contiguous()
    with without_autocast(d_out):
        saved = align_saved(out), align_saved(lse)
        d_q, d_k, d_v = module.run_backward(problem, d_out, d_lse, *rows, *saved, lengths, options)
    return d_q, d_k, d_v


def _choose_backward(problem: Problem, device: DeviceInfo, impl: str) -> Any:
    """The module of the gradients; see ``choose``."""
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    names = [
        name
        for forward in (IMPLEMENTATIONS if impl == "auto" else (impl,))
        for name in BACKWARD[forward]
        if not (is_deterministic and name in NONDETERMINISTIC)
    ]
    names = list(dict.fromkeys(names))
    named = names[0] if len(names) == 1 else "auto"
    return choose(__package__, tuple(names), problem, device, named)


_operator_backward: Any = torch.library.custom_op(
    "pagetile::attention_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor d_out, Tensor? d_lse, Tensor out, Tensor lse, {_INPUTS}) -> "
    "(Tensor, Tensor, Tensor)",
)


@_operator_backward.register_fake  # type: ignore[untyped-decorator]
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (rows.new_empty(rows.shape) for rows in inputs[4:7])
    return q, k, v


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:_NUM_TENSORS])
    ctx.options = inputs[_NUM_TENSORS:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: a checkpoint recomputes on every access
    out, lse, q, k, v, *others = saved
    backward = choose_gradient(_backward, _backward_call, d_out, d_lse, *saved)
    if d_out is None:
        d_out = torch.zeros_like(out)
    d_qkv = backward(d_out, d_lse, out, lse, q, k, v, *others, *ctx.options)
    sinks, d_sinks = others[_SINKS - 3], None
    if sinks is not None and ctx.needs_input_grad[_SINKS]:
        d_sinks = _differentiate_sinks(sinks, d_out, d_lse, out, lse)
    rest = (None,) * (_NUM_TENSORS - _SINKS - 1 + len(ctx.options))
    return *d_qkv, None, None, None, d_sinks, *rest


def _differentiate_sinks(
    sinks: Tensor, d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor
) -> Tensor:
    """Return the gradient of the sinks, each a logit without a value in every row's softmax."""
    dtype = torch.promote_types(out.dtype, torch.float32)
    mean = (d_out.to(dtype) * out.to(dtype)).sum(dim=-1)
    if d_lse is not None:
        mean = mean - d_lse
    # Rows without a key and with a sink of -inf have no share in it, but -inf - -inf is no number.
    share = torch.exp(sinks.to(dtype) - lse.to(dtype).masked_fill(lse == -torch.inf, torch.inf))
    return -(share * mean).flatten(0, -2).sum(dim=0).to(sinks.dtype)


_backward_call = refuse_second_derivative(_operator_backward)
_function, _operator_call = make_calls("Attention", _forward, _operator, _remember, _differentiate)

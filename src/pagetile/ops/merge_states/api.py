"""``merge_states``: contract, checks, and the choice of an implementation."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...device import DeviceInfo
from ...shapes import Form, bind, check_device, check_dtype, forms
from ...tiles.state import AttentionOutput
from ...tiles.types import ALL_FLOATS
from ..dispatch import choose
from ..eager import call_uncompiled, check_readable, needs_gradient, needs_operator
from . import reference
from .problem import Problem

IMPLEMENTATIONS = ("triton", "cpu", "reference")


def merge_states(outs: Tensor, lses: Tensor, *, impl: str = "auto") -> AttentionOutput:
    """Attention over the union of disjoint sets of keys, from attention over each.

        lse = log Σᵢ exp(lseᵢ)        out = Σᵢ exp(lseᵢ - lse) outᵢ

    The same rows of queries attended over each set: a shared prefix and a suffix, the splits of a
    long sequence, the shards of a cache. Associative and commutative up to rounding. A state that
    saw no key (``lse`` -inf) vanishes, whatever its ``out`` holds. Gradients are the reference's.

    Args:
        outs: ``[num_states, num_tokens, num_heads, v_head_size]`` float32, float16 or bfloat16.
        lses: ``[num_states, num_tokens, num_heads]`` float32, natural logarithms.
        impl: ``"auto"``, or one of ``"triton"``, ``"cpu"``, ``"reference"``.

    Returns:
        ``AttentionOutput(out, lse)`` without the first dimension, ``out`` in the type of ``outs``.

    Raises:
        ShapeError: Sizes disagree; the message names both arguments.
        DTypeError: ``lses`` is not float32, or ``outs`` is not floating.
        UnsupportedError: The named ``impl`` cannot run this; the message says why.

    Examples:
        >>> outs, lses = torch.randn(2, 5, 8, 64), torch.randn(2, 5, 8)
        >>> merged = merge_states(outs, lses)
        >>> torch.allclose(merged.lse, lses.logsumexp(0), atol=1e-6)
        True
    """
    if torch.compiler.is_compiling():
        if impl != "auto":
            return call_uncompiled(merge_states, outs, lses, impl=impl)
        return reference.run(outs, lses)  # torch operations, which observers can record
    module = _dispatch(*forms(outs=outs, lses=lses), needs_gradient(outs, lses), impl)
    is_observed = needs_operator(outs) or torch._C._are_functorch_transforms_active()
    if impl == "auto" and is_observed:
        module = reference  # of torch's operations, which every observer can record
    try:
        result: AttentionOutput = module.run(outs, lses)
    except RuntimeError:
        check_readable("merge_states", outs=outs, lses=lses)
        raise
    return result


@functools.lru_cache(maxsize=1024)
def _dispatch(outs: Any, lses: Any, is_learned: bool, impl: str) -> Any:
    """Check tensors of these forms, and choose the module that merges them."""
    outs, lses = Form(*outs), Form(*lses)
    bind(
        outs=(outs, "num_states num_tokens num_heads v_head_size"),
        lses=(lses, "num_states num_tokens num_heads"),
    )
    check_dtype("outs", outs, *ALL_FLOATS)
    check_dtype("lses", lses, torch.float32)
    check_device("outs", outs.device, lses=lses)
    problem = Problem(outs.dtype, is_learned)
    return choose(__package__, IMPLEMENTATIONS, problem, DeviceInfo.of(outs.device), impl)

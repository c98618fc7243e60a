"""``window_attention``: contract and defaults."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...device import DeviceInfo
from ...errors import DTypeError, ShapeError, plural
from ...shapes import check_tensors, given
from ...tiles.state import AttentionOutput
from ..attention_checks import as_number, default_scale, settle_scale
from ..dispatch import explain
from ..eager import autocast_type
from . import operator
from .checks import check
from .problem import Operands


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias_table: Tensor | None = None,
    rel_offsets: Tensor | None = None,
    bias: Tensor | None = None,
    regions: Tensor | None = None,
    mask: Tensor | None = None,
    mask_value: float = -100.0,
    softmax_scale: float | None = None,
    logit_scale: Tensor | None = None,
    qk_norm_eps: float = 1e-12,
    impl: str = "auto",
) -> AttentionOutput:
    """Attention of every token over the tokens of its window, as in Swin transformers.

        s[i, j] = scale · q[i]·k[j] + bias_table[u[i] - u[j] + centre] + (0 or mask_value)
        out[i]  = softmax(s[i]) · v

    with ``u = rel_offsets``, ``centre = (table_size - 1) / 2``, and ``mask_value`` where the
    regions of i and j differ. It never builds an N × N index or an N × N mask, and keeps only its
    arguments, the output and the log-sum-exp for the backward pass. With ``logit_scale`` it is
    Swin v2's attention: q and k are divided by ``max(norm, qk_norm_eps)``, and
    ``scale = softmax_scale · exp(min(logit_scale, log 100))``.

    Gradients reach q, k, v, ``bias_table``, ``bias`` and ``logit_scale``. Sums are float32 in a
    fixed order, so two runs give the same bits. Under autocast q, k and v are cast to its element
    type; learned parameters are not cast.

    Args:
        q: ``[num_windows, num_heads, num_tokens, head_size]`` float32, float16 or bfloat16. Last
            dimension contiguous; other strides are free, so
            ``qkv.unflatten(-1, (3, num_heads, head_size)).permute(2, 0, 3, 1, 4)`` works.
            Windows are ordered image by image. Scores of float16 inputs may be float16, as in
            eager code: they should stay below 65 504 before ``softmax_scale`` and below 45 000
            after it. Gradients are inf or NaN, which ``torch.amp.GradScaler`` detects, where
            ``dout·v`` or the gradient of ``lse`` exceeds 65 504.
        k: Like ``q``.
        v: Like ``q``.
        bias_table: ``[table_size, num_heads]``, floating, ``table_size = prod(2·w - 1)`` over the
            axes of the window. Swin v2's continuous bias is such a table as well: its network's
            output for every offset.
        rel_offsets: int32 ``[num_tokens]``, from the function of that name.
        bias: Instead of a table, ``[num_heads, num_tokens, num_tokens]``, or
            ``[num_biases, num_heads, num_tokens, num_tokens]``, where window ``w`` takes number
            ``w % num_biases``.
        regions: Integers ``[num_masks, num_tokens]``, from ``shift_regions``; window ``w`` takes
            ``w % num_masks``.
        mask: Instead of regions, ``[num_masks, num_tokens, num_tokens]``: floating, added to the
            scores, or bool, where False adds ``mask_value``. It has no gradient. Numbers of a mask
            or bias below -2.3e38, such as ``torch.finfo(torch.float32).min``, count as -inf: a row
            with no other keys gives 0, where torch's ``scaled_dot_product_attention`` gives the
            mean of ``v``. Larger ones are finite: a row that is masked throughout attends to all
            keys, by what rounding leaves of their scores. 16-bit calls on a GPU keep a bias as
            float16 and may bound it, to ±3 700 at the least.
        mask_value: Added to scores between regions. Every Swin uses -100 and not -inf, so that
            large scores can outweigh it.
        softmax_scale: Multiplies ``q·k``. ``None`` is ``head_size ** -0.5``, or 1 with
            ``logit_scale``.
        logit_scale: ``[num_heads]`` or ``[num_heads, 1, 1]``, the logarithm of Swin v2's scale.
        qk_norm_eps: Smallest norm that q and k are divided by.
        impl: ``"auto"``, or one of ``"cpu"``, ``"triton"``, ``"hopper"``, ``"reference"``: a named
            implementation runs or raises.

    Returns:
        ``AttentionOutput(out, lse)``; ``out`` like ``q``, with the heads of a token contiguous, so
        that ``out.transpose(1, 2).flatten(2)`` is a view; ``lse`` float32
        ``[num_windows, num_heads, num_tokens]``, natural logarithm (float64 for float64).

    Raises:
        ShapeError: Sizes disagree; the message names the arguments.
        DTypeError: An argument has an element type that it does not take.
        UnsupportedError: The named ``impl`` cannot run this; the message says why.

    Examples:
        >>> import pagetile
        >>> q, k, v = torch.randn(3, 8, 3, 27, 16)  # 8 windows of 3 × 3 × 3
        >>> result = window_attention(
        ...     q, k, v,
        ...     bias_table=torch.randn(5 * 5 * 5, 3, requires_grad=True),
        ...     rel_offsets=pagetile.rel_offsets((3, 3, 3)),
        ...     regions=pagetile.shift_regions((6, 6, 6), (3, 3, 3), (1, 1, 1)),
        ... )
        >>> result.out.shape
        torch.Size([8, 3, 27, 16])
    """
    x = _operands(
        q, k, v, bias_table, rel_offsets, bias, regions, mask, mask_value, softmax_scale,
        logit_scale, qk_norm_eps,
    )  # fmt: skip
    if not isinstance(impl, str):
        raise DTypeError(f"impl is {impl!r}, expected a string: 'auto' or an implementation's name")
    inputs = (getattr(x, name) for name in Operands.__dataclass_fields__)
    return AttentionOutput(*operator.forward(*inputs, impl))


def explain_window_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str:
    """Return which implementations can run a call, one a line, in the order of ``impl="auto"``.

    Args:
        q: As for ``window_attention``.
        k: As for ``window_attention``.
        v: As for ``window_attention``.
        **options: The keyword arguments of ``window_attention``; ``impl`` is ignored.

    Examples:
        >>> q = torch.zeros(4, 3, 49, 32, dtype=torch.float64)
        >>> print(explain_window_attention(q, q, q))
        cpu: no, q is float64; float32, float16 and bfloat16 run
        hopper: no, the tensors are on cpu
        triton: no, the tensors are on cpu
        reference: yes
    """
    options.pop("impl", None)
    x = _operands(q, k, v, **options)
    assert __package__ is not None
    return explain(__package__, operator.IMPLEMENTATIONS, check(x), DeviceInfo.of(q.device))


def _operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias_table: Tensor | None = None,
    rel_offsets: Tensor | None = None,
    bias: Tensor | None = None,
    regions: Tensor | None = None,
    mask: Tensor | None = None,
    mask_value: float = -100.0,
    softmax_scale: float | None = None,
    logit_scale: Tensor | None = None,
    qk_norm_eps: float = 1e-12,
) -> Operands:
    """Fill in defaults and bring arguments to their full shapes."""
    biases = given(bias_table=bias_table, rel_offsets=rel_offsets, bias=bias)
    others = given(regions=regions, mask=mask, logit_scale=logit_scale)
    check_tensors(q=q, k=k, v=v, **biases, **others)
    dtype = autocast_type(q)
    if dtype is not None and q.dtype != torch.float64:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    scale = settle_scale(softmax_scale, default_scale(q) if logit_scale is None else 1.0)
    mask_value = as_number("mask_value", mask_value)
    if not torch.compiler.is_compiling() and math.isnan(mask_value):
        raise ShapeError("mask_value is nan, expected a number: -100.0 in every Swin")
    qk_norm_eps = as_number("qk_norm_eps", qk_norm_eps)
    if not 0 < qk_norm_eps < math.inf:
        raise ShapeError(f"qk_norm_eps is {qk_norm_eps}, expected a finite number more than 0")
    if logit_scale is not None and logit_scale.shape[1:] == (1, 1):
        logit_scale = logit_scale.flatten()
    if bias is not None and bias.dim() not in (3, 4):
        raise ShapeError(
            f"bias has {plural(bias.dim(), 'dimension')} {list(bias.shape)}, expected 3 or 4: "
            "[num_heads num_tokens num_tokens], or one for each of num_biases windows"
        )
    if bias is not None and bias.dim() == 3:
        bias = bias[None]
    return Operands(
        q, k, v, bias_table, rel_offsets, bias, regions, mask, logit_scale,
        mask_value, scale, qk_norm_eps,
    )  # fmt: skip

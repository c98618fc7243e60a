"""Window attention over a whole map, which is padded, rolled and partitioned by one index.

There are two copies: a row of q, k and v for each place of the windows, and a row of the result for
each token. In the first layer of Swin UNETR at 96³ (48³ tokens, 3 heads of 16, bfloat16) they move
66 + 21 MB and take 30 of a call's 180 µs on an H200; padding, rolling and cutting took 455 µs.

A kernel that reads through the index would save these copies. But all kernels here address a
window's rows by one stride, and on a map only 7 tokens in a row are adjacent. Every kernel would
need a second way to load rows and a third to store gradients, to save a sixth of calls that are a
twentieth of a training step.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import ShapeError, plural
from ...shapes import bind, check_device, check_dtype, check_tensors, given
from ...tiles.state import AttentionOutput
from ...tiles.types import ALL_FLOATS
from ..eager import autocast_type, refuse_tangents
from .api import window_attention
from .geometry import as_sizes
from .layout import from_heads, layout, to_heads


def shifted_window_attention(
    qkv: Tensor,
    *,
    window: Sequence[int],
    shift: Sequence[int] | None = None,
    padding: Tensor | None = None,
    bias_table: Tensor | None = None,
    rel_offsets: Tensor | None = None,
    mask_value: float = -100.0,
    softmax_scale: float | None = None,
    logit_scale: Tensor | None = None,
    qk_norm_eps: float = 1e-12,
    impl: str = "auto",
) -> AttentionOutput:
    """Run ``window_attention`` on a whole map: all between a Swin's qkv layer and its projection.

    Equals padding the map at the end of each axis to whole windows, rolling it by ``-shift``,
    cutting it, attending with the regions of ``shift_regions``, and undoing these steps, with two
    copies in each direction instead of six.

    An axis that is no longer than the window is clamped, as MONAI does it: the window ends with
    the axis, and is not shifted along it. (torchvision pads such an axis to the window: pad the
    map before the call.)

    Gradients reach ``qkv``, ``padding``, ``bias_table`` and ``logit_scale``; two runs give the
    same bits. Under autocast ``qkv`` takes its element type.

    Args:
        qkv: ``[batch, *grid, 3, num_heads, head_size]`` float32, float16 or bfloat16, by any
            strides, and a grid of any number of axes: a linear layer's
            ``qkv(x).unflatten(-1, (3, num_heads, head_size))``.
        window: Tokens along each axis of the grid.
        shift: How far the windows are shifted along each axis. ``None``: not at all.
        padding: ``[3, num_heads, head_size]``, floating: q, k and v of padded tokens, which attend
            and are attended to like all others. Models pad with zeros before the linear layer, so
            this is the layer's ``bias.view(3, num_heads, head_size)``. ``None``: zeros.
        bias_table: ``[prod(2·w - 1), num_heads]`` over the axes of ``window``, floating.
        rel_offsets: int32 ``[num_tokens]`` of a clamped window. ``None``: the first ones of
            ``window``'s, with which MONAI's checkpoints were trained. The true ones of a window
            ``w`` that was clamped are ``rel_offsets(w, table_window=window)``.
        mask_value: As for ``window_attention``.
        softmax_scale: As for ``window_attention``.
        logit_scale: As for ``window_attention``.
        qk_norm_eps: As for ``window_attention``.
        impl: As for ``window_attention``.

    Returns:
        ``AttentionOutput(out, lse)``; ``out`` ``[batch, *grid, num_heads, head_size]``,
        contiguous, so that ``out.flatten(-2)`` is free; ``lse`` float32
        ``[batch, *grid, num_heads]``.

    Raises:
        ShapeError: Sizes disagree; the message names the arguments.
        DTypeError: An argument has an element type that it does not take.
        UnsupportedError: The named ``impl`` cannot run this; the message says why.

    Examples:
        >>> x, linear = torch.randn(1, 10, 9, 12, 48), torch.nn.Linear(48, 3 * 48)
        >>> result = shifted_window_attention(
        ...     linear(x).unflatten(-1, (3, 6, 8)),
        ...     window=(4, 4, 4),
        ...     shift=(2, 2, 2),
        ...     padding=linear.bias.view(3, 6, 8),
        ...     bias_table=torch.zeros(7 * 7 * 7, 6),
        ... )
        >>> result.out.flatten(-2).shape
        torch.Size([1, 10, 9, 12, 48])
    """
    window = as_sizes("window", window)
    shift = (0,) * len(window) if shift is None else as_sizes("shift", shift, least=0)
    _check(qkv, len(window), padding)
    # A layout needs plain integers, so compiled code is specialised to the size of the map.
    grid = tuple(operator.index(size) for size in qkv.shape[1 : 1 + len(window)])
    map_layout = layout(grid, window, shift, qkv.device)
    refuse_tangents("shifted_window_attention", qkv, padding)
    dtype = autocast_type(qkv)
    if dtype is not None and qkv.dtype != torch.float64:
        qkv = qkv.to(dtype)
    if bias_table is not None and rel_offsets is None:
        _check_table(bias_table, window)
        rel_offsets = map_layout.offsets
    result = window_attention(
        *to_heads(qkv, map_layout, padding),
        bias_table=bias_table,
        rel_offsets=rel_offsets,
        regions=map_layout.regions,
        mask_value=mask_value,
        softmax_scale=softmax_scale,
        logit_scale=logit_scale,
        qk_norm_eps=qk_norm_eps,
        impl=impl,
    )
    return AttentionOutput(*(from_heads(part, map_layout) for part in result))


def _check_table(bias_table: Tensor, window: tuple[int, ...]) -> None:
    check_tensors(bias_table=bias_table)
    num_rows = math.prod([2 * length - 1 for length in window])
    if bias_table.dim() and bias_table.shape[0] != num_rows:
        raise ShapeError(
            f"bias_table has {bias_table.shape[0]} rows, expected {num_rows} for "
            f"window={list(window)}; one of another window needs rel_offsets=rel_offsets(window, "
            "table_window)"
        )


def _check(qkv: Tensor, axes: int, padding: Tensor | None) -> None:
    check_tensors(qkv=qkv, **given(padding=padding))
    if qkv.dim() != axes + 4:
        raise ShapeError(
            f"qkv has {plural(qkv.dim(), 'dimension')} {list(qkv.shape)}, expected {axes + 4} for "
            f"a window of {axes} axes: [batch, *grid, 3, num_heads, head_size]"
        )
    if qkv.shape[-3] != 3:
        raise ShapeError(
            f"qkv has {qkv.shape[-3]} in front of its heads, expected 3, for q, k and v: its shape "
            f"is {list(qkv.shape)}: [batch, *grid, 3, num_heads, head_size]"
        )
    names = " ".join(f"axis_{axis}" for axis in range(axes))
    bind(
        qkv=(qkv, f"batch {names} three num_heads head_size"),
        padding=(padding, "three num_heads head_size"),
    )
    check_dtype("qkv", qkv, *ALL_FLOATS)
    if padding is not None:
        check_dtype("padding", padding, *ALL_FLOATS)
        check_device("qkv", qkv.device, padding=padding)

"""Replacements for torchvision's Swin v1 and v2 and Video Swin, whose attentions take the map."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models import swin_transformer
from torchvision.models.video import swin_transformer as video_swin_transformer

from ..attend import attend_packed, continuous_bias, offsets
from ..report import heads, times
from ..swapped import Randn, SwappedAttention, Swaps


class ShiftedWindowAttention(SwappedAttention, swin_transformer.ShiftedWindowAttention):
    """Pads, shifts and cuts the map as the original does, with region ids instead of a mask."""

    original = swin_transformer.ShiftedWindowAttention

    def forward(self, x: Tensor) -> Tensor:
        """``x`` ``[batch, height, width, dim]``."""
        if self.needs_original(x):
            return self.original.forward(self, x)
        window, table = tuple(self.window_size), self.relative_position_bias_table
        return _attend_map(self, x, window, self.qkv.bias, bias_table=table)

    @staticmethod
    def variant(module: Any) -> str:
        version = "v2" if hasattr(module, "logit_scale") else "v1"
        size, shift = times(module.window_size), times(module.shift_size)
        return f"torchvision {version}, window {size}, shift {shift}"

    @staticmethod
    def width(module: Any) -> str:
        return heads(module.proj.in_features, module.num_heads)

    @staticmethod
    def weight_dropout(module: Any) -> float:
        return float(module.attention_dropout)

    @staticmethod
    def trial(module: Any, randn: Randn) -> Tensor:
        height, width = module.window_size
        dim = module.proj.in_features
        result: Tensor = module(randn(1, 2 * height - 1, max(1, width - 1), dim))
        return result


class ShiftedWindowAttentionV2(SwappedAttention, swin_transformer.ShiftedWindowAttentionV2):
    """Cosine attention whose keys have no bias: their third of the parameter is taken as zero."""

    original = swin_transformer.ShiftedWindowAttentionV2
    variant = staticmethod(ShiftedWindowAttention.variant)
    width = staticmethod(ShiftedWindowAttention.width)
    weight_dropout = staticmethod(ShiftedWindowAttention.weight_dropout)
    trial = staticmethod(ShiftedWindowAttention.trial)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` ``[batch, height, width, dim]``."""
        if self.needs_original(x):
            return self.original.forward(self, x)
        bias = self.qkv.bias
        if bias is not None:
            q, k, v = bias.chunk(3)
            bias = torch.cat((q, torch.zeros_like(k), v))
        table = continuous_bias(self.cpb_mlp, self.relative_coords_table)
        window, scale = tuple(self.window_size), self.logit_scale
        return _attend_map(self, x, window, bias, bias_table=table, logit_scale=scale)


class ShiftedWindowAttention3d(SwappedAttention, video_swin_transformer.ShiftedWindowAttention3d):
    """Video Swin. Windows are clamped to a small map as MONAI's are, with the first offsets."""

    original = video_swin_transformer.ShiftedWindowAttention3d
    width = staticmethod(ShiftedWindowAttention.width)
    weight_dropout = staticmethod(ShiftedWindowAttention.weight_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` ``[batch, frames, height, width, dim]``."""
        if self.needs_original(x):
            return self.original.forward(self, x)
        window = tuple(map(min, self.window_size, x.shape[1:-1]))
        table = self.relative_position_bias_table
        return _attend_map(self, x, window, self.qkv.bias, bias_table=table)

    @staticmethod
    def variant(module: Any) -> str:
        size, shift = times(module.window_size), times(module.shift_size)
        return f"torchvision video, window {size}, shift {shift}"

    @staticmethod
    def trial(module: Any, randn: Randn) -> Tensor:
        first, *others = module.window_size
        grid = (2 * first - 1, *(max(1, length - 1) for length in others))
        result: Tensor = module(randn(1, *grid, module.proj.in_features))
        return result


def _attend_map(
    module: Any, x: Tensor, window: tuple[int, ...], qkv_bias: Tensor | None, **scores: Any
) -> Tensor:
    """Pad, shift and cut a map, attend, project, and undo the first three."""
    sizes, axes = x.shape[1:-1], tuple(range(1, 1 + len(window)))
    extra = [-size % length for size, length in zip(sizes, window, strict=True)]
    x = F.pad(x, [0, 0] + [n for size in reversed(extra) for n in (0, size)])
    grid = tuple(x.shape[1:-1])
    shift = tuple(
        0 if length >= size else step
        for size, length, step in zip(grid, window, module.shift_size, strict=True)
    )
    regions = None
    if any(shift):
        regions = module.region_memory.of_grid(grid, window, shift, x.device)
        x = x.roll([-step for step in shift], axes)
    x = _cut(x, window)
    x = attend_packed(
        F.linear(x, module.qkv.weight, qkv_bias),
        module.num_heads,
        rel_offsets=offsets(module.relative_position_index, x.shape[1]),
        **scores,
        **module.region_memory.of_mask(regions),
    )
    x = F.linear(x, module.proj.weight, module.proj.bias)
    x = F.dropout(x, module.dropout, module.training)
    x = _join(x, window, grid)
    if any(shift):
        x = x.roll(shift, axes)
    for axis, size in zip(axes, sizes, strict=True):
        x = x.narrow(axis, 0, size)
    return x.contiguous()


def _cut(x: Tensor, window: tuple[int, ...]) -> Tensor:
    """Cut ``[batch, *grid, dim]`` into ``[num_windows, num_tokens, dim]``."""
    batch, *grid, dim = x.shape
    counts = [size // length for size, length in zip(grid, window, strict=True)]
    split = [n for pair in zip(counts, window, strict=True) for n in pair]
    last = 2 * len(window) + 1
    x = x.reshape(batch, *split, dim).permute(0, *range(1, last, 2), *range(2, last, 2), last)
    return x.reshape(batch * math.prod(counts), math.prod(window), dim)


def _join(x: Tensor, window: tuple[int, ...], grid: tuple[int, ...]) -> Tensor:
    """Join ``[num_windows, num_tokens, dim]`` to ``[batch, *grid, dim]``."""
    counts = [size // length for size, length in zip(grid, window, strict=True)]
    batch, axes = x.shape[0] // math.prod(counts), len(window)
    x = x.view(batch, *counts, *window, x.shape[-1])
    pairs = [n for axis in range(1, axes + 1) for n in (axis, axis + axes)]
    return x.permute(0, *pairs, 2 * axes + 1).reshape(batch, *grid, x.shape[-1])


SWAPS: Swaps = {
    swap.original: swap
    for swap in (ShiftedWindowAttention, ShiftedWindowAttentionV2, ShiftedWindowAttention3d)
}

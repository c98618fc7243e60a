"""Replacements for torchvision's Swin Transformer, v1 and v2, whose attentions take the map."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models import swin_transformer

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
        return _attend_map(self, x, self.qkv.bias, bias_table=self.relative_position_bias_table)

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
        return _attend_map(self, x, bias, bias_table=table, logit_scale=self.logit_scale)


def _attend_map(module: Any, x: Tensor, qkv_bias: Tensor | None, **scores: Any) -> Tensor:
    """Pad, shift and cut a map, attend, project, and undo the first three."""
    window = tuple(module.window_size)
    height, width = x.shape[1:3]
    x = F.pad(x, (0, 0, 0, -width % window[1], 0, -height % window[0]))
    grid = tuple(x.shape[1:3])
    shift = tuple(
        0 if length >= size else step
        for size, length, step in zip(grid, window, module.shift_size, strict=True)
    )
    regions = None
    if any(shift):
        regions = module.region_memory.of_grid(grid, window, shift, x.device)
        x = x.roll((-shift[0], -shift[1]), (1, 2))
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
        x = x.roll(shift, (1, 2))
    return x[:, :height, :width].contiguous()


def _cut(x: Tensor, window: tuple[int, ...]) -> Tensor:
    """Cut ``[batch, height, width, dim]`` into ``[num_windows, num_tokens, dim]``."""
    batch, height, width, dim = x.shape
    x = x.reshape(batch, height // window[0], window[0], width // window[1], window[1], dim)
    num_windows = batch * (height // window[0]) * (width // window[1])
    return x.transpose(2, 3).reshape(num_windows, window[0] * window[1], dim)


def _join(x: Tensor, window: tuple[int, ...], grid: tuple[int, ...]) -> Tensor:
    """Join ``[num_windows, num_tokens, dim]`` to ``[batch, height, width, dim]``."""
    rows, columns = (size // width for size, width in zip(grid, window, strict=True))
    batch = x.shape[0] // (rows * columns)
    x = x.view(batch, rows, columns, *window, x.shape[-1])
    return x.transpose(2, 3).reshape(batch, *grid, x.shape[-1])


SWAPS: Swaps = {swap.original: swap for swap in (ShiftedWindowAttention, ShiftedWindowAttentionV2)}

"""Replacements for timm's Swin Transformer, v1 and v2.

Its blocks keep a dense mask as a buffer, which the attention reads into region ids once; those
with ``dynamic_mask`` would make one on every call, and make region ids instead.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.models import swin_transformer, swin_transformer_v2
from torch import Tensor

from ..attend import attend_packed, continuous_bias, must_fall_back, offsets
from ..masks import dense_mask
from ..proof import mask_of, windows
from ..report import heads, times
from ..swapped import Randn, SwappedAttention, SwappedLayer, Swaps


class WindowAttention(SwappedAttention, swin_transformer.WindowAttention):
    """Swin v1 attention. Heads may be wider or narrower than ``dim / num_heads``."""

    original = swin_transformer.WindowAttention
    bypassed = ("softmax", "attn_drop")

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """``x`` ``[num_windows, num_tokens, dim]``; ``mask`` in any form."""
        if self.needs_original(x, mask):
            return self.original.forward(self, x, dense_mask(mask, x.dtype))
        out = attend_packed(
            self.qkv(x),
            self.num_heads,
            bias_table=self.relative_position_bias_table,
            rel_offsets=offsets(self.relative_position_index, x.shape[1]),
            softmax_scale=self.scale,
            **self.region_memory.of_mask(mask),
        )
        return self.proj_drop(self.proj(out))

    @staticmethod
    def variant(module: Any) -> str:
        version = "v2" if hasattr(module, "logit_scale") else "v1"
        return f"timm {version}, window {times(module.window_size)}"

    @staticmethod
    def width(module: Any) -> str:
        return heads(module.proj.in_features, module.num_heads)

    @staticmethod
    def trial(module: Any, randn: Randn) -> Tensor:
        x, mask = windows(len(module.relative_position_index), module.dim, randn)
        return torch.cat((module(x, mask), module(x)))


class WindowAttentionV2(SwappedAttention, swin_transformer_v2.WindowAttention):
    """Swin v2 attention: cosine attention, and keys without a bias."""

    original = swin_transformer_v2.WindowAttention
    bypassed = WindowAttention.bypassed
    variant = staticmethod(WindowAttention.variant)
    width = staticmethod(WindowAttention.width)
    trial = staticmethod(WindowAttention.trial)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """``x`` ``[num_windows, num_tokens, dim]``; ``mask`` in any form."""
        if self.needs_original(x, mask):
            return self.original.forward(self, x, dense_mask(mask, x.dtype))
        out = attend_packed(
            self._project(x),
            self.num_heads,
            bias_table=continuous_bias(self.cpb_mlp, self.relative_coords_table),
            rel_offsets=offsets(self.relative_position_index, x.shape[1]),
            logit_scale=self.logit_scale,
            **self.region_memory.of_mask(mask),
        )
        return self.proj_drop(self.proj(out))

    def _project(self, x: Tensor) -> Tensor:
        if self.q_bias is None:
            return self.qkv(x)
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        if self.qkv_bias_separate:
            return self.qkv(x) + bias
        return F.linear(x, self.qkv.weight, bias)


class _Block(SwappedLayer):
    """Base of the blocks of both versions."""

    window_size: tuple[int, int]
    shift_size: tuple[int, int]

    def get_attn_mask(
        self,
        x: Tensor | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor | None:
        """Return the mask of a padded map ``[batch, height, width, dim]``, or of a fixed size."""
        shift = tuple(self.shift_size)
        if x is None or must_fall_back(x) or not any(shift) or not self.applies(self):
            return self.original.get_attn_mask(self, x, device, dtype)
        grid = tuple(x.shape[1:3])
        return self.region_memory.of_grid(grid, tuple(self.window_size), shift, x.device)

    @classmethod
    def applies(cls, module: Any) -> bool:
        return getattr(module, "dynamic_mask", False) and super().applies(module)

    @staticmethod
    def variant(module: Any) -> str:
        return f"timm, window {times(module.window_size)}, shift {times(module.shift_size)}"

    @staticmethod
    def trial(module: Any, randn: Randn) -> Tensor:
        height, width = module.window_size
        return mask_of(module.get_attn_mask(randn(1, 3 * height, 2 * width, 1)))


class SwinTransformerBlock(_Block, swin_transformer.SwinTransformerBlock):
    """The block of Swin v1."""

    original = swin_transformer.SwinTransformerBlock


class SwinTransformerV2Block(_Block, swin_transformer_v2.SwinTransformerV2Block):
    """The block of Swin v2."""

    original = swin_transformer_v2.SwinTransformerV2Block


SWAPS: Swaps = {
    swap.original: swap
    for swap in (WindowAttention, WindowAttentionV2, SwinTransformerBlock, SwinTransformerV2Block)
}

"""MONAI's SwinUNETR and SwinTransformer, in two and three dimensions."""

from __future__ import annotations

from typing import Any

from monai.networks.nets import swin_unetr
from torch import Tensor

from ..attend import attend_packed, offsets, stands_aside
from ..masks import dense_mask
from ..swapped import Randn, SwappedAttention, SwappedLayer, Swaps
from ..trials import windows
from ..words import heads, times


class WindowAttention(SwappedAttention, swin_unetr.WindowAttention):
    """Takes windows that a small map has clamped: they keep the whole window's first offsets."""

    original = swin_unetr.WindowAttention

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """``x`` ``[num_windows, num_tokens, dim]``; ``mask`` in any form."""
        if self.needs_original(x, mask):
            return self.original.forward(self, x, dense_mask(mask))
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
        return f"MONAI, window {times(module.window_size)}"

    @staticmethod
    def width(module: Any) -> str:
        return heads(module.dim, module.num_heads)

    @staticmethod
    def weight_dropout(module: Any) -> float:
        return float(module.attn_drop.p)

    @staticmethod
    def trial(module: Any, randn: Randn) -> Tensor:
        x, mask = windows(len(module.relative_position_index), module.dim, randn)
        return module(x, mask)


class BasicLayer(SwappedLayer, swin_unetr.BasicLayer):
    """Computes region ids where the original computes a dense mask, shifted blocks or not."""

    original = swin_unetr.BasicLayer

    def forward(self, x: Tensor) -> Tensor:
        """``x`` ``[batch, dim, *grid]``."""
        if stands_aside(x) or not self.applies(self):
            return self.original.forward(self, x)
        grid = tuple(x.shape[2:])
        window, shift = swin_unetr.get_window_size(grid, self.window_size, self.shift_size)
        padded = tuple(-(-size // width) * width for size, width in zip(grid, window, strict=True))
        mask = self.region_memory.of_grid(padded, window, shift, x.device) if any(shift) else None
        x = x.movedim(1, -1)
        for block in self.blocks:
            x = block(x, mask)
        if self.downsample is not None:
            x = self.downsample(x)
        return x.movedim(-1, 1)

    @staticmethod
    def attentions_of(module: Any) -> list[Any]:
        return [getattr(block, "attn", None) for block in module.blocks]

    @staticmethod
    def variant(module: Any) -> str:
        return f"MONAI, window {times(module.window_size)}, {len(module.blocks)} blocks"

    @staticmethod
    def width(module: Any) -> str:
        return f"{module.blocks[0].dim} channels"

    @staticmethod
    def trial(module: Any, randn: Randn) -> Tensor:
        # Longer than a window along the first axis, and as long or shorter along the others.
        first, *others = module.window_size
        grid = (first + 2, *(max(1, width - axis) for axis, width in enumerate(others)))
        return module(randn(1, module.blocks[0].dim, *grid))


SWAPS: Swaps = {swap.original: swap for swap in (WindowAttention, BasicLayer)}

"""MONAI's SwinUNETR and SwinTransformer, in two and three dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from monai.networks.nets import swin_unetr
from torch import Tensor, nn

from ....errors import plural
from ....ops.window_attention import shift_regions
from ..attend import WholeMap, attend_map, attend_packed, has_hooks, must_fall_back, offsets
from ..masks import dense_mask
from ..proof import windows
from ..report import heads, times
from ..swapped import Randn, Swapped, SwappedAttention, SwappedLayer, Swaps


class WindowAttention(SwappedAttention, swin_unetr.WindowAttention):
    """Also runs windows clamped to a small map, with the first offsets of the whole window."""

    original = swin_unetr.WindowAttention
    bypassed = ("softmax", "attn_drop")

    def forward(self, x: Tensor, mask: Tensor | WholeMap | None) -> Tensor:
        """``x`` ``[num_windows, num_tokens, dim]``, ``mask`` in any form; or a whole map."""
        if isinstance(mask, WholeMap):
            return self.proj(self._attend_map(x, mask))
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

    def _attend_map(self, x: Tensor, cut: WholeMap) -> Tensor:
        num_tokens = math.prod(cut.window)
        return attend_map(
            self.qkv(x),
            cut,
            self.num_heads,
            self.qkv.bias,  # the layer's output for the zeros that pad a map
            bias_table=self.relative_position_bias_table,
            rel_offsets=offsets(self.relative_position_index, num_tokens),
            softmax_scale=self.scale,
        )

    @staticmethod
    def variant(module: Any) -> str:
        return f"MONAI, window {times(module.window_size)}"

    @staticmethod
    def width(module: Any) -> str:
        return heads(module.dim, module.num_heads)

    @staticmethod
    def trial(module: Any, randn: Randn) -> Tensor:
        x, mask = windows(len(module.relative_position_index), module.dim, randn)
        return module(x, mask)


class SwinTransformerBlock(SwappedLayer, swin_unetr.SwinTransformerBlock):
    """Passes its attention the whole map, where the original pads, rolls and cuts it."""

    original = swin_unetr.SwinTransformerBlock
    section = "blocks"

    def forward_part1(self, x: Tensor, mask_matrix: Tensor | None) -> Tensor:
        """``x`` ``[batch, *grid, dim]``; ``mask_matrix`` of the grid, in any form."""
        if self._takes_map(x):
            cut = cut_of(self, tuple(x.shape[1:-1]))
            # A dense mask may hold anything; region ids come from a patched layer, for this grid.
            if not any(cut.shift) or (mask_matrix is not None and mask_matrix.ndim == 2):
                return self.attn(self.norm1(x), cut)
        return self.original.forward_part1(self, x, mask_matrix)

    def _takes_map(self, x: Tensor) -> bool:
        """Whether the attention has its released parts, without hooks and without dropout.

        A dropout would draw for a map instead of windows. Compilers fuse pads and rolls by
        themselves, and an index would be a constant for each size.
        """
        if torch.compiler.is_compiling() or not self.applies(self):
            return False
        attention = self.attn
        drop = attention.proj_drop
        return (
            type(attention.qkv) is nn.Linear
            and not (drop.training and getattr(drop, "p", 0) > 0)
            and not any(map(has_hooks, attention.modules()))
            and not attention.needs_original(x)
        )

    @staticmethod
    def variant(module: Any) -> str:
        return f"MONAI, window {times(module.window_size)}, shift {times(module.shift_size)}"

    @staticmethod
    def trial(module: Any, randn: Randn) -> Tensor:
        grid = trial_grid(module.window_size)
        cut = cut_of(module, grid)
        mask = shift_regions(padded(grid, cut), *cut)
        given = mask if isinstance(module, Swapped) else dense_mask(mask, torch.float64)
        return module(randn(1, *grid, module.dim), given)


class BasicLayer(SwappedLayer, swin_unetr.BasicLayer):
    """Computes region ids where the original computes a dense mask, shifted blocks or not."""

    original = swin_unetr.BasicLayer

    def forward(self, x: Tensor) -> Tensor:
        """``x`` ``[batch, dim, *grid]``."""
        if must_fall_back(x) or not self.applies(self):
            return self.original.forward(self, x)
        grid = tuple(x.shape[2:])
        cut, mask = cut_of(self, grid), None
        if any(cut.shift):
            mask = self.region_memory.of_grid(padded(grid, cut), *cut, x.device)
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
        return f"MONAI, window {times(module.window_size)}, {plural(len(module.blocks), 'block')}"

    @staticmethod
    def width(module: Any) -> str:
        return f"{module.blocks[0].dim} channels"

    @staticmethod
    def trial(module: Any, randn: Randn) -> Tensor:
        return module(randn(1, module.blocks[0].dim, *trial_grid(module.window_size)))


class PatchMergingV2(Swapped, swin_unetr.PatchMergingV2):
    """Takes all cells of 2 × 2 (× 2) tokens at once; the original takes a slice for each token."""

    original: ClassVar[Any] = swin_unetr.PatchMergingV2
    section = "mergings"
    orders: ClassVar[dict[int, tuple[int, ...]]] = {2: (0, 2, 1, 3), 3: tuple(range(8))}

    def forward(self, x: Tensor) -> Tensor:
        """``x`` ``[batch, *grid, dim]``."""
        if must_fall_back(x) or x.ndim - 2 not in self.orders:
            return self.original.forward(self, x)
        return self.reduction(self.norm(join_cells(x, self.orders[x.ndim - 2])))

    @staticmethod
    def variant(module: Any) -> str:
        return f"MONAI, {axes_of(module)} axes"

    @staticmethod
    def trial(module: Any, randn: Randn) -> Tensor:
        return module(randn(2, *(5 - axis for axis in range(axes_of(module))), module.dim))


class PatchMerging(PatchMergingV2, swin_unetr.PatchMerging):
    """``PatchMergingV2`` with the tokens of a cell in another order."""

    original = swin_unetr.PatchMerging
    orders = PatchMergingV2.orders | {3: (0, 4, 2, 1, 6, 5, 3, 7)}


def axes_of(merging: Any) -> int:
    """The number of axes of its maps; a cell has two tokens along each."""
    return 2 if merging.norm.normalized_shape[0] == 4 * merging.dim else 3


def join_cells(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """Gather cells: ``[batch, *grid, dim]`` to ``[batch, *grid / 2, cell * dim]``.

    Odd axes are padded with zeros. ``order`` lists the tokens of a cell, each by its number with
    the last axis fastest.
    """
    axes = x.ndim - 2
    odd = [size % 2 for size in x.shape[1:-1]]
    if any(odd):
        x = F.pad(x, [0, 0] + [n for extra in reversed(odd) for n in (0, extra)])
    for axis in range(1, 2 * axes, 2):
        x = torch.unflatten(x, axis, (-1, 2))
    coarse, fine = range(1, 2 * axes, 2), range(2, 2 * axes + 1, 2)
    x = x.permute(0, *coarse, *fine, 2 * axes + 1).flatten(axes + 1, 2 * axes)
    if list(order) != sorted(order):
        tokens = x.unbind(-2)
        return torch.cat([tokens[number] for number in order], -1)
    return x.flatten(-2)


def cut_of(module: Any, grid: tuple[int, ...]) -> WholeMap:
    """Window and shift of a block or layer for a map; an axis shorter than a window clamps it."""
    return WholeMap(*swin_unetr.get_window_size(grid, module.window_size, module.shift_size))


def padded(grid: tuple[int, ...], cut: WholeMap) -> tuple[int, ...]:
    """The size of a map padded to whole windows."""
    return tuple(-(-size // width) * width for size, width in zip(grid, cut.window, strict=True))


def trial_grid(window: Sequence[int]) -> tuple[int, ...]:
    """A map longer than the window along the first axis, and no longer along the others."""
    first, *others = window
    return (first + 2, *(max(1, width - axis) for axis, width in enumerate(others)))


SWAPS: Swaps = {
    swap.original: swap
    for swap in (WindowAttention, SwinTransformerBlock, BasicLayer, PatchMergingV2, PatchMerging)
}

"""The residual blocks of MONAI's U-Nets, of which Swin UNETR's decoder consists."""

from __future__ import annotations

from typing import Any

from monai.networks.blocks import dynunet_block
from torch import Tensor, nn

from ....fused.instance_norm import instance_norm
from ..attend import has_hooks, must_fall_back
from ..swapped import Randn, Swapped, Swaps

NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class UnetResBlock(Swapped, dynunet_block.UnetResBlock):
    """Norm, residual and activation in one operation, unless hooks observe the parts."""

    original = dynunet_block.UnetResBlock
    section = "norms"

    def forward(self, inp: Tensor) -> Tensor:
        """``inp`` ``[batch, channels, *grid]``."""
        is_batch = inp.ndim == self.conv1.conv.weight.ndim
        if must_fall_back(inp) or not is_batch or not self.applies(self):
            return self.original.forward(self, inp)
        slope = self.lrelu.negative_slope
        out = instance_norm(self.conv1(inp), eps=self.norm1.eps, negative_slope=slope)
        out = self.conv2(out)
        residual, residual_eps = inp, None
        if hasattr(self, "conv3"):
            residual, residual_eps = self.conv3(inp), self.norm3.eps
        return instance_norm(
            out, residual, eps=self.norm2.eps, residual_eps=residual_eps, negative_slope=slope
        )

    @classmethod
    def applies(cls, module: Any) -> bool:
        """Norms without parameters or running statistics, a leaky ReLU, and no hooks on them."""
        norms = [each for name, each in module._modules.items() if name.startswith("norm")]
        return (
            all(type(norm) in NORMS and is_bare(norm) for norm in norms)
            and type(module.lrelu) is nn.LeakyReLU
            and module.lrelu.negative_slope > 0
            and not any(has_hooks(each) for each in (*norms, module.lrelu))
            and hasattr(module, "conv3") == hasattr(module, "norm3")
        )

    @staticmethod
    def variant(module: Any) -> str:
        shortcut = "with" if hasattr(module, "conv3") else "without"
        axes = module.conv1.conv.weight.ndim - 2
        return f"MONAI, {axes} axes, {shortcut} a convolution of the residual"

    @staticmethod
    def width(module: Any) -> str:
        return f"{module.conv1.conv.out_channels} channels"

    @staticmethod
    def trial(module: Any, randn: Randn) -> Tensor:
        weight = module.conv1.conv.weight
        return module(randn(2, weight.shape[1], *(5 + axis for axis in range(weight.ndim - 2))))


def is_bare(norm: Any) -> bool:
    """Whether a norm has neither parameters nor running statistics."""
    return not norm.affine and not norm.track_running_stats


SWAPS: Swaps = {UnetResBlock.original: UnetResBlock}

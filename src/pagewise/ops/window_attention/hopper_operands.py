"""A call's operands as kernels of window attention on Hopper take them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .problem import Operands
from .triton import KINDS

__all__ = ["LOG2_E", "normal_scale", "types_of"]

LOG2_E = 1 / math.log(2)
_LEAST_SCALE = 1 / 16


def types_of(x: Operands) -> tuple[str, str]:
    """Element types of bias and regions, as kernels name them."""
    bias = x.bias_table if x.bias is None else x.bias
    return (
        "*fp32" if bias is None else KINDS[bias.dtype],
        "*i32" if x.regions is None else KINDS[x.regions.dtype],
    )


def normal_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same scores by a scale of at least 1/16: bias and mask are divided by it.

    q is multiplied by a power of two, which is exact but for float16's subnormals.

    Example:
        >>> normal_scale(torch.tensor([3.0]), -1.5)
        (tensor([-3.]), 1.5)
        >>> normal_scale(torch.tensor([3.0]), 1 / 64)
        (tensor([0.7500]), 0.0625)
        >>> normal_scale(torch.tensor([3.0]), 0.0)
        (tensor([0.]), 0.6931471805599453)
    """
    if not scale < _LEAST_SCALE:
        return q, scale
    if scale == 0:
        return torch.zeros_like(q), 1 / LOG2_E  # any would do: the factor of scores is then 1
    size = min(1.0, 2.0 ** math.floor(math.log2(abs(scale) / _LEAST_SCALE)))
    factor = math.copysign(size, scale)
    return q * factor, scale / factor

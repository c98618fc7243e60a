"""A call's operands as kernels of window attention on Hopper take them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...tiles.hopper.gluon_launcher import align
from .problem import Operands, Problem
from .triton import KINDS

__all__ = ["LOG2_E", "Call", "normal_scale", "types_of"]

LOG2_E = 1 / math.log(2)
_LEAST_SCALE = 1 / 16


class Call:
    """Tokens where the copy engine can read them, and a bias to be divided by the scale."""

    masks: list[Tensor]
    """What tells of regions, made last (``hopper_launch``)."""

    def __init__(self, problem: Problem, x: Operands, turns_table: bool = False) -> None:
        self.problem, self.x = problem, x
        q, self.scale = normal_scale(x.q, x.softmax_scale)
        self.q, self.k, self.v = align(q), align(x.k), align(x.v)
        anything = self.q
        self.offsets = anything if x.rel_offsets is None else x.rel_offsets.contiguous()
        self.bias = anything if x.bias is None else x.bias.contiguous()
        self.strides = [0, problem.num_tokens**2]  # of a table's entries, and of heads
        if x.bias_table is not None:
            # A head's entries side by side are fewer lines to gather from. Where few programs do
            # it, that is less than a launch takes.
            table = x.bias_table.t().contiguous().t() if turns_table else x.bias_table
            self.bias, self.strides = table, [*table.stride()]

    def others(self, chunks: int, factor: float) -> list[Any]:
        """What all kernels take after their tokens; scores are multiplied by ``factor``."""
        problem, table_size = self.problem, self.problem.table_size
        return [
            self.bias,
            self.offsets,
            *self.masks,
            problem.num_windows,
            chunks,
            max(1, problem.num_masks),
            0 if table_size is None else (table_size - 1) // 2,
            *self.strides,
            factor,
            1 / self.scale,
            self.x.mask_value / self.scale,
        ]


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

"""Data types of window attention: the operands of a call, its gradients, and its problem."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

MAX_LOGIT_SCALE = 4.605170185988092
"""log 100, at which Swin v2 clamps its learned logarithm of the scale."""
LEAST_SCORE = torch.finfo(torch.float32).min * math.log(2)
"""Masks and biases below it count as -inf: times log2(e), float32 cannot hold them."""
MOST_TOP = 1024.0
"""Largest log-sum-exp, in base 2, whose rounding to float32 changes weights by less than 1e-4; next
to masks of -1e9 it has lost the logarithm of the sum."""


@dataclass(frozen=True, eq=False)
class Operands:
    """The arguments of a call of ``window_attention``, with defaults filled in."""

    q: Tensor
    """``[num_windows, num_heads, num_tokens, head_size]``, like ``k`` and ``v``."""
    k: Tensor
    v: Tensor
    bias_table: Tensor | None
    """``[table_size, num_heads]``, gathered at ``rel_offsets[i] - rel_offsets[j] + centre``."""
    rel_offsets: Tensor | None
    """int32 ``[num_tokens]``, all different."""
    bias: Tensor | None
    """``[num_biases, num_heads, num_tokens, num_tokens]``."""
    regions: Tensor | None
    """Integers ``[num_masks, num_tokens]``."""
    mask: Tensor | None
    """Bool or floating ``[num_masks, num_tokens, num_tokens]``."""
    logit_scale: Tensor | None
    """``[num_heads]``; with it, q and k are normalised."""
    mask_value: float
    softmax_scale: float
    qk_norm_eps: float


@dataclass(frozen=True, eq=False)
class Gradients:
    """The gradients of a call; ``None`` for inputs that were not given."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias_table: Tensor | None = None
    bias: Tensor | None = None
    logit_scale: Tensor | None = None


@dataclass(frozen=True)
class Problem:
    """Sizes and element types of a call: all that the choice of implementation and plan needs."""

    num_windows: int
    num_heads: int
    num_tokens: int
    head_size: int
    dtype: torch.dtype
    table_size: int | None = None
    """Rows of the bias table; ``None`` without one."""
    num_biases: int = 0
    """Dense biases; window ``w`` takes number ``w % num_biases``."""
    num_masks: int = 0
    """Windows of an image, whose regions or masks repeat from image to image."""
    has_regions: bool = False
    mask_dtype: torch.dtype | None = None
    learned_dtypes: tuple[torch.dtype, ...] = ()
    """Names of the given learned inputs: table or bias, and logit_scale."""
    cosine: bool = False
    """Whether q and k are normalised, as in Swin v2."""

    @property
    def has_bias(self) -> bool:
        """Whether anything learned is added to the scores."""
        return self.table_size is not None or self.num_biases > 0

    def of_one_window(self) -> Problem:
        """The problem that kernels are compiled for: any number of windows, masks and biases."""
        num_masks, num_biases = min(self.num_masks, 1), min(self.num_biases, 1)
        return replace(self, num_windows=1, num_masks=num_masks, num_biases=num_biases)


def empty_like(q: Tensor) -> Tensor:
    """An empty tensor of ``q``'s shape in which the heads of a token are contiguous."""
    num_windows, num_heads, num_tokens, head_size = q.shape
    return q.new_empty(num_windows, num_tokens, num_heads, head_size).transpose(1, 2)

"""The result of attention over a set of keys."""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionOutput(NamedTuple):
    """Result of attention over a set of keys, which can be merged with that over another set.

    ``out`` is the softmax-weighted mean of the values, ``lse`` the natural logarithm of the
    softmax denominator. A row that sees no key has ``out`` 0 and ``lse`` -inf.
    """

    out: torch.Tensor
    """``[num_tokens, num_heads, v_head_size]``, element type of q."""

    lse: torch.Tensor
    """``[num_tokens, num_heads]`` float32."""

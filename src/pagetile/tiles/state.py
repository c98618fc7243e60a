"""What attention over some keys leaves behind."""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionOutput(NamedTuple):
    """Attention over a set of keys: enough to go on, or to merge with another set's.

    ``out`` is the softmax-weighted mean of the values, ``lse`` the natural logarithm of the
    softmax denominator. A row that sees no key has ``out`` 0 and ``lse`` -inf.
    """

    out: torch.Tensor
    """``[num_tokens, num_heads, v_head_size]``, element type of q."""

    lse: torch.Tensor
    """``[num_tokens, num_heads]`` float32."""

"""The draw in torch, for CPUs; ``triton_draw.py`` computes the same on a GPU.

The noise is a hash of (seed, index of the sample, position, token), so a row draws the same token
alone or among others, after preemption, and on another device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .sampling_rows import INVERSE, PROMPT_LEN, Feature
from .sampling_tables import HAS_TABLES, TokenTables
from .torch_shape import shape_logits

if TYPE_CHECKING:
    from .sampler import Sampler

_SHAPED = Feature.CUT | HAS_TABLES


def draw(
    logits: Tensor,
    rows: Tensor,
    state: Sampler,
    features: Any,
    tables: Sequence[TokenTables],
    step_masks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Sample rows and advance them.

    Args:
        logits: ``[n, vocab_size]``. Not written to.
        rows: int64 ``[n]``.
        state: The rows' parameters, last tokens and lengths.
        features: int ``[n]``, each row's ``Feature``s; greedy rows need no noise.
        tables: The rows' tables.
        step_masks: int32 ``[n, ceil(vocab_size / 32)]``: bits of the tokens that are allowed now.

    Returns:
        Token ids int64 ``[n]``, 0 where there is none, and the largest logits float32 ``[n]``.
    """
    lengths, ints, floats = state.lengths[rows], state.ints[rows], state.floats[rows]
    x = logits.float()
    if step_masks is not None or np.any(features & _SHAPED):
        x = shape_logits(x, features, tables, lengths, ints, floats, step_masks)
    best, tokens = x.max(dim=1)
    if drawn := np.flatnonzero(features & Feature.RANDOM).tolist():
        at = slice(None) if len(drawn) == len(x) else drawn
        every = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
        noise = make_noise(every, ints[at], lengths[at])
        scale = floats[at, INVERSE, None].float()
        scores = torch.sub(x[at], best[at, None]).mul_(scale).sub_(noise.log_())
        tokens[at] = scores.argmax(dim=1)
    state.last_tokens[rows] = tokens = tokens.where(torch.isfinite(best), 0)
    state.lengths[rows] = lengths + 1
    return tokens, best


def make_noise(tokens: Tensor, ints: Tensor, lengths: Tensor) -> Tensor:
    """Exponential noise float32 ``[n, vocab_size]``; ``triton_draw.py`` computes the same."""
    position = lengths - ints[:, PROMPT_LEN]
    first = _mix(ints[:, 0] + position * _GOLDEN)
    second = _mix((ints[:, 1] ^ first) + position * _STEP)
    words = _mix(tokens + first[:, None], second[:, None])
    # 31 bits as u in (0, 1); log1p(-u) keeps all digits for small u, where the smallest noise is.
    uniform = words.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
    return uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()


def _mix(x: Tensor, key: Tensor | int = 0) -> Tensor:
    """Hash 32 bits bijectively (Wellons' ``lowbias32``, with a key); writes to ``x``."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_MIX_A)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).add_(key).mul_(_MIX_B)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


_MIX_A, _MIX_B = 0x7FEB352D, 0x846CA68B - 2**32
_GOLDEN, _STEP = 0x9E3779B9 - 2**32, 0x85EBCA6B - 2**32

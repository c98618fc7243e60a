"""Biases, penalties, masks and cuts in torch: for CPUs, and the reference of the kernels.

Cuts use integers. A token's likelihood at its temperature is an integer, 2**40 for the likeliest
token, so sums are exact in any order and a row keeps the same tokens in any batch. The threshold of
top-k and top-p is found without sorting, by radix selection: a histogram over the leading 11 bits
of the logits, as ordered integers, gives the bucket of the threshold; two more refine it::

    need 70 units, best tokens first
    bucket    0    1    2    3   ...
    units    40   20   25   10          40 + 20 < 70 <= 40 + 20 + 25: the edge is in bucket 2
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .logprobs import descending_order
from .sampling_rows import (
    FREQUENCY,
    INVERSE_REPETITION,
    MARGIN,
    MIN_TOKENS,
    PRESENCE,
    PROMPT_LEN,
    REPETITION,
    TAIL,
    TEMPERATURE,
    TOP_K,
    Feature,
)
from .sampling_tables import TokenTables

ONE = 2**40  # units of the likeliest token: 2**23 tokens still sum below 2**63
DIGIT_BITS = 11  # three digits cover the 32 bits of a float's order


def shape_logits(
    x: Tensor,
    features: Any,
    tables: Sequence[TokenTables],
    lengths: Tensor,
    ints: Tensor,
    floats: Tensor,
    step_masks: Tensor | None = None,
) -> Tensor:
    """The logits after steps 1, 4 and 5 of ``Sampler``: what is not kept is -inf.

    NaN stays, and +inf stays or becomes NaN: both make the row fail.

    Args:
        x: float32 ``[n, vocab_size]``. Not written to.
        features: int ``[n]``, what each row asks for.
        tables: The rows' tables.
        lengths: int32 ``[n]``, tokens that each row has.
        ints: int32 ``[n, NUM_INTS]``.
        floats: float64 ``[n, NUM_FLOATS]``.
        step_masks: int32 ``[n, ceil(vocab_size / 32)]``: bits of the tokens that are allowed now.
    """
    x = x.clone()

    def having(feature: Feature) -> list[int]:
        return list(np.flatnonzero(features & feature).tolist())

    if at := having(Feature.BIAS):
        x[at] += torch.stack([tables[i].bias for i in at])  # type: ignore[misc]
    if at := having(Feature.PENALTY):
        counts = torch.stack([tables[i].counts for i in at])  # type: ignore[misc]
        x[at] = _penalise(x[at], counts, floats[at])
    if at := having(Feature.BAN):
        allowed = torch.stack([tables[i].allowed for i in at])  # type: ignore[misc]
        has_minimum = lengths[at] - ints[at, PROMPT_LEN] >= ints[at, MIN_TOKENS]
        words = torch.where(has_minimum[:, None], allowed[:, 1], allowed[:, 0])
        x[at] -= _as_bans(words, x.shape[1])
    if step_masks is not None:
        x -= _as_bans(step_masks, x.shape[1])
    if at := having(Feature.CUT):
        x[at] -= torch.where(_cut(x[at], ints[at], floats[at]), 0.0, math.inf)
    return x


def _penalise(x: Tensor, counts: Tensor, floats: Tensor) -> Tensor:
    in_output = counts >> 1
    scale = torch.where(
        x > 0, floats[:, INVERSE_REPETITION, None], floats[:, REPETITION, None]
    ).where(counts > 0, 1.0)
    presence, frequency = floats[:, PRESENCE, None], floats[:, FREQUENCY, None]
    wide = x.double() * scale
    return (wide - (presence * (in_output > 0) + frequency * in_output)).float()


def _as_bans(words: Tensor, vocab_size: int) -> Tensor:
    """Expand bit masks int32 ``[n, ceil(vocab_size / 32)]`` to 0 where allowed, else infinity.

    Infinity is subtracted from logits and does not replace them, so that a NaN is still found.
    """
    tokens = torch.arange(vocab_size, device=words.device)
    bits = words[:, tokens >> 5] >> (tokens & 31).int()
    return torch.where((bits & 1) == 1, 0.0, math.inf)


def _cut(x: Tensor, ints: Tensor, floats: Tensor) -> Tensor:
    """Return which tokens steps 4 and 5 keep: bool like ``x``. A cut that is off keeps all."""
    best, top_k = x.amax(dim=1), ints[:, TOP_K, None].long()
    tail, margin = floats[:, TAIL, None], floats[:, MARGIN, None]
    kept = torch.ones_like(x, dtype=torch.bool)
    if bool((top_k < x.shape[1]).any()):
        kept = _is_kept(x, torch.ones_like(x, dtype=torch.int64), top_k)
    if bool((tail > 0).any()):
        units = _units(x, best, floats[:, TEMPERATURE, None]) * kept
        total = units.sum(dim=1, keepdim=True)
        need = (total - (tail * total).long()).clamp_(min=1)
        kept &= _is_kept(x, units, need) | (tail <= 0)
    return kept & (x.double() >= best.double()[:, None] + margin)


def _units(logits: Tensor, best: Tensor, temperature: Tensor | float) -> Tensor:
    """``exp((logits - best) / temperature)`` in units of 1 / ONE, int64 ``[num_rows, vocab]``."""
    exponent = logits.double().sub_(best.double()[:, None]).div_(temperature)
    return exponent.exp_().mul_(ONE).round_().long()


def _is_kept(logits: Tensor, amounts: Tensor, need: Tensor) -> Tensor:
    """Return which tokens are among the fewest best whose ``amounts`` sum to ``need``, with ties.

    Each round knows the leading digits of the threshold and histograms the next one. Bucket 0 has
    all tokens better than those digits, the last bucket all worse ones.
    """
    order = descending_order(logits)
    num_buckets = 2**DIGIT_BITS + 2
    first = torch.full_like(need, -(2**31) >> 2 * DIGIT_BITS)  # what bucket 1 stands for
    for shift in (2 * DIGIT_BITS, DIGIT_BITS, 0):
        bucket = ((order >> shift) - (first - 1)).clamp_(0, num_buckets - 1)
        histogram = amounts.new_zeros(len(order), num_buckets).scatter_add_(1, bucket, amounts)
        reached = torch.searchsorted(histogram.cumsum(dim=1), need)
        edge = first + reached - 1
        first = edge << DIGIT_BITS
    return order <= edge.int()

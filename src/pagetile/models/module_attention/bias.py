"""The ALiBi bias that a model adds to its scores, read from the model.

A bias that depends on the key's position alone may be shifted by a constant per query, because a
softmax does not change. So ``slope * k`` (BLOOM, Falcon), ``slope * (k - last)`` (MPT) and the
``slope * (k - q)`` of ``paged_attention`` are the same, as long as the bias is linear in ``k``.

Falcon's is not: it is rounded to bfloat16, whatever type the model has, so that from position 256
on neighbouring keys share a bias. Such a bias becomes part of the product of queries and keys::

    q . k + bias[h, position(k)]  =  [q, e_h] . [k, bias[0, position(k)], bias[1, ...], ...]

with ``e_h`` the unit vector of the query head ``h`` among those that share the key.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import UnsupportedError

_LANES = 8
"""Head sizes must be multiples of this."""


@dataclass(frozen=True, eq=False)
class KeyBias:
    """A bias of each query head on the position of a key."""

    slopes: Tensor
    """``[num_heads]``: float32, or bfloat16 if products with positions are rounded to it."""

    @property
    def is_linear(self) -> bool:
        """Whether ``paged_attention`` can add it by its slopes."""
        return self.slopes.dtype == torch.float32

    def at(self, positions: Tensor) -> Tensor:
        """The rounded bias ``[num_heads, *positions.shape]``, computed as Falcon computes it."""
        slopes = self.slopes.view(-1, *(1 for _ in positions.shape))
        return slopes * positions


def fit_bias(bias: Tensor) -> KeyBias:
    """Find the slopes of a bias that a model passes to its attention.

    Args:
        bias: ``[num_heads, length]``: the bias on keys at positions 0, 1, ... or, shifted by a
            constant, anywhere else in a row.

    Raises:
        UnsupportedError: It is neither linear in the position nor Falcon's rounded product.
    """
    num_keys = bias.shape[1]
    positions = torch.arange(num_keys, device=bias.device)
    if num_keys > 1:
        rounded = KeyBias(bias[:, 1].bfloat16())
        if bool((rounded.at(positions).to(bias.dtype) == bias).all()):
            exact = rounded.slopes.float()
            is_exact = bool((exact[:, None] * positions == bias).all())
            return KeyBias(exact) if is_exact else rounded
    # Least squares: in 16-bit types one entry has a slope to 3 digits only, all together to 5.
    values, x = bias.double(), positions.double()
    x = x - x.mean()
    centred = values - values.mean(1, keepdim=True)
    slopes = (centred * x).sum(1) / x.square().sum().clamp_min(1)
    room = 4 * torch.finfo(bias.dtype).eps * values.abs().amax(1, keepdim=True)
    if not bool(((centred - slopes[:, None] * x).abs() <= room).all()):
        raise UnsupportedError("the bias of its attention is not linear in the key's position")
    return KeyBias(slopes.float())


def append_bias(q: Tensor, k: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys whose products include a bias, both a multiple of 8 wider.

    Args:
        q: ``[1, num_heads, num_tokens, head_size]``.
        k: ``[1, num_kv_heads, num_tokens, head_size]``.
        bias: ``[num_heads, num_tokens]``, in the unit of ``q . k`` before any scale.
    """
    num_heads, num_kv_heads, num_tokens = q.shape[1], k.shape[1], k.shape[2]
    group = num_heads // num_kv_heads
    width = -(-group // _LANES) * _LANES
    units = torch.eye(group, width, dtype=q.dtype, device=q.device).repeat(num_kv_heads, 1)
    units = units[None, :, None].expand(1, -1, num_tokens, -1)
    columns = k.new_zeros(1, num_kv_heads, num_tokens, width)
    columns[0, ..., :group] = bias.view(num_kv_heads, group, num_tokens).transpose(1, 2)
    return torch.cat([q, units], dim=-1), torch.cat([k, columns], dim=-1)

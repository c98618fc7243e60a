"""Merges the weights of products with the same input into one tensor.

::

    before   q.weight [ n_q, size ]   k.weight [ n_k, size ]   v.weight [ n_v, size ]
    after    merged   [ n_q + n_k + n_v, size ]
             q.weight = merged[:n_q]   k.weight = merged[n_q : n_q + n_k]   ...

The parameters stay the model's own and become views, so nothing is stored twice, ``state_dict`` has
the same names, and the merged product sees in-place changes of a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Product:
    """The merged weight of one or more linear modules."""

    weight: Tensor
    bias: Tensor | None


def can_merge(modules: Sequence[nn.Module]) -> bool:
    """Return whether weights have one type, device and width, and all or none a bias."""
    weights: list[Any] = [module.weight for module in modules]
    biases: list[Any] = [getattr(module, "bias", None) for module in modules]
    given = [bias for bias in biases if bias is not None]
    first = weights[0]
    return (
        len(given) in (0, len(biases))
        and all(type(x.data) is Tensor for x in (*weights, *given))
        and all(x.dtype == first.dtype and x.device == first.device for x in (*weights, *given))
        and all(x.shape[1:] == first.shape[1:] for x in weights)
        and len({id(x) for x in (*weights, *given)}) == len(weights) + len(given)
    )


@torch.no_grad()
def merge(modules: Sequence[nn.Module]) -> Product:
    """Merge the weights and biases of linear modules; see the module's docstring."""
    weights: list[Any] = [module.weight for module in modules]
    biases: list[Any] = [getattr(module, "bias", None) for module in modules]
    return Product(_join(weights), None if biases[0] is None else _join(biases))


def _join(parts: list[nn.Parameter]) -> Tensor:
    """Return one tensor of all parts, which become its views; no copy if they are adjacent."""
    first, rows = parts[0].data, sum(len(part) for part in parts)
    if len(parts) == 1:
        if not first.is_contiguous():
            parts[0].data = first.contiguous()
        return parts[0]
    at = first.storage_offset()
    for part in parts:
        is_next = (
            part.data.is_contiguous()
            and part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and part.storage_offset() == at
        )
        if not is_next:
            break
        at += part.numel()
    else:
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    merged = torch.cat([part.data for part in parts])
    at = 0
    for part in parts:
        part.data = merged[at : at + len(part)]
        at += len(part)
    return merged

"""Custom operators of ``write_kv`` for compilers: one graph node that mutates its caches.

There are two, because scales per token are written, while others are only read and may be expanded
views, which cannot be mutated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def write(*inputs: Any) -> None:
    """``write_kv`` by one node of a graph, with the inputs of ``_run``. Nothing has gradients."""
    inputs = tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)
    scales = inputs[5:7]
    is_written = any(x is not None and x.dim() == 3 for x in scales)
    (_write_with_scales if is_written else _write)(*inputs)


def _run(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    impl: str,
) -> None:
    from .api import write_kv

    write_kv(k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale, impl=impl)


_CACHES = ("k_cache", "v_cache")
_write = torch.library.custom_op("pagetile::write_kv", _run, mutates_args=_CACHES)
_write_with_scales = torch.library.custom_op(
    "pagetile::write_kv_with_scales", _run, mutates_args=(*_CACHES, "k_scale", "v_scale")
)


@_write.register_fake
@_write_with_scales.register_fake
def _(*inputs: object) -> None:
    pass

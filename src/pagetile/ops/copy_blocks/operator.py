"""``copy_blocks`` as one node of a graph, for compilers; it mutates the destinations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def copy(caches: Iterable[Tensor | tuple[Tensor, Tensor]], src_to_dst: Tensor, impl: str) -> None:
    """Call the operator; nothing has gradients."""
    pairs = [cache if isinstance(cache, tuple) else (None, cache) for cache in caches]
    sources = [None if source is None else source.detach() for source, _ in pairs]
    _copy(sources, [to.detach() for _, to in pairs], src_to_dst, impl)


@torch.library.custom_op("pagetile::copy_blocks", mutates_args=("destinations",))
def _copy(
    sources: Sequence[Tensor | None],
    destinations: Sequence[Tensor],
    src_to_dst: Tensor,
    impl: str,
) -> None:
    """Copy from each source, or inside the destination where there is none."""
    from .api import copy_blocks

    both = zip(sources, destinations, strict=True)
    caches: Any = [to if source is None else (source, to) for source, to in both]
    copy_blocks(caches, src_to_dst, impl=impl)


@_copy.register_fake
def _(*inputs: object) -> None:
    pass

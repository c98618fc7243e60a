"""Fused code before the first layer and after the last: embedding, angles, last norm, logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...fused.take_rows import take_rows
from ..fused import own_forward
from .layer import Link
from .trace import Event, ModelTrace

_MOST_BYTES = 64 << 20
"""Most bytes of a table of angles."""


def last_norm(link: Link, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Forward of a norm whose result the layer before it may have computed already."""

    def forward_last(x: Tensor) -> Tensor:
        normed = link.take(x)
        return forward(x) if normed is None else normed[None]

    return forward_last


def table_of_tokens(module: nn.Module, impl: str) -> Callable[[Tensor], Tensor] | None:
    """Return the forward of a token embedding by ``take_rows``; ``None`` if it does more."""
    own = own_forward(module)
    weight: Any = getattr(module, "weight", None)
    if own is None or type(weight) is not nn.Parameter or weight.ndim != 2:
        return None
    ids = torch.arange(min(3, len(weight)), device=weight.device)[None]
    found = module(ids)
    if not isinstance(found, Tensor) or not torch.equal(found, weight[ids]):
        return None

    def forward(ids: Tensor) -> Tensor:
        weight: Any = module.weight
        if ids.dtype == torch.int64 and weight.is_contiguous() and ids.is_contiguous():
            return take_rows(weight, ids, impl=impl)
        return own(module, ids)  # type: ignore[no-any-return]

    return forward


def find_angles(
    trace: ModelTrace, max_model_len: int | None, impl: str
) -> list[tuple[nn.Module, Callable[..., Any]]]:
    """Return modules that compute cosines and sines of positions, and a forward with a table.

    Args:
        trace: A forward of the model.
        max_model_len: Upper limit of positions; without one nothing is found.
        impl: The implementation of ``take_rows``.
    """
    if max_model_len is None:
        return []
    used = {id(call.kwargs.get("position_embeddings")) for call in trace.layers}
    calls: dict[nn.Module, list[Event]] = {}
    for event in trace.others:
        if id(event.output) in used:
            calls.setdefault(event.module, []).append(event)
    found = []
    for module, events in calls.items():
        forward = _look_up(module, events, max_model_len, impl)
        if forward is not None:
            found.append((module, forward))
    return found


def _look_up(
    module: nn.Module, events: list[Event], max_model_len: int, impl: str
) -> Callable[..., Any] | None:
    own = own_forward(module)
    tables: dict[tuple[Any, ...], tuple[Tensor, int]] = {}
    for event in events:
        if own is None or event.kwargs or len(event.args) < 2:
            return None
        x, positions, *others = event.args
        if not _is_pair(event.output) or not all(isinstance(o, (str, int)) for o in others):
            return None
        width = event.output[0].shape[-1]
        if 2 * width * max_model_len * x.dtype.itemsize > _MOST_BYTES:
            return None
        every = torch.arange(max_model_len, device=x.device)[None]
        cos, sin = module(x, every, *others)
        table = torch.cat((cos, sin), -1)[0].contiguous()
        mine = torch.split(table[positions[0]], width, -1)
        if not all(torch.equal(a, b[0]) for a, b in zip(mine, event.output, strict=True)):
            return None
        tables[(x.dtype, *others)] = table, width

    def forward(x: Tensor, position_ids: Tensor, *others: Any, **options: Any) -> Any:
        entry = None if options else tables.get((x.dtype, *others))
        if entry is None or position_ids.shape[0] != 1:
            return own(module, x, position_ids, *others, **options)  # type: ignore[misc]
        table, width = entry
        rows = take_rows(table, position_ids, impl=impl)
        return rows[..., :width], rows[..., width:]

    return forward


def _is_pair(output: Any) -> bool:
    return (
        isinstance(output, tuple)
        and len(output) == 2
        and all(isinstance(x, Tensor) and x.ndim == 3 and x.shape[0] == 1 for x in output)
        and output[0].shape == output[1].shape
    )

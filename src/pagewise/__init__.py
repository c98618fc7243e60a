"""Attention, page by page and tile by tile."""

from importlib import import_module
from typing import TYPE_CHECKING

from .errors import (
    DTypeError,
    OutOfBlocksError,
    PagewiseError,
    RequestError,
    ShapeError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from .ops.paged_attention import PagedBatch, explain_paged_attention, paged_attention
    from .tiles.state import AttentionOutput

__all__ = [
    "AttentionOutput",
    "DTypeError",
    "OutOfBlocksError",
    "PagedBatch",
    "PagewiseError",
    "RequestError",
    "ShapeError",
    "UnsupportedError",
    "explain_paged_attention",
    "paged_attention",
]

# What needs torch comes when it is asked for: `pagewise --help` should not wait for it.
_HOMES = {
    "AttentionOutput": ".tiles.state",
    "PagedBatch": ".ops.paged_attention",
    "explain_paged_attention": ".ops.paged_attention",
    "paged_attention": ".ops.paged_attention",
}


if not TYPE_CHECKING:  # a type checker would take it to mean that every name exists

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name], __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

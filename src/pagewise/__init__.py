"""Attention, page by page and tile by tile."""

from .errors import (
    DTypeError,
    OutOfBlocksError,
    PagewiseError,
    RequestError,
    ShapeError,
    UnsupportedError,
)
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

"""Tiled attention over dense or ragged keys and values."""

from .api import attention, explain_attention
from .block_mask import BlockMask

__all__ = ["BlockMask", "attention", "explain_attention"]

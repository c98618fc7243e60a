"""Tiled attention over dense or ragged keys and values."""

from .api import attention, explain_attention

__all__ = ["attention", "explain_attention"]

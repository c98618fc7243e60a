"""Attention scores: a tiled product of queries and keys."""

from .api import attention_scores

__all__ = ["attention_scores"]

"""Scatter new keys and values into cache blocks."""

from .api import write_kv

__all__ = ["write_kv"]

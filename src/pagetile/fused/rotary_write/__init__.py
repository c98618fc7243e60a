"""From a merged projection to attention: head norms, rotary embedding and the cache write."""

from .api import Heads, rotate_and_write

__all__ = ["Heads", "rotate_and_write"]

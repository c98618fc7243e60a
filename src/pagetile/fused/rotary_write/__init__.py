"""From a merged projection to attention: head norms, rotary embedding and the cache write."""

from .api import rotate_and_write
from .problem import Heads

__all__ = ["Heads", "rotate_and_write"]

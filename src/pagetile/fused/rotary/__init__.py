"""Rotary position embedding of queries and keys in one launch. For ``models``, not public."""

from .api import rotate

__all__ = ["rotate"]

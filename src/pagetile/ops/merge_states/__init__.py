"""Combine attention over disjoint sets of keys."""

from .api import merge_states

__all__ = ["merge_states"]

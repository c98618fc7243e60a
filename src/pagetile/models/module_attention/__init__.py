"""Adapters for attention modules that do not call Transformers' attention interface."""

from .adapters import find_adapters, find_reference
from .families import MODEL_TYPES

__all__ = ["MODEL_TYPES", "find_adapters", "find_reference"]

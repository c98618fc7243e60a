"""The residual additions between a language model's layers, with the norms around them."""

from .api import add_norm

__all__ = ["add_norm"]

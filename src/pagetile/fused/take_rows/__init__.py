"""Look up rows of a table by index: embeddings, and angles of positions."""

from .api import take_rows

__all__ = ["take_rows"]

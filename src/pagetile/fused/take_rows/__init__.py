"""Rows of a table by their numbers: embeddings, and angles of positions."""

from .api import take_rows

__all__ = ["take_rows"]

"""Allocation, sharing and prefix look-up of cache blocks, in plain Python over block ids."""

from .block_pool import BlockPool
from .block_table import BlockTable
from .prefix_index import PrefixIndex

__all__ = ["BlockPool", "BlockTable", "PrefixIndex"]

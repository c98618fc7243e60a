"""Who holds which cache block, and what it contains: plain Python over plain integers."""

from .block_pool import BlockPool
from .block_table import BlockTable
from .prefix_index import PrefixIndex

__all__ = ["BlockPool", "BlockTable", "PrefixIndex"]

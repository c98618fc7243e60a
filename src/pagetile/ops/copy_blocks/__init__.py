"""Copy cache blocks: copy-on-write, and blocks to and from host memory."""

from .api import copy_blocks

__all__ = ["copy_blocks"]

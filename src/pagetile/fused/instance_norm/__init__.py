"""Instance norm, residual and activation of a U-Net's blocks. For ``integrations``, not public."""

from .api import instance_norm

__all__ = ["instance_norm"]

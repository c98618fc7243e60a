"""Swin models of MONAI, torchvision, timm and Transformers on ``pagetile.window_attention``."""

from .patching import patch, patched, unpatch
from .report import PatchReport

__all__ = ["PatchReport", "patch", "patched", "unpatch"]

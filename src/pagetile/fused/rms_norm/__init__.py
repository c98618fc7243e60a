"""The norms between a language model's layers, one launch each. For ``models``, not public."""

from .api import KINDS, Norm, rms_norm

__all__ = ["KINDS", "Norm", "rms_norm"]

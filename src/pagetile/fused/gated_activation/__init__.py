"""The activation of a gated feed-forward layer (SwiGLU, GeGLU) in one launch."""

from .api import ACTIVATIONS, gated_activation

__all__ = ["ACTIVATIONS", "gated_activation"]

"""A mixture of experts for few tokens, without waiting for the routing."""

from .api import ACTIVATIONS, moe_experts

__all__ = ["ACTIVATIONS", "moe_experts"]

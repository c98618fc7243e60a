"""Costs of attention, counted exactly: bytes, rooflines, memory plans, and pictures of them."""

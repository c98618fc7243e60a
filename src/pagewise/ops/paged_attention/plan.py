"""From a problem and a device to a plan: a pure function of host integers."""

from __future__ import annotations

from ...tiles.cpu.plan import SPLIT_SIZE, Plan, make_plan

__all__ = ["SPLIT_SIZE", "Plan", "make_plan"]

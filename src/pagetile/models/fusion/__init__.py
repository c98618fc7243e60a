"""Decoder layers as few launches, recognised by what they compute.

::

    trace       run the model and each of its layers on random numbers, and note who computes what
    structure   find the role of each module, and compare the formula with what was noted
    weights     lay q, k, v and gate, up side by side; the parameters become views
    layer       the forward that runs instead: at most 8 launches
    ends        what comes before the first layer and after the last: angles, norm, logits

A layer that computes anything else is left alone.
"""

from .fuse import Fusion, fuse

__all__ = ["Fusion", "fuse"]

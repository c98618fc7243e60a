"""Fuses decoder layers, recognised by their results, into few launches.

::

    trace       run the model and each of its layers on random inputs, and record all modules' calls
    structure   find the role of each module, and compare the role's formula with the records
    weights     merge the weights of q, k, v and of gate, up; the parameters become views
    layer       the fused forward of a layer, at most 8 launches
    ends        embedding, angles, last norm and logits

A layer with another structure is not changed.
"""

from .fuse import Fusion, fuse

__all__ = ["Fusion", "fuse"]

"""Fused kernels of the models that the engine drives and of Swin networks; no public functions.

Each folder is built like one in ``ops``: ``api``, ``reference`` and a Triton kernel, and a
``problem`` where ``rows`` does not describe its calls.
"""

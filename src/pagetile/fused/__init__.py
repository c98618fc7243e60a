"""Fused kernels that models and Swin networks run through; private, no public operations.

Each folder is built like one in ``ops``: ``api``, ``problem``, ``reference`` and a Triton kernel.
"""

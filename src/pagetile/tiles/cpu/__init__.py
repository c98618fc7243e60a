"""Numba tiles: explicit vectors, micro-kernels on them, and threads."""

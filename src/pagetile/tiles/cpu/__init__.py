"""Shared by Numba kernels: explicit vectors, micro-kernels on them, and threads."""

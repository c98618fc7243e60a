"""Names of Gluon that differ between the releases of Triton that are supported."""

from triton.experimental.gluon import language as gl

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Waits for all threads of a partition: ``thread_barrier`` in Triton 3.6, ``barrier`` in 3.7."""

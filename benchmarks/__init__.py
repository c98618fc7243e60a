"""Benchmarks: ``python -m benchmarks list | run | verify | compare``."""

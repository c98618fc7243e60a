"""Swin models of other frameworks, and vLLM's operators, on pagetile's kernels."""

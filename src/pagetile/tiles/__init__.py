"""What two or more kernels share: the attention state, and tile arithmetic per machine."""

"""What the Triton kernels of two or more operations share."""

"""What the Gluon kernels for Hopper GPUs share: rings of tiles, tile order, the forward pass."""

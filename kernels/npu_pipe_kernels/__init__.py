"""Fused compute-communication kernels that leave their weight gradients to W; see README.md."""

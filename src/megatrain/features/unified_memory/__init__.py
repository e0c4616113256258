"""Compute that works in host memory: an integrated GPU, or the CPU."""

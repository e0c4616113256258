"""Saved inputs of layers wait for backward in host memory."""

"""Exact clipping without a gradient in host memory: backward runs twice."""

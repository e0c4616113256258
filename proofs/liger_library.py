"""Functions of a device's library, in Triton's own words."""

# mypy: ignore-errors

import triton.language as tl


def rsqrt(x):
    return tl.rsqrt(x)


def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1

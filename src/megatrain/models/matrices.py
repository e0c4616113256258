"""Matrices of hidden layers, told by name and shape. Without torch: a plan counts them too.

Muon takes them as the whole matrices that they are; embeddings, the output projection, norms and
biases are not among them. A param with three dimensions holds the matrices of experts, one behind
the other. A convolution over single channels (channels, 1, width) has no matrix in it.
"""

from __future__ import annotations


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a param is a matrix, or several, and not a norm or a bias."""
    module, _, leaf = name.rpartition(".")
    is_norm = "norm" in module.rpartition(".")[2]  # of heads, say: (heads, head size)
    return len(shape) >= 2 and not leaf.endswith("bias") and not is_norm


def is_hidden_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a param of a layer is a matrix, or those of experts."""
    return is_matrix(name, shape) and len(shape) <= 3 and min(shape[-2:]) > 1

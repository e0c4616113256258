"""Matrices of hidden layers, told by name and shape. Without torch: a plan counts them too.

Muon takes them as the whole matrices that they are; embeddings, the output projection, norms and
biases are not among them. A param with three dimensions holds the matrices of experts, one behind
the other. A convolution over single channels (channels, 1, width) has no matrix in it.
"""

from __future__ import annotations


def is_norm_or_bias(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a param is of a norm, or a bias; neither has weight decay.

    Names of norms vary (`ln_1`, `norm_f`, `input_layernorm`), but their vector is called `weight`.
    Other vectors (attention sinks, `A_log` and `D` of state spaces) have names of their own.
    """
    module, _, leaf = name.rpartition(".")
    is_norm = "norm" in module.rpartition(".")[2]  # of heads, say: (heads, head size)
    return is_norm or leaf.endswith("bias") or (len(shape) < 2 and leaf == "weight")


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a param is a matrix, or several, and not a norm or a bias."""
    return len(shape) >= 2 and not is_norm_or_bias(name, shape)


def is_hidden_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a param of a layer is a matrix, or those of experts."""
    return is_matrix(name, shape) and len(shape) <= 3 and min(shape[-2:]) > 1

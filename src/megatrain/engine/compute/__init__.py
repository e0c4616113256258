"""Compute with a model's own code: what the ops of the compute lane do to tensors.

inputs.py            the tensors of a batch, sent to the device in one copy
front_and_tail.py    the model's code before its layers and behind them
layers.py            a layer forward, and back with a recompute, at once or over tiles of tokens
kept.py              a layer whose activations stay from forward to backward
head.py              from the last hidden states to the loss, and back
graph.py             the piece of autograd's graph that one op builds, and frees
attention_kernel.py  the same attention kernel in forward and recompute
fused.py             fused kernels of others
products.py          products of linear modules in fp8
"""

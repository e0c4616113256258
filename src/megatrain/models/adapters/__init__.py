"""Adapters: few trained params over a model whose own params are frozen.

lora.py     low-rank products beside the linear modules of decoder layers
params.py   the same beside other params, those of experts that share one tensor above all
"""

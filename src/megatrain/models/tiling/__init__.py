"""Layers over tiles of tokens: cut at the one place where tokens meet.

trees.py      nested arguments: their tensors by path
cut.py        where a layer is cut, and its three parts as functions
joining.py    from what tiles hand over to what the mixer gets
likeness.py   a layer with weights that cost nothing, to learn from
probe.py      finds the cut of a layer, and proves it
"""

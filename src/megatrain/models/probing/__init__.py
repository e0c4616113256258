"""Readers of a model's own forward, so that none of its code is copied or known by family.

dispatch.py       hands every operation of torch to a function: the one mode behind all readers
stand_ins.py      modules and weights that mark where one part of a model ends, the next begins
boundaries.py     which modules and tensors are before the layers, after them, or never read
logits.py         what a model does to its logits, traced once
tile_cuts.py      where a layer can run over tiles of tokens, found and proved
host_answers.py   what a front asks about its inputs, answered by the host and not by the device

docs/forward.md says it to users: what is done to a forward, when, and what is never changed.
"""

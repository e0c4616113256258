"""The engine: what each op of a step does to tensors, and when bytes move.

Actions speak to three doors, and each hides where its bytes are and how they move:

    weights.py     fetch a block, give its params to compute
    gradients/     add up, drain, read on the host
    updates.py     norm, clip, apply

optional.py names the parts that only some steps have.
"""

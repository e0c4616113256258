"""When bytes move: what each op of a step does to tensors.

Actions speak to three doors, and each hides where its bytes are and how they move:

    weights.py     fetch a block, give its params to compute. To come: pages of experts, tiles
    gradients.py   add up, drain, read on the host. To come: ranks that own a part
    updates.py     norm, clip, apply. To come: 8-bit states, a disk tier, ranks that own a part
"""

"""What the compute lane does with one block and one micro-batch, on whatever device it has.

edges.py    the model's front, tail and scores, without questions to the device
layers.py   a layer forward, and back with a recompute
tiles.py    the same over tiles of tokens, but for attention
head.py     from the last hidden states to the loss, and back
tail.py     what of the model is between its last layer and the projection
graph.py    the piece of autograd's graph that an op builds
"""

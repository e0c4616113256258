"""Gradients between compute and the optimizer: the door, and one class for each way of adding up.

door.py         the one class that the engine knows: it chooses what follows once
slots.py        the memory of gradient slots, and where params are in it
home_sums.py    compute shares the host's memory: sums are where the optimizer reads them
slot_sums.py    a device that copies: sums in slots, then by the outbox to the host
directions.py   what becomes of the gradients of matrices, on the device once more
outbox.py       a sum takes the dtype of the host on its way there
"""

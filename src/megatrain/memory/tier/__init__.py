"""The disk tier: what of a block is on disk between its updates, and how it gets there and back.

scratch_file.py   the file, its regions, and hashed reads and writes
ring.py           host buffers between the file and updates
filling.py        writing a loaded or restored state into the file, chunk by chunk
"""

"""A model seen as a chain: its layers, what is before and after them, and what is beside it."""

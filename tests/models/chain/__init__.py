"""Laws of a model seen as a chain."""

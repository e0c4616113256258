"""A step as data: what is done, in which order, and what waits for what."""

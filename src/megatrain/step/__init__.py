"""A step as data: its ops, their order, and their waits."""

"""Crashes of every kind, and what is left after them. See `python -m proofs.crash --help`."""

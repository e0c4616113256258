"""Ranks that own a part of each block."""

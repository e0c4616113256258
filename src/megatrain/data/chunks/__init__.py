"""Chunks: data of any size, of which a few parts at a time are in memory."""

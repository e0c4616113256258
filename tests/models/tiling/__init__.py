"""Laws of layers over tiles of tokens."""

"""A head that multiplies by the embedding's table."""

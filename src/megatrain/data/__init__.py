"""Data: files to rows, rows to tokens, tokens to micro-batches, in a seeded order."""

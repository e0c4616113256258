"""What goes in: files to rows, rows to tokens, tokens to micro-batches, in an order of our own."""

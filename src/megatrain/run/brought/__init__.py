"""What a program brings to a run besides a config: rows, a loss, callbacks, metrics."""

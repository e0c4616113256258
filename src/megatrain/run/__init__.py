"""The loop: batch, step, log. The only place where all parts meet."""

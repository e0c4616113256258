"""Object storage that fails: what a run has acknowledged is there, whole, and of one writer."""

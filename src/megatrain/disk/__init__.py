"""Model folders and checkpoints on disk: read, verified, written."""

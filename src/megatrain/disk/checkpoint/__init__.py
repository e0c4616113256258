"""Checkpoints: resumable state on disk."""

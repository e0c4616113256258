"""Runs in a bucket: what happened to them, their checkpoints, and who may write."""

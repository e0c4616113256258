"""Evaluation: losses, answers and texts of a model."""

"""Losses: from hidden states to log-probabilities to gradients."""

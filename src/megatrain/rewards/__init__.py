"""Training on rewards: answers that a model draws, and what to make of them."""

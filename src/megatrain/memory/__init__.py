"""Host memory: where weights, masters, moments and gradients are kept."""

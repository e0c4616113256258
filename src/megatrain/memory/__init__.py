"""Where bytes live: the host home of weights, masters, moments and gradients."""

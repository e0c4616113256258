"""`megatrain gpu-check --long`: the questions that a rented device can answer in 25 minutes."""

"""How weights change: optimizers, the host kernel and the learning rate."""

"""How weights change: the host kernel and the learning rate."""

"""The load-balancing loss of experts, of all layers and all ranks."""

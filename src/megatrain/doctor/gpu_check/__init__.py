"""`megatrain gpu-check`: is this device right, is it fast, and if not, what to try."""

"""Doctor: measures the speed and memory of this machine."""

"""Steps on torch's own CUDA build, on a device without a card: laws over what is called."""

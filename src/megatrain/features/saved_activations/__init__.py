"""Top layers whose activations stay on the device: backward does not compute them again."""

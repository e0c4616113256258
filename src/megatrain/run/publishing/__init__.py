"""A run for others to see: its model on the Hub, with a model card."""

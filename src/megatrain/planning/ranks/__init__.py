"""A plan for several ranks: what each has of the model, of its host and of the network."""

"""A model as plain numbers: the sizes of its tensors, from its dimensions or its skeleton."""

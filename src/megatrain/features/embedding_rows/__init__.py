"""The rows of a step's tokens go to the device, in place of the embedding's full table."""

"""Other tools: what they call things, and their configs translated with an account of every key."""

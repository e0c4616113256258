"""Other tools: the names of their settings, and their configs translated key by key."""

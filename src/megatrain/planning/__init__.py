"""Will it fit, how fast will it be, and what limits it."""

"""Doctor: measures what this machine can do."""

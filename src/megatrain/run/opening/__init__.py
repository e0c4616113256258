"""Opening a run: from a config to an engine with data."""

"""One run on several ranks."""

"""A run as one page to look at and to send."""

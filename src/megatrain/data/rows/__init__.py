"""Rows: from files and the Hub to rows of a known shape."""

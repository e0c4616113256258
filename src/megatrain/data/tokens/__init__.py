"""Tokens: rows tokenized once and kept on disk."""

"""Tokens: rows tokenised once and kept on disk."""

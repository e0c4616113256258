"""Ranks: processes that divide one store among them, and what they say to each other."""

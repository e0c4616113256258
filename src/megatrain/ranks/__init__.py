"""Ranks: processes that divide one store among them, and their communication."""

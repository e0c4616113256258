"""Configs of other tools, translated, with an account of every key."""

from megatrain.migration.translate import Line, Migration, migrate, tool_named

__all__ = ["Line", "Migration", "migrate", "tool_named"]

"""Values that settings and options of the command line share; importing them costs nothing."""

from __future__ import annotations

from typing import Literal

RowFormat = Literal[
    "auto", "tokens", "messages", "alpaca", "prompt_completion", "text", "pairs", "kto"
]
"""The formats of rows; data/rows/formats.py has everything else about each."""
PreferenceFormat = Literal["pairs", "kto"]
"""The formats whose rows are two answers each, to be compared."""

"""A command that prints one of several tables: benchmarks/reach.py, benchmarks/scale.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping


def print_table(tables: Mapping[str, Callable[[], Iterator[str]]]) -> None:
    """Print the table that the command line names, or say which there are."""
    wanted = sys.argv[1] if len(sys.argv) == 2 else ""
    if wanted not in tables:
        sys.exit(f"give one of: {', '.join(tables)}")
    print("\n".join(tables[wanted]()))

"""Modules that are imported when they are first used.

Most runs use few of all capabilities. A package that has many names those that only some runs need
in a table, `optional.py`, and asks it for them: what a run does not use is never imported, and who
follows a plain step does not meet it.

    from megatrain.engine import optional
    optional.pages.ExpertPages(...)          # imports megatrain.engine.pages, unless it is there

Type checkers read the same table under TYPE_CHECKING. Annotations name a class of an optional
module directly, imported under TYPE_CHECKING too.

Law (tests/test_late.py): every table names for type checkers what it imports.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType


def imported_late(table: str, *homes: str) -> Callable[[str], ModuleType]:
    """Return the `__getattr__` of a table: a module of `homes`, by the last part of its name."""
    by_name = {home.rpartition(".")[2]: home for home in homes}
    assert len(by_name) == len(homes), f"{table} has two modules of one name"

    def attribute(name: str) -> ModuleType:
        if name not in by_name:
            raise AttributeError(f"module {table!r} has no attribute {name!r}")
        return import_module(by_name[name])

    return attribute

"""Tables of modules that are imported when they are first used."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from megatrain.late import imported_late

SOURCE = Path(__file__).parents[1] / "src"
TABLES = sorted(
    ".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in SOURCE.rglob("optional.py")
)


def _typed(source: str) -> dict[str, str]:
    """Return the modules that type checkers see in a table, by name."""
    (block,) = (node for node in ast.parse(source).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {
        alias.asname or "": f"{node.module}.{alias.name}"
        for node in imports
        for alias in node.names
    }


def _named(source: str) -> set[str]:
    """Return the modules that a table imports."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return {str(arg.value) for call in calls for arg in call.args if isinstance(arg, ast.Constant)}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_for_type_checkers_what_it_imports(name: str) -> None:
    table = import_module(name)
    source = Path(str(table.__file__)).read_text()
    typed = _typed(source)
    assert set(typed.values()) == _named(source)
    for attribute, home in typed.items():
        found = getattr(table, attribute)
        assert isinstance(found, ModuleType)
        assert found.__name__ == home


def test_a_name_that_a_table_lacks_is_an_error() -> None:
    table = imported_late("megatrain.some.optional", "megatrain.text")
    assert table("text").__name__ == "megatrain.text"
    with pytest.raises(AttributeError, match=r"megatrain\.some\.optional.*no attribute 'texts'"):
        table("texts")


def test_a_plain_engine_imports_nothing_optional() -> None:
    """The count of test_architecture.py is by sources; this is by the interpreter."""
    engine = import_module("megatrain.engine.optional")
    names = sorted(_named(Path(str(engine.__file__)).read_text()))
    code = f"import sys, megatrain.engine.engine; print(*set({names}) & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []

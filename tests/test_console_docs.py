"""Every prediction on a page comes from a command, which says the same.

`python docs/console.py` writes what the commands print.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs"
TOOL: dict[str, Any] = runpy.run_path(str(DOCS / "console.py"))
CASES = [
    pytest.param(command, printed, id=f"{page.name}-{number}")
    for page in TOOL["PAGES"]
    for number, (command, printed) in enumerate(TOOL["commands"](page.read_text()))
]


@pytest.mark.merge
@pytest.mark.parametrize(("command", "printed"), CASES)
def test_commands_print_what_the_page_says(command: str, printed: str) -> None:
    found = TOOL["run"](command)
    assert TOOL["shortened"](found, printed) == printed, "run: python docs/console.py"
    tables = [line for line in found.splitlines() if not line.startswith("fits: ")]
    assert max(map(len, tables)) <= 80

"""Every figure of planner and long_context comes from a command, which says the same.

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
    pytest.param(command, printed, id=f"{page}-{number}")
    for page in TOOL["PAGES"]
    for number, (command, printed) in enumerate(TOOL["commands"]((DOCS / page).read_text()))
]


@pytest.mark.merge
@pytest.mark.parametrize(("command", "printed"), CASES)
def test_commands_print_what_the_page_says(command: str, printed: str) -> None:
    found = TOOL["run"](command)
    assert TOOL["shortened"](found, printed) == printed, "run: python docs/console.py"
    tables = [line for line in found.splitlines() if not line.startswith("fits: ")]
    assert max(map(len, tables)) <= 80


def test_each_page_has_commands() -> None:
    for page in TOOL["PAGES"]:
        text = (DOCS / page).read_text()
        assert text.count("```console") == len(list(TOOL["commands"](text))) >= 3


def test_another_figure_would_be_noticed() -> None:
    shortened = TOOL["shortened"]
    assert shortened("a 1\nb 2\nc 3\n", "a 1\n...\n") == "a 1\n...\n"
    assert shortened("a 9\nb 2\nc 3\n", "a 1\n...\n") == "a 9\n...\n"
    assert shortened("a 1\nb 2\n", "a 1\n") == "a 1\nb 2\n"

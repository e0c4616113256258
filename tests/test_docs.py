"""Pages made from code say what the code says; `python docs/generate.py` writes them."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import load_config
from megatrain.config.data_settings import Source
from megatrain.config.settings import SECTIONS

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def generate() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "generate.py"))


@pytest.mark.parametrize("name", ["config.md", "errors.md", "migration.md"])
def test_pages_are_up_to_date(name: str, generate: dict[str, Any]) -> None:
    assert (DOCS / name).read_text() == generate["PAGES"][name](), "run: python docs/generate.py"


def test_every_key_has_a_type_and_a_default(generate: dict[str, Any]) -> None:
    rows = [line for line in generate["config_page"]().splitlines() if line.startswith("| `")]
    sections = [*SECTIONS.values(), Source]
    assert len(rows) == sum(len(section.model_fields) for section in sections)
    for row in rows:
        assert all(cell.strip() for cell in row.split("|")[1:-1]), row


def test_a_changed_key_would_be_noticed(
    generate: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    field = SECTIONS["train"].model_fields["seed"]
    monkeypatch.setattr(field, "description", "Something else.")
    assert (DOCS / "config.md").read_text() != generate["config_page"]()


def test_the_shortest_config_of_the_page_loads(tmp_path: Path) -> None:
    text = (DOCS / "config.md").read_text().split("```yaml\n")[1].split("```")[0]
    (tmp_path / "run.yaml").write_text(text)
    assert load_config(tmp_path / "run.yaml").run_dir == "runs/Qwen3-8B"

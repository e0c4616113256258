"""Pages made from code say what the code says; `python docs/generate.py` writes them."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import megatrain
from megatrain.config import Config, load_config
from megatrain.errors import ConfigError
from testkit.worlds import Case, make_batch, world_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def generate() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "generate.py"))


@pytest.mark.parametrize(
    "name", ["cli.md", "config.md", "errors.md", "migration.md", "timeline.svg"]
)
def test_pages_are_up_to_date(name: str, generate: dict[str, Any]) -> None:
    assert (DOCS / name).read_text() == generate["PAGES"][name](), "run: python docs/generate.py"


@pytest.mark.merge
def test_the_table_of_machines_is_up_to_date(generate: dict[str, Any]) -> None:
    table, text = generate["fits_table"](), generate["README"].read_text()
    assert generate["with_table"](text, table) == text, "run: python docs/generate.py"
    assert generate["with_table"](text, table.replace("yes", "no")) != text


CONFIG_PAGE = (DOCS / "config.md").read_text()


def _loaded(text: str, folder: Path) -> Config:
    (folder / "run.yaml").write_text(text)
    return load_config(folder / "run.yaml")


EXAMPLES: dict[str, Callable[[Config], bool]] = {
    "Fine-tuning": lambda config: config.loss.name == "next_token" and config.lora.rank is None,
    "Adapters": lambda config: config.lora.rank == 16,
    "Preferences: DPO": lambda config: config.loss.name == "dpo",
    "Preferences: KTO": lambda config: config.loss.name == "kto",
    "Rewards": lambda config: config.step_tokens == 8 * 8 * 1536,
    "Continued pre-training": lambda config: config.data.overlong == "split",
    "Long rows": lambda config: config.data.max_length == 131072,
    "Several GPUs": lambda config: config.train.batch_tokens == 524288,
}


def test_the_examples_of_the_config_page_load(tmp_path: Path) -> None:
    found = re.findall(r"### (.*?)\n.*?```yaml\n(.*?)```", CONFIG_PAGE, re.S)
    assert [name for name, _ in found] == list(EXAMPLES)
    for name, text in found:
        assert EXAMPLES[name](_loaded(text, tmp_path)), name
        with pytest.raises(ConfigError, match="unknown key"):
            _loaded(text.replace("data:", "dta:"), tmp_path)


PYTHON = (DOCS / "python.md").read_text()


def test_every_public_name_is_explained_and_every_name_used_is_public() -> None:
    used = set(re.findall(r"\bmt\.(\w+)", PYTHON))
    assert used == set(megatrain.__all__)


def _code_with(text: str) -> dict[str, Any]:
    """Execute the one example of the page that has `text`; return its names."""
    (code,) = [one for one in re.findall(r"```python\n(.*?)```", PYTHON, re.S) if text in one]
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def test_the_loss_over_logits_is_short_and_trains() -> None:
    made = _code_with("class Margin")
    body = PYTHON.partition("class Margin")[2].partition("```")[0]
    assert len(body.splitlines()) < 20
    world, batch = world_of("llama in fp32"), make_batch(((2, 6), (3, 5)), seed=0)
    with world.engine(Case(sort="", steps=(), update="late"), loss=made["Margin"]()) as engine:
        losses = [engine.step(batch).loss for _ in range(5)]
    assert losses == sorted(losses, reverse=True)


def test_the_step_in_two_phases_trains() -> None:
    take = _code_with("def step_with_entropy")["step_with_entropy"]
    world, batch = world_of("llama in fp32"), make_batch(((2, 6), (3, 5)), seed=0)
    with world.engine(Case(sort="", steps=(), update="late")) as engine:
        losses = [take(engine, batch).loss for _ in range(5)]
    assert losses == sorted(losses, reverse=True)


def test_the_config_of_the_page_is_accepted() -> None:
    (given,) = re.findall(r"config = (mt\.Config\(.*?\n    \))", PYTHON, re.S)
    assert eval(given, {"mt": megatrain}).train.batch_tokens == 32768  # noqa: S307


def _pages(nav: list[Any] | dict[str, Any] | str) -> list[str]:
    """Return the pages of a part of mkdocs.yml's `nav`, in order."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in _pages(part)]


def test_the_site_lists_every_page_once() -> None:
    listed = _pages(yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text())["nav"])
    assert sorted(listed) == sorted(path.name for path in DOCS.glob("*.md")), "mkdocs.yml: nav"


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_links_of_a_page_stay_in_the_site(page: Path) -> None:
    """The site is built strictly: it has no files outside docs."""
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert ".." not in target, f"{page.name}: {target}"
        assert (DOCS / target).exists(), f"{page.name}: {target}"


def test_links_of_other_pages_lead_somewhere() -> None:
    root = DOCS.parent
    pages = [*root.glob("*.md"), *root.glob("examples/**/*.md")]
    missing = [
        (page.name, target)
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert missing == []


def test_the_reference_has_every_public_name() -> None:
    names = re.findall(r"^::: megatrain\.(\w+)$", PYTHON, re.M)
    assert sorted([*names, "__version__"]) == sorted(megatrain.__all__)

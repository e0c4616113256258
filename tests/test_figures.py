"""One source for every figure: README, site, page of fits and recipes say what `estimate` says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from megatrain.planning.estimate import Estimate, estimate
from megatrain.planning.prediction import predicted_speed, predicted_time

ROOT = Path(__file__).parents[1]
FITS: dict[str, Any] = runpy.run_path(str(ROOT / "docs/fits.py"))
README = ROOT / "README.md"
PAGES = (README, ROOT / "docs/index.md")
RECIPE = ROOT / "examples/recipes/qwen3-8b-128gb.yaml"
TEXTS = {path: path.read_text() for path in (*PAGES, RECIPE)}
COMMAND = "megatrain estimate Qwen/Qwen3-8B --gpu 4090 --ram 128GB"
SAYS_SPEED = re.compile(r"[\d.]+k? to [\d.]+k? tok/s")


@pytest.fixture(scope="module")
def found() -> Estimate:
    """The plan that every page shows."""
    return estimate("Qwen/Qwen3-8B", gpu="4090", ram="128GB", tokens="10M")


def _contradictions(found: Estimate, texts: dict[Path, str]) -> list[str]:
    """Return the places that say another speed or time of this plan than `estimate` does."""
    assert found.seconds is not None
    speed, time = predicted_speed(found.tokens_per_s), predicted_time(found.seconds)
    said: dict[str, tuple[str, str]] = {}
    readme = texts[README]
    (row,) = re.findall(
        r"\| Qwen3-8B \| RTX 4090, 128GB \| yes \| \w+ \| (.*?) \| (.*?) \|", readme
    )
    said["table of README.md"] = f"{row[0]} tok/s", row[1]
    (ours,) = re.findall(r"\| \*\*MegaTrain\*\* \|.*8B on a 4090: (.*), predicted \|\n", readme)
    said["comparison of README.md"] = ours, time
    for page in PAGES:
        (block,) = re.findall(rf"\$ {COMMAND}\n(.*?)```", texts[page], re.S)
        speeds = set(SAYS_SPEED.findall(block))
        said[f"command of {page.name}"] = " and ".join(sorted(speeds)), time
    comment = texts[RECIPE].partition("model:")[0].replace("\n#  ", "")
    (recipe,) = re.findall(r"fits: (.*? tok/s), 10M tokens in (.*?) for", comment)
    said["recipe"] = recipe
    plans = FITS["read_data"](FITS["DATA"].read_text())
    row = FITS["answer"](plans, "Qwen/Qwen3-8B", "RTX 4090", "all weights", 128)
    said["fits.md"] = (
        predicted_speed(row.tokens_per_s),
        FITS["_cell"](plans, "Qwen/Qwen3-8B", "RTX 4090", "all weights", 128).partition("<")[0],
    )
    return [where for where, words in said.items() if words != (speed, time)]


def test_all_pages_say_what_estimate_says(found: Estimate) -> None:
    assert _contradictions(found, TEXTS) == [], "run: docs/generate.py, console.py, recipes.py"
    speed = predicted_speed(found.tokens_per_s)
    for before, where in (("fits: ", "command"), ("8B on a 4090: ", "comparison")):
        old = TEXTS[README].replace(f"{before}{speed}", f"{before}1.4k to 2.6k tok/s")
        assert _contradictions(found, TEXTS | {README: old}) == [f"{where} of README.md"]


def test_no_page_has_a_predicted_speed_as_one_number() -> None:
    """Published and measured speeds are numbers; they say `tokens/s`, predictions `tok/s`."""
    single = re.compile(r"(?<!to )(?<![\d.,k])[\d.,]+[kM]? (?:tokens/s|tok/s)[ ,]*\(?predicted")
    pages = [*PAGES, *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")]
    pages += (ROOT / "examples/recipes").glob("*.yaml")
    wrong = {page.name: single.findall(page.read_text()) for page in pages}
    assert {name: words for name, words in wrong.items() if words} == {}
    assert single.search("fits: 1,890 tokens/s (predicted)")

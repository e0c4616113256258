"""The page "What fits on my machine": its answers are those of `estimate`.

`python docs/fits.py` writes them.
"""

from __future__ import annotations

import copy
import json
import random
import runpy
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import load_config
from megatrain.planning.catalog.known_models import find_known_model
from megatrain.planning.catalog.reference_machines import MACHINES
from megatrain.planning.estimate import estimate
from megatrain.planning.machine.reserve import left_by_system
from megatrain.planning.prediction import predicted_price, predicted_speed, predicted_time

DOCS = Path(__file__).parents[1] / "docs"
WRITER: dict[str, Any] = runpy.run_path(str(DOCS / "fits.py"))
FOUND: dict[str, Any] = WRITER["read_data"](WRITER["DATA"].read_text())
Question = tuple[str, str, str, int]
GIB = 1 << 30
QUICK: Question = ("Qwen/Qwen3-1.7B", "none", "adapters", 64)


def _figures(found: dict[str, Any], question: Question) -> tuple[Any, ...] | None:
    """Return the figures of the file, whatever the size from which on they hold; None: no fit."""
    got = WRITER["answer"](found, *question)
    return None if isinstance(got, str) else astuple(got)[1:]


def _wrong(found: dict[str, Any], asked: Iterable[Question], folder: Path) -> list[Question]:
    """Return the questions that `estimate` answers otherwise."""
    wrong = []
    for question in asked:
        model, card, method, ram = question
        config = folder / "run.yaml"
        row = WRITER["answer"](found, *question)
        state = WRITER["EXACT"] if isinstance(row, str) else row.states
        config.write_text(WRITER["config_of"](model, method, state))
        said = estimate(str(config), gpu=card, ram=f"{ram}GB")
        figures = astuple(WRITER["row_of"](said.plan, ram))[1:] if said.fits else None
        if figures != _figures(found, question):
            wrong.append(question)
    return wrong


def _twenty() -> list[Question]:
    """Return sixteen questions with a plan, of all kinds, and four without."""
    fits: dict[bool, list[Question]] = {True: [], False: []}
    for question in WRITER["questions"]():
        fits[_figures(FOUND, question) is not None].append(question)
    chosen = random.Random(20)
    return [*chosen.sample(fits[True], 16), *chosen.sample(fits[False], 4)]


def test_an_answer_is_what_estimate_says(tmp_path: Path) -> None:
    assert _wrong(FOUND, [QUICK], tmp_path) == [], "run: python docs/fits.py"


@pytest.mark.merge
@pytest.mark.parametrize("question", _twenty(), ids=str)
def test_twenty_answers_are_what_estimate_says(question: Question, tmp_path: Path) -> None:
    assert _wrong(FOUND, [question], tmp_path) == [], "run: python docs/fits.py"


def test_models_and_cards_are_those_of_the_catalogs() -> None:
    prices = {machine.name: machine.rent for machine in MACHINES} | {"none": 0.0}
    for card, facts in FOUND["cards"].items():
        assert facts["price"] == prices[card], "run: python docs/fits.py --tables"
    for model, params in FOUND["models"].items():
        assert params == find_known_model(model).published_params


def test_the_configs_of_the_page_load(tmp_path: Path) -> None:
    for method in WRITER["METHODS"]:
        (tmp_path / "run.yaml").write_text(WRITER["config_of"]("Qwen/Qwen3-8B", method))
        config = load_config(tmp_path / "run.yaml")
        assert (config.lora.rank == 16) == (method == "adapters")
        assert (config.loss.name == "dpo") == (method == "DPO")
    assert FOUND["methods"] == WRITER["METHODS"], "run: python docs/fits.py"


def test_the_tables_say_what_the_file_says() -> None:
    text = WRITER["PAGE"].read_text()
    assert WRITER["page"](text, FOUND) == text, "run: python docs/fits.py --tables"
    spoiled = copy.deepcopy(FOUND)
    model, card, method, _ = WRITER["DEFAULT"]
    spoiled["answers"][model][card][method][-1][1] /= 2
    assert WRITER["page"](text, spoiled) != text


def _priced(found: dict[str, Any]) -> list[tuple[str, str, str, int]]:
    """Return the cells of the tables that have a price although the plan needs a larger host."""
    wrong = []
    for model in WRITER["MODELS"]:
        for method in ("all weights", "adapters"):
            for card, ram in WRITER["SHOWN"]:
                row = WRITER["answer"](found, model, card, method, ram)
                cell = WRITER["_cell"](found, model, card, method, ram)
                rented = next((each for each in MACHINES if each.name == card), None)
                if isinstance(row, str) or rented is None or "$" not in cell:
                    continue
                if row.host > left_by_system(rented.rent_ram_gib * GIB) / GIB + 0.01:
                    wrong.append((model, card, method, ram))
    return wrong


def test_no_plan_has_the_price_of_a_machine_that_is_too_small_for_it() -> None:
    assert _priced(FOUND) == []
    assert "$" not in WRITER["_cell"](FOUND, "Qwen/Qwen3-8B", "RTX 4090", "all weights", 128)
    assert "$" in WRITER["_cell"](FOUND, "Qwen/Qwen3-8B", "RTX 3090", "all weights", 64)
    spoiled = copy.deepcopy(FOUND)
    for card in spoiled["cards"].values():
        card["price_host"] = 1e6
    assert ("Qwen/Qwen3-8B", "RTX 4090", "all weights", 128) in _priced(spoiled)


def _shown_by_the_form(asked: list[tuple[Any, ...]], *page: str, script: str | None = None) -> Any:
    """Return what the page's script shows; skip the test where there is no node to run it."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node runs the script of the page")
    words = [str(WRITER["DATA"]), script or str(DOCS / "fits.js"), json.dumps(asked), *page]
    program = Path(__file__).with_name("fits_page.js")
    done = subprocess.run([node, program, *words], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_form_shows_the_ranges_of_the_planner() -> None:
    asked = [question for question in WRITER["questions"]() if _figures(FOUND, question)]
    asked = random.Random(3).sample(asked, 200)
    shown = _shown_by_the_form([(*question, 0.5) for question in asked])
    for question, page in zip(asked, shown, strict=True):
        row = WRITER["answer"](FOUND, *question)
        seconds = FOUND["tokens"] / row.tokens_per_s
        assert page["verdict"] == f"Fits: {predicted_speed(row.tokens_per_s)}, predicted", question
        assert page["figures"]["10M tokens take"] == predicted_time(seconds), question
        price = f"{predicted_price(seconds / 3600 * 0.5)} at $0.5 an hour"
        assert page["figures"]["Price"] == price, question


def test_the_front_page_has_the_same_form() -> None:
    asked = [("Qwen/Qwen3-8B", "RTX 4090", "all weights", ram, None) for ram in (64, 128)]
    for front, page in zip(
        _shown_by_the_form(asked, "front"), _shown_by_the_form(asked), strict=True
    ):
        assert (front["verdict"], front["figures"]) == (page["verdict"], page["figures"])
    index = (DOCS / "index.md").read_text()
    assert '<div id="fits">' in index
    assert index.index("fits_data.js") < index.index('src="fits.js"')


def test_the_form_has_no_price_of_a_machine_that_is_too_small(tmp_path: Path) -> None:
    fits = ("Qwen/Qwen3-8B", "RTX 3090", "all weights", 64, None)
    larger = ("Qwen/Qwen3-8B", "RTX 4090", "all weights", 128, None)
    priced, unpriced, again = _shown_by_the_form([fits, larger, fits])
    assert priced["figures"]["Price"].endswith("at $0.22 an hour (typical)")
    assert "--price 0.22" in priced["command"]
    assert unpriced["figures"]["Price"].startswith("none: hosts with a typical price have less")
    assert "--price" not in unpriced["command"]
    assert again == priced
    text = (DOCS / "fits.js").read_text().replace("row.host <= typical.price_host", "true")
    (tmp_path / "fits.js").write_text(text)
    (spoiled,) = _shown_by_the_form([larger], script=str(tmp_path / "fits.js"))
    assert "$" in spoiled["figures"]["Price"], "a price of any host would be noticed"

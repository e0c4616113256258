"""The page "What fits on my machine": its answers are those of `estimate`.

`python docs/fits.py` writes them.
"""

from __future__ import annotations

import copy
import random
import runpy
from collections.abc import Iterable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import load_config
from megatrain.planning.catalog.known_models import find_known_model
from megatrain.planning.catalog.reference_machines import MACHINES
from megatrain.planning.estimate import estimate

DOCS = Path(__file__).parents[1] / "docs"
WRITER: dict[str, Any] = runpy.run_path(str(DOCS / "fits.py"))
FOUND: dict[str, Any] = WRITER["read_data"](WRITER["DATA"].read_text())
Question = tuple[str, str, str, int]
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

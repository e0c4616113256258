"""Recipes: each loads, and its comment and its row are those of its plan.

`python docs/recipes.py` writes them.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import load_config
from megatrain.planning.catalog.known_models import find_known_model

WRITER: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[1] / "docs/recipes.py"))
RECIPES = WRITER["recipes"]()
README = (WRITER["RECIPES"] / "README.md").read_text()


@pytest.mark.merge
def test_every_recipe_fits_and_says_what_its_plan_says() -> None:
    for recipe in RECIPES:
        assert recipe.found.fits, recipe.path.name
        assert recipe.text == recipe.written(), "run: python docs/recipes.py"
    assert WRITER["page"](README, RECIPES) == README, "run: python docs/recipes.py"


def test_every_recipe_loads_and_is_listed() -> None:
    assert len(RECIPES) >= 12
    for recipe in RECIPES:
        config = load_config(recipe.path)
        find_known_model(config.model.name_or_path)
        assert f"]({recipe.path.name})" in README
        assert max(map(len, recipe.text.splitlines())) <= 120, recipe.path.name

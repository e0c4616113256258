"""Writes the predictions into examples/recipes: the head comment of each file, and README's table.

    python docs/recipes.py

A recipe begins with comments: a sentence or two, then the command that plans it. The lines below
the command, up to the config, are what it prints first, and belong to this program.
tests/test_recipes.py checks that they are up to date.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megatrain.planning.estimate import Estimate, estimate
from megatrain.planning.prediction import predicted_price, predicted_speed, predicted_time

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "examples/recipes"
_COMMAND = re.compile(r"^# megatrain estimate (.*)$", re.M)
_SIZE = re.compile(r"(\d[\d.,]*)(?: of [\d.,]+)? (\w+)$")
TABLE_HEAD = """
| recipe | trains | machine | tok/s | time | RAM | GPU memory | disk | price |
|---|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Recipe:
    """One file of the folder."""

    path: Path
    text: str

    @cached_property
    def options(self) -> dict[str, str]:
        """Options of its command, by name."""
        found = _COMMAND.search(self.text)
        assert found is not None, f"{self.path.name} has no line `# megatrain estimate ...`"
        name, *words = shlex.split(found[1])
        assert (ROOT / name) == self.path, f"{self.path.name} plans {name}"
        pairs = zip(words[::2], words[1::2], strict=True)
        return {key.removeprefix("--"): word for key, word in pairs}

    @cached_property
    def found(self) -> Estimate:
        """Its plan."""
        options = dict(self.options)
        return estimate(
            str(self.path),
            gpu=options["gpu"],
            ram=options["ram"],
            tokens=options.get("tokens"),
            price=options["price"],
            gpus=int(options.get("gpus", "1")),
        )

    @property
    def title(self) -> str:
        """Its first sentence."""
        first = self.text.partition("\n")[0].removeprefix("# ")
        return re.split(r"[.:](?= |$)", first)[0]

    def written(self) -> str:
        """Return the file with the verdict of its plan below the command."""
        head, command, rest = _parts(self.text)
        verdict = textwrap.wrap(self.found.text().partition("\n")[0], 94)
        return "".join([head, command, *(f"#   {line}\n" for line in verdict), rest])

    def row(self) -> str:
        """Return its row of the table."""
        found, places = self.found, self.found.plan.places()
        cells = [
            f"[{self.path.stem}]({self.path.name})",
            _trains(found, self.title),
            f"{found.machine}, {self.options['ram']}",
            predicted_speed(found.tokens_per_s).removesuffix(" tok/s"),
            predicted_time(found.seconds or 0.0),
            *(_size(places.get(place, "")) for place in ("host", "device", "disk")),
            predicted_price(found.cost or 0.0),
        ]
        return f"| {' | '.join(cells)} |\n"


def _parts(text: str) -> tuple[str, str, str]:
    """Return the comments before the command, the command, and the config."""
    found = _COMMAND.search(text)
    assert found is not None
    lines = text[found.end() + 1 :].splitlines(keepends=True)
    while lines and lines[0].startswith("#   "):
        del lines[0]
    return text[: found.start()], f"{found[0]}\n", "".join(lines)


def _trains(found: Estimate, title: str) -> str:
    """Return the second part of a title, with the states that the plan takes."""
    method = title.split(", ")[1]
    return f"{method} ({found.plan.settings.state} states)"


def _size(place: str) -> str:
    """Return the size that a place needs, without its limit."""
    found = _SIZE.search(place)
    return f"{found[1]} {found[2]}" if found else "-"


def recipes() -> list[Recipe]:
    """Return all recipes, by name."""
    return [Recipe(path, path.read_text()) for path in sorted(RECIPES.glob("*.yaml"))]


def page(text: str, found: list[Recipe]) -> str:
    """Return the folder's README with its table replaced."""
    before, _, rest = text.partition("<!-- recipes -->\n")
    table = TABLE_HEAD + "".join(recipe.row() for recipe in found)
    return f"{before}<!-- recipes -->\n{table}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"


def main() -> None:
    """Write the comments and the table."""
    found = recipes()
    for recipe in found:
        recipe.path.write_text(recipe.written())
    readme = RECIPES / "README.md"
    readme.write_text(page(readme.read_text(), found))


if __name__ == "__main__":
    main()

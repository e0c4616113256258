"""Writes the page "What fits on my machine": its plans in fits_data.js, and the tables of fits.md.

    python docs/fits.py                 all plans, about a second each; says how far it is
    python docs/fits.py Qwen/Qwen3-8B   the plans of this model alone
    python docs/fits.py --tables        no plans: the tables and the config of fits.md

A model, a card and a method have a row for each size of RAM from which on their plan changes. It
is the plan of the config that the page shows, which names a less exact `optim.state` where fp32
does not fit. Sizes grow until two of them have the same plan: then more memory changes nothing, and
no further size is planned. The file is a script, not JSON, because a page that was opened as a file
may load scripts alone.

Laws (tests/test_fits.py)
    1. An answer of the file is what `megatrain estimate` says of its config.
    2. Every model, card and method has answers; models and cards are those of the catalogs.
    3. The tables of the page say what the file says.
    4. No plan has a price of a machine with less host memory than it needs, in tables or form.
    5. The form prints ranges as megatrain/planning/prediction.py does.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from megatrain.planning import search
from megatrain.planning.alternatives import could_fit
from megatrain.planning.catalog.asked_machines import find_machine
from megatrain.planning.catalog.known_models import find_known_model
from megatrain.planning.estimate import AskedRun, asked_run
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.machine.reserve import left_by_system
from megatrain.planning.plan import Plan
from megatrain.planning.prediction import TIME_ERROR, predicted_price, predicted_time
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

HERE = Path(__file__).parent
DATA, PAGE = HERE / "fits_data.js", HERE / "fits.md"
GIB = 1 << 30
TOKENS = 10_000_000
MODELS = (
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-8B",
    "meta-llama/Llama-3.1-8B-Instruct",
    "google/gemma-4-12B-it",
    "Qwen/Qwen3-14B",
    "openai/gpt-oss-20b",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.3-70B-Instruct",
)
CARDS = (
    "none",
    "RTX 4060 Laptop",
    "RTX 3060 12GB",
    "RTX 4060 Ti 16GB",
    "RTX 3090",
    "RTX 4090",
    "RTX 5090",
    "RTX Pro 6000",
    "A100 80GB",
    "H100 SXM",
    "H200",
)
"""As `--gpu` takes them."""
RAM = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536)
"""Installed host memory, in GB as it is sold."""
_HEAD = """model: {model}
data:
  train: %s
  eval: 0.02
  max_length: 2048
"""
_ALL = "train: {epochs: 1}\nsave: {dir: runs/{name}%s, keep: 1}\n"
METHODS = {
    "all weights": _HEAD % "train.jsonl" + _ALL % "",
    "adapters": _HEAD % "train.jsonl" + "lora: {rank: 16}\n" + _ALL % "-lora",
    "DPO": _HEAD % "pairs.jsonl" + "loss: {name: dpo, beta: 0.1}\n" + _ALL % "-dpo",
}
"""Methods of the page, and their configs; {model} and {name} are replaced."""
SHOWN = (
    ("RTX 3060 12GB", 64),
    ("RTX 3090", 64),
    ("RTX 4090", 128),
    ("RTX 5090", 192),
    ("H100 SXM", 1024),
)
"""Machines of the tables."""
STATES = ("fp32", "bf16", "8bit")
EXACT = STATES[0]
"""The default. Where it does not fit, the page names the most exact state that does."""
DEFAULT = ("Qwen/Qwen3-8B", "RTX 4090", "all weights", 128)
"""The question that the page answers first."""

Answers = dict[str, dict[str, "list[list[Any]] | str"]]
"""Of a model: rows by card and method, or what is too small for it: `card` or `RAM`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A plan, from a size of RAM on. Memory and disk are in GiB."""

    ram: int
    tokens_per_s: float
    host: float
    device: float
    disk: float
    step_tokens: int
    states: str
    """Form of the optimizer's states."""
    backwards: int
    """Passes backward of a step: 2 to save the memory of gradients."""


def row_of(plan: Plan, ram: int) -> Row:
    """Return the figures of a plan that fits."""
    reserved = search.reserves(plan.profile, plan.ledger)
    places = {
        place: _figure((plan.ledger.total(place) + reserved.get(place, 0)) / GIB, 4)
        for place in ("host", "device", "disk")
    }
    return Row(
        ram=ram,
        tokens_per_s=_figure(plan.simulation.tokens_per_s, 4),
        step_tokens=plan.workload.step_tokens,
        states=str(plan.settings.state),
        backwards=2 if plan.settings.update == "second_backward" else 1,
        **places,
    )


def _figure(value: float, digits: int) -> float:
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() else rounded


def config_of(model: str, method: str, state: str = EXACT) -> str:
    """Return the config that is planned, and that the page shows."""
    name = model.rpartition("/")[2].lower()
    optim = "" if state == EXACT else f"optim: {{state: {state}}}\n"
    return METHODS[method].replace("{model}", model).replace("{name}", name) + optim


def rows_of(config: Path, card: str) -> list[list[Any]] | str:
    """Return the rows of one config and card, each planned once; or what is too small."""

    def asked(ram: int) -> AskedRun | None:
        """Return the run in the most exact state that fits, if one does."""
        ways = (
            asked_run(str(config), [f"optim.state={state}"], gpu=card, ram=f"{ram}GB")
            for state in STATES
        )
        return next((way for way in ways if could_fit(*way.planned)), None)

    def fits(ram: int) -> bool:
        return asked(ram) is not None

    if not fits(RAM[-1]):
        return "RAM" if fits(RAM[-1] << 10) else "card"
    rows: list[Row] = []
    for ram in RAM[bisect_left(RAM, True, key=fits) :]:
        run = asked(ram)
        assert run is not None
        row = row_of(run.plan(), ram)
        if rows and astuple(rows[-1])[1:] == astuple(row)[1:]:
            break
        rows.append(row)
    return [list(astuple(row)) for row in rows]


def planned(model: str) -> Answers:
    """Return all answers of a model, and print each card."""
    found: Answers = {card: {} for card in CARDS}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "run.yaml"
        for card in CARDS:
            for method in METHODS:
                config.write_text(config_of(model, method))
                with _remembering():
                    found[card][method] = rows_of(config, card)
            plans = [len(rows) if isinstance(rows, list) else 0 for rows in found[card].values()]
            print(f"  {card:20}{plans!s:12}{time.monotonic() - begun:6.0f} s", flush=True)
    return found


@contextmanager
def _remembering() -> Iterator[None]:
    """Keep simulations and ledgers for the plans of one config and card: they share most of them.

    Neither regards the size of RAM, and a search changes nothing but what is in the key.
    """
    before = {name: getattr(search, name) for name in ("simulate", "predicted_ledger")}
    for name, function in before.items():
        setattr(search, name, _remembered(function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(search, name, function)


def _remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    kept: dict[Any, Any] = {}

    def asked(profile: MachineProfile, workload: Workload, settings: StepSettings) -> Any:
        # A search also asks what a machine would do whose memory, say, is a thousand times as fast.
        machine = replace(profile, ram_bytes=1)
        key = machine, workload.step_tokens, workload.model.num_layers, settings
        if key not in kept:
            kept[key] = function(profile, workload, settings)
        return kept[key]

    return asked


def data(answers: dict[str, Answers]) -> str:
    """Return fits_data.js; a line for each card of a model."""
    head = {
        "tokens": TOKENS,
        "time_error": TIME_ERROR,
        "default": DEFAULT,
        "columns": list(Row.__dataclass_fields__),
        "methods": METHODS,
        "ram": {ram: _figure(left_by_system(ram * GIB) / GIB, 6) for ram in RAM},
        "cards": {card: _card(card) for card in CARDS},
        "models": {name: find_known_model(name).published_params for name in MODELS},
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    models = ",\n".join(
        f"{json.dumps(model)}: {{\n{_cards(answers[model])}\n}}"
        for model in MODELS
        if model in answers
    )
    body = ",\n".join([*lines, f'"answers": {{\n{models}\n}}'])
    return f"{_BEFORE}{{\n{body}\n}}\n"


_BEFORE = "// Plans of megatrain estimate: python docs/fits.py writes them.\nwindow.fits = "


def _cards(answers: Answers) -> str:
    found = {card: json.dumps(rows, separators=(",", ":")) for card, rows in answers.items()}
    return ",\n".join(f" {json.dumps(card)}: {rows}" for card, rows in found.items())


def _card(name: str) -> dict[str, Any]:
    """Return the usable memory of a card in GiB, and its price of an hour, 0 if not known.

    `price_host` is what the host of that price leaves to a run: a plan that needs more has no
    price.
    """
    card, _ = find_machine(name)
    usable = _figure(card.usable(card.memory_gib * GIB) / GIB, 6)
    host = _figure(left_by_system(card.rent_ram_gib * GIB) / GIB, 6) if card.rent else 0
    return {"memory": usable, "price": card.rent, "price_host": host}


def read_data(text: str) -> dict[str, Any]:
    """Return the object in fits_data.js."""
    found: dict[str, Any] = json.loads(text.removeprefix(_BEFORE))
    return found


def answer(found: dict[str, Any], model: str, card: str, method: str, ram: int) -> Row | str:
    """Return the answer of the file to a question: a row, or why it does not fit.

    `card`: the card is too small. A number: the GB of RAM from which on it fits. `RAM`: no size of
    the file is enough.
    """
    rows = found["answers"][model][card][method]
    if isinstance(rows, str):
        return rows
    fitting = [row for row in rows if row[0] <= ram]
    if not fitting:
        return str(rows[0][0])
    return Row(**dict(zip(found["columns"], fitting[-1], strict=True)))


def questions() -> Iterator[tuple[str, str, str, int]]:
    """Yield every question that the file answers: model, card, method, RAM."""
    for model in MODELS:
        for card in CARDS:
            for method in METHODS:
                for ram in RAM:
                    yield model, card, method, ram


def page(text: str, found: dict[str, Any]) -> str:
    """Return fits.md with its tables and its config replaced."""
    model, _, method, _ = DEFAULT
    parts = {
        "all weights": _table(found, "all weights"),
        "adapters": _table(found, "adapters"),
        "config": f"\n```yaml\n{config_of(model, method)}```\n",
    }
    for name, part in parts.items():
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        text = f"{before}<!-- {name} -->\n{part}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


def _table(found: dict[str, Any], method: str) -> str:
    """Return the table of a method: models, and the time and the price on each machine."""
    head = " | ".join(f"{card}, {ram}GB" for card, ram in SHOWN)
    rows = [f"| model | {head} |\n|{'---|' * (len(SHOWN) + 1)}\n"]
    for model in MODELS:
        cells = [_cell(found, model, card, method, ram) for card, ram in SHOWN]
        rows.append(f"| {model.rpartition('/')[2]} | {' | '.join(cells)} |\n")
    return "\n" + "".join(rows)


def _cell(found: dict[str, Any], model: str, card: str, method: str, ram: int) -> str:
    got = answer(found, model, card, method, ram)
    if isinstance(got, Row):
        seconds, price = found["tokens"] / got.tokens_per_s, price_of(found["cards"][card], got)
        cost = f"<br>{predicted_price(seconds / 3600 * price)}" if price else ""
        return f"{predicted_time(seconds)}{cost}"
    return {"card": "-", "RAM": f"over {RAM[-1]}GB"}.get(got, f"from {got}GB")


def price_of(card: dict[str, Any], row: Row) -> float:
    """Return the price of an hour with a card; 0 where the plan needs more memory than its host."""
    return float(card["price"]) if row.host <= card["price_host"] else 0.0


def main() -> None:
    """Plan, and write the file and the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", metavar="MODEL", choices=[*MODELS, []])
    parser.add_argument("--tables", action="store_true")
    asked = parser.parse_args()
    answers: dict[str, Answers] = read_data(DATA.read_text())["answers"] if DATA.exists() else {}
    models = () if asked.tables else asked.models or MODELS
    for number, model in enumerate(models, start=1):
        print(f"{model}, {number} of {len(models)}", flush=True)
        answers[model] = planned(model)
        DATA.write_text(data(answers))
    if all(model in answers for model in MODELS):
        DATA.write_text(data(answers))
        PAGE.write_text(page(PAGE.read_text(), read_data(DATA.read_text())))


if __name__ == "__main__":
    main()

"""Configs of the runs, and their differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from reprlib import Repr

from megatrain.report.drawing.markup import Html, join_html, shortened, tag
from megatrain.report.run import Run
from megatrain.report.tables import facts_table

_MOST_CHARACTERS = 50_000
_MOST_KEYS = 2_000
# A few lines of YAML can name lists within lists that print as gigabytes: print little of each.
_BRIEF = Repr()
_BRIEF.maxlevel, _BRIEF.maxlist, _BRIEF.maxdict, _BRIEF.maxstring = 3, 20, 20, 200


def config_section(runs: Sequence[Run]) -> Html:
    """Return the text of one config, or the differences of several and each text folded away."""
    shown = [run for run in runs if run.config]
    if len(runs) == 1:
        return join_html(_text(run) for run in shown)
    texts = (
        tag("details", tag("summary", f"{run.name}: config.yaml"), _text(run)) for run in shown
    )
    return join_html([_differences(runs), *texts])


def settings_of(text: str) -> dict[str, str] | None:
    """Return the settings as `train.seed` and text, or None if the text is not a YAML mapping."""
    import yaml

    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return dict(pair for _, pair in zip(range(_MOST_KEYS), _leaves(value, ""), strict=False))


def _leaves(value: object, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value and name.count(".") < 20:
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, shortened(value if isinstance(value, str) else _BRIEF.repr(value), 300)


def _differences(runs: Sequence[Run]) -> Html:
    settings = [settings_of(run.config) if run.config else None for run in runs]
    known = [one for one in settings if one is not None]
    if len(known) < len(runs):
        return tag("p", "Some runs have no readable config to compare.", class_="note")
    keys = dict.fromkeys(key for one in known for key in one)
    differing = [key for key in keys if len({one.get(key) for one in known}) > 1]
    if not differing:
        return tag("p", "The configs are the same.")
    columns = [{key: one.get(key, "(not set)") for key in differing} for one in known]
    return facts_table(runs, columns, "Settings that differ")


def _text(run: Run) -> Html:
    return tag("pre", shortened(run.config.rstrip(), _MOST_CHARACTERS), class_="config")

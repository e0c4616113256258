"""The page of `megatrain gpu-check`, from its JSON: one file to look at and to send.

Laws (tests/report/test_check_page.py)
    1. Every check is on it, with its state as a word; what is not ok has what it means and what
       to try.
    2. No text of the JSON becomes markup; the page parses, with every element closed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megatrain.report.drawing.document import document, signs
from megatrain.report.drawing.markup import Html, join_html, tag
from megatrain.report.run import SpanRecord
from megatrain.report.tables import bar_row, facts_table, flattened, table
from megatrain.report.time_split import share_bar
from megatrain.report.timeline import draw_lanes
from megatrain.text import byte_rate, duration, figure, flop_rate, percent, size

_NAME = "MegaTrain gpu-check"
PAGE_SIGNS = signs(_NAME)
_GROUPS = {"machine": "The machine", "right": "Is it right?", "fast": "Is it fast?"}
_LANES = {
    "compute": "compute alone, without copies",
    "in": "copies in",
    "out": "copies out",
    "host": "optimizer",
}
_COPIES = {
    "copy_in_bytes_per_s": "host to device",
    "copy_out_bytes_per_s": "device to host",
    "copy_both_bytes_per_s": "both at once, added up",
    "pinning_bytes_per_s": "pinning host memory",
}


def check_page(text: str) -> Html:
    """Return the page of what GpuCheck.to_json wrote."""
    found: Mapping[str, Any] = json.loads(text)
    facts, step, rates = found["facts"], found["step"], found["rates"]
    name = str(facts.get("device_name") or found["device"])
    sections = {
        "Verdict": _verdict(found),
        "What to try": _tries(found),
        "Checks": join_html(_checks(found["checks"])),
        "Time of a step": _times(step),
        "One step by lane": _timeline(step),
        "Copies": _copies(rates),
        "Products": _products(rates),
        "Settings of the step": facts_table([], [flattened(step.get("settings", {}))], "Settings"),
        "Machine": facts_table([], [flattened(facts)], "Machine"),
    }
    return document(name, _NAME, sections)


def _verdict(found: Mapping[str, Any]) -> Html:
    step, rates = found["step"], found["rates"]
    cards: dict[str, str] = {}
    if rates:
        flops = max(point[-1] for point in rates["product_flops"])
        cards["products, bf16"] = flop_rate(flops)
        cards["copies in"] = byte_rate(rates["copy_in_bytes_per_s"])
        cards["copies out"] = byte_rate(rates["copy_out_bytes_per_s"])
        cards["optimizer"] = f"{figure(rates['update_params_per_s'])} params/s"
    if step:
        cards["step"] = duration(step["step_s"])
        cards["predicted"] = duration(step["predicted_s"])
        cards["tokens/s"] = figure(step["tokens_per_s"])
        cards["of the bound"] = percent(step["of_bound"])
        cards["device memory"] = size(step["peak_device_bytes"])
    shown = (tag("div", tag("dt", name), tag("dd", value)) for name, value in cards.items())
    note = f"{found['device']}, {found['when']}, checked in {duration(found['seconds'])}"
    return join_html(
        [
            tag("p", found["verdict"], class_="lead"),
            tag("p", note, class_="note"),
            tag("dl", *shown, class_="cards") if cards else Html(),
        ]
    )


def _tries(found: Mapping[str, Any]) -> Html:
    parts: list[Html] = []
    for check in found["checks"]:
        if not check["causes"]:
            continue
        parts.append(tag("h3", _state(check["state"]), f" {check['name']}: {check['found']}"))
        for name in check["causes"]:
            cause = found["causes"][name]
            parts.append(tag("p", *_with_code(cause["means"])))
            parts.append(tag("ul", *(tag("li", *_with_code(text)) for text in cause["tries"])))
    return join_html(parts)


def _with_code(text: str) -> Iterator[str]:
    """Yield the parts of a text; those between backticks are code."""
    for number, part in enumerate(text.split("`")):
        yield tag("code", part) if number % 2 else part


def _checks(checks: list[Mapping[str, Any]]) -> Iterator[Html]:
    for group, heading in _GROUPS.items():
        rows = [
            tag(
                "tr",
                tag("td", _state(check["state"])),
                tag("th", check["name"], scope="row"),
                tag("td", check["found"]),
            )
            for check in checks
            if check["group"] == group
        ]
        if rows:
            yield join_html([tag("h3", heading), table([], rows, heading)])


def _state(state: str) -> Html:
    return tag("span", state, class_=f"state {state.replace(' ', '-')}")


def _times(step: Mapping[str, Any]) -> Html:
    if not step:
        return Html()
    times = {
        "step": (step["step_s"], "measured"),
        "step, predicted": (step["predicted_s"], "planned"),
        **{_LANES.get(lane, lane): (lane_s, "part") for lane, lane_s in step["lanes_s"].items()},
    }
    longest = max(seconds for seconds, _ in times.values())
    rows = [
        bar_row(name, seconds / longest, duration(seconds), look)
        for name, (seconds, look) in times.items()
    ]
    about = (
        f" {figure(step['params'])} parameters, {step['layers']} layers, {step['tokens']:,} tokens "
        f"in {step['dtype']}"
    )
    split = {part: seconds for part, seconds in step["split_s"].items() if seconds > 0}
    total = sum(split.values())
    shares = {part: seconds / total for part, seconds in split.items()} if total else {}
    caption = tag("figcaption", "A step, and what its parts take alone", _unit(about))
    return tag(
        "div",
        tag("figure", caption, table([], rows, "Times of a step")),
        tag("figure", tag("figcaption", "Where the step's time goes"), share_bar(shares)),
        class_="charts",
    )


def _timeline(step: Mapping[str, Any]) -> Html:
    spans = [SpanRecord(*span) for span in step.get("spans", ())]
    return draw_lanes(spans) if spans else Html()


def _copies(rates: Mapping[str, Any]) -> Html:
    known = {name: rates[key] for key, name in _COPIES.items() if rates.get(key)}
    if not known:
        return Html()
    most = max(known.values())
    rows = [bar_row(name, rate / most, byte_rate(rate), "part") for name, rate in known.items()]
    return tag("figure", table([], rows, "Copies"))


def _products(rates: Mapping[str, Any]) -> Html:
    points = rates.get("product_flops", [])
    most = max((point[2] for point in points), default=0.0)
    rows = [
        bar_row(f"width {width:,}, {tokens:,} tokens", flops / most, flop_rate(flops), "part")
        for width, tokens, flops in points
    ]
    return tag("figure", table([], rows, "Products")) if rows else Html()


def _unit(text: str) -> Html:
    return tag("span", text, class_="unit")

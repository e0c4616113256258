"""One static HTML file about a run, or several side by side: `megatrain report RUN...`.

    folder --read_run--> Run --sections--> Html --write_report--> report.html

The file needs nothing else, neither network nor script, and a policy in it forbids both, should
untrusted text ever slip through.

Invariants (tests/report/test_page.py)
    1. No untrusted text becomes markup; the page parses, with every element closed.
    2. What a run folder lacks is left out.
    3. 100,000 steps make less than a megabyte.
    4. The file appears complete or not at all, and replaces only a file that is our report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatrain.files import require_replaceable, write_file
from megatrain.memory.ledger import plain_purpose
from megatrain.planning.prediction import predicted_time
from megatrain.report.charts import FEW, Series, bar_table, line_chart, share_bar, smoothed
from megatrain.report.markup import Html, join_html, shortened, tag
from megatrain.report.run import LedgerLine, Run, Sample, read_run
from megatrain.report.summary import run_facts, sentence
from megatrain.text import duration, percent, size

STYLE = Path(__file__).with_name("style.css")
_NAME = "MegaTrain report"
_SIGNS = (b"<!DOCTYPE html>", f"{_NAME}</title>".encode())
"""Near the start of every report: a file without them is not replaced."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_CHARTS = (
    ("reward", "Reward", "mean of the answers of a step, and of held-out prompts"),
    ("rewards/accuracies", "Pairs ranked right", "share whose chosen answer has the larger reward"),
    ("rewards/margins", "Reward margin", "of good answers over bad ones"),
    ("rewards/chosen", "Reward of good answers", "beta x log-ratio to the reference, if any"),
    ("rewards/rejected", "Reward of bad answers", "beta x log-ratio to the reference, if any"),
    ("ended", "Completed answers", "share of those of a step"),
    ("answer_tokens", "Answer length", "tokens, mean of a step"),
    ("kl", "Drift from the reference", "as the loss estimates it"),
    ("aux_loss", "Balance of experts", "top_k where they are used evenly"),
    ("grad_norm", "Gradient norm", "before clipping"),
    ("learning_rate", "Learning rate", ""),
    ("tokens_per_s", "Tokens per second", ""),
    ("of_roofline", "Share of the roofline", "least time by the plan over measured"),
)
"""Figures of metrics.jsonl besides the loss: name, title, what it is."""
_SHARES = {"rewards/accuracies", "ended", "of_roofline"}
"""Those that lie between 0 and 1."""
_LOSS_UNITS = {
    "tokens": "per trained token",
    "preferences": "per row of preferences",
    "reward": "of sampled answers: around 0, whatever is learned",
}
"""What a loss is a mean over, by what it measures: each has a chart of its own."""
_BY_SOURCE = "eval_loss/"
"""How metrics.jsonl begins the name of an evaluation's loss on one source."""
_PLACES = {"Host memory": ("host", "pinned"), "Device memory": ("device",), "Disk": ("disk",)}
"""Pinned memory is host memory: the measured peak includes both."""
_PEAKS = {"Host memory": "host_peak_bytes", "Device memory": "device_peak_bytes"}
_MOST_PROMPTS = 8
_MOST_CHARACTERS = 3_000
_MOST_FILE_CHARACTERS = 50_000


def write_report(folders: Sequence[Path], target: Path) -> None:
    """Write the report of one run, or of several side by side.

    Raises RunFolderError if a folder holds no run, ConfigError if a file that is not our report is
    in the way, DiskError if the system fails to read or write.
    """
    require_replaceable(target, _SIGNS)
    names = [folder.absolute().name for folder in folders]
    runs = [
        read_run(folder, name if names.count(name) == 1 else str(folder))
        for folder, name in zip(folders, names, strict=True)
    ]
    write_file(target, render(runs).encode(), durable=False)


def render(runs: Sequence[Run]) -> Html:
    """Return the page."""
    sections = {
        "Summary": _summary(runs),
        "Curves": curves(runs),
        "Time of a step": _each(runs, time_split),
        "Memory": _each(runs, memory),
        "Samples": samples(runs),
        "Files": _each(runs, _files),
    }
    sections = {heading: section for heading, section in sections.items() if section}
    title = " and ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs"
    anchors = {heading: heading.lower().replace(" ", "-") for heading in sections}
    head = (
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{title} - {_NAME}"),
        tag("style", Html(STYLE.read_text())),
    )
    links = (tag("li", tag("a", heading, href=f"#{anchor}")) for heading, anchor in anchors.items())
    body = (
        tag("header", tag("h1", title)),
        tag("nav", tag("ul", *links), aria_label="Sections"),
        tag("main", *(
            tag("section", tag("h2", heading), section, id=anchors[heading])
            for heading, section in sections.items()
        )),
    )  # fmt: skip
    page = tag("html", tag("head", *head), tag("body", *body), lang="en")
    return join_html([Html("<!DOCTYPE html>\n"), page, "\n"])


def _each(runs: Sequence[Run], section: Callable[[Run], Html]) -> Html:
    """Return a section of each run, under its name where there are several."""
    if len(runs) == 1:
        return section(runs[0])
    parts = ((run, section(run)) for run in runs)
    return join_html(join_html([tag("h3", run.name), part]) for run, part in parts if part)


def _summary(runs: Sequence[Run]) -> Html:
    """Return a sentence for each run, their figures, and what could not be read."""
    notes = [tag("p", f"{run.name}: {note}.", class_="note") for run in runs for note in run.notes]
    if len(runs) == 1:
        facts = run_facts(runs[0])
        cards = (tag("div", tag("dt", name), tag("dd", text)) for name, text in facts.items())
        lead = tag("p", sentence(runs[0]), class_="lead")
        return join_html([lead, tag("dl", *cards, class_="cards"), *notes])
    columns = [run_facts(run) for run in runs]
    names = dict.fromkeys(name for facts in columns for name in facts)
    rows = (
        tag("tr", tag("th", name), *(tag("td", facts.get(name, "")) for facts in columns))
        for name in names
    )
    return join_html([
        *(tag("p", tag("b", f"{run.name}: "), sentence(run)) for run in runs),
        _table(["", *(run.name for run in runs)], rows),
        *notes,
    ])  # fmt: skip


def _table(head: Sequence[str], rows: Iterator[Html]) -> Html:
    """Return a table that scrolls inside a narrow page."""
    names = tag("thead", tag("tr", *(tag("th", name) for name in head)))
    return tag("div", tag("table", names, tag("tbody", *rows)), class_="wide")


def curves(runs: Sequence[Run]) -> Html:
    """Return the charts, several runs laid over each other."""
    losses, others = [], []
    for objective, unit in _LOSS_UNITS.items():
        alike = [run if run.objective == objective else None for run in runs]
        losses.append(line_chart("Loss", _lines(alike, "loss"), unit))
        losses.append(line_chart("Evaluation loss by source", _source_lines(alike), unit))
    for name, title, unit in _CHARTS:
        others.append(line_chart(title, _lines(runs, name), unit, is_share=name in _SHARES))
    is_rewarded = any(run.objective == "reward" for run in runs)
    charts = [*others[:1], *losses, *others[1:]] if is_rewarded else [*losses, *others]
    return tag("div", *charts, class_="charts") if any(charts) else Html()


def _lines(runs: Sequence[Run | None], name: str) -> list[Series]:
    """Return the curves of a figure, each step faint and smoothed strong, and its evaluations.

    A run that is None has no curve in this chart, and keeps its color for others.
    """
    faint, strong, dots = [], [], []
    for color, run in enumerate(runs):
        if run is None:
            continue
        points, evals, several = run.curve(name), run.curve(f"eval_{name}"), len(runs) > 1
        if name == "loss" and run.objective == "reward":
            evals = []  # the negative reward of held-out prompts: another quantity
        label = run.name if several else "each step"
        if len(points) >= FEW and name != "learning_rate":
            each = "" if several else label
            faint.append(Series(label=each, points=points, look="faint", color=color))
            points, label = smoothed(points), run.name if several else "smoothed"
        strong.append(Series(label=label, points=points, look="strong", color=color))
        label, color = (f"{run.name}, eval", color) if several else ("eval", 1)
        dots.append(Series(label=label, points=evals, look="dots", color=color))
    return faint + strong + dots


def _source_lines(runs: Sequence[Run | None]) -> list[Series]:
    """Return a line for each source that a run is evaluated on, if there are several."""
    found = [
        (run, name)
        for run in runs
        if run is not None
        for name in dict.fromkeys(name for line in run.evals for name in line.values)
        if name.startswith(_BY_SOURCE)
    ]
    return [
        Series(
            label=("" if len(runs) == 1 else f"{run.name}, ") + name.removeprefix(_BY_SOURCE),
            points=run.curve(name),
            look="strong",
            color=color,
        )
        for color, (run, name) in enumerate(found)
    ]


def time_split(run: Run) -> Html:
    """Return what the time of a step went to, and its ops as measured and as predicted."""
    shares = run.split_shares()
    rows = (
        tag(
            "tr",
            tag("th", op.kind),
            tag("td", duration(op.measured_s), class_="number"),
            tag("td", predicted_time(op.predicted_s), class_="number"),
        )
        for op in sorted(run.ops, key=lambda op: -op.measured_s)
    )
    parts = [share_bar("Time of a step", shares)] if shares else []
    if run.ops:
        caption = tag("figcaption", "Ops of a step", tag("span", " side by side", class_="unit"))
        parts.append(tag("figure", caption, _table(["op", "measured", "predicted"], rows)))
    return join_html(parts)


def memory(run: Run) -> Html:
    """Return planned bytes by purpose and the measured peak, on one scale for each place."""
    places = [_place(run, title) for title in _PLACES]
    return tag("div", *places, class_="charts") if any(places) else Html()


def _place(run: Run, title: str) -> Html:
    lines = sorted(
        (line for line in run.ledger if line.place in _PLACES[title]), key=lambda x: -x.num_bytes
    )
    planned = sum(line.num_bytes for line in lines)
    peak = run.peaks.get(_PEAKS.get(title, ""), 0.0)
    if not planned and not peak:
        return Html()
    sizes = [(_purpose(line), line.num_bytes, "part") for line in lines]
    sizes += [("planned", planned, "planned")] if planned else []
    sizes += [("measured peak", peak, "measured")] if peak else []
    scale = max(planned, peak)
    rows = ((name, num_bytes / scale, size(num_bytes), look) for name, num_bytes, look in sizes)
    note = f" measured {percent(peak / planned)} of the plan" if planned and peak else ""
    return bar_table(title, rows, note)


def _purpose(line: LedgerLine) -> str:
    purpose = plain_purpose(line.purpose)
    return f"{purpose} (pinned)" if line.place == "pinned" else purpose


def samples(runs: Sequence[Run]) -> Html:
    """Return for each prompt its first and last answer, of every run."""
    prompts = list(dict.fromkeys(sample.prompt for run in runs for sample in run.samples))
    more = len(prompts) - _MOST_PROMPTS
    note = [tag("p", f"{more:,} more prompts in samples.jsonl.", class_="note")] if more > 0 else []
    return join_html([*(_prompt(runs, prompt) for prompt in prompts[:_MOST_PROMPTS]), *note])


def _prompt(runs: Sequence[Run], prompt: str) -> Html:
    answers, expected = [], ""
    for run in runs:
        found = [sample for sample in run.samples if sample.prompt == prompt]
        name = f"{run.name}, " if len(runs) > 1 else ""
        answers += [_answer(name, sample) for sample in [*found[:1], *found[1:][-1:]]]
        expected = expected or next((sample.expected for sample in found), "")
    if expected:
        title = tag("h4", "expected, from the row")
        answers.append(tag("div", title, _quoted(expected)))
    return tag(
        "article",
        tag("h3", "Prompt"),
        _quoted(prompt, "prompt"),
        tag("div", *answers, class_="answers"),
    )


def _answer(name: str, sample: Sample) -> Html:
    reward = "" if sample.reward is None else f", reward {sample.reward:.3g}"
    title = "before training" if sample.step == 0 else f"step {sample.step:,}"
    return tag("div", tag("h4", f"{name}{title}{reward}"), _quoted(sample.text))


def _quoted(text: str, look: str | None = None) -> Html:
    shown = shortened(text, _MOST_CHARACTERS) if text.strip() else "(nothing)"
    return tag("pre", shown, dir="auto", class_=look)


def _files(run: Run) -> Html:
    """Return the config, plan, machine and data card as they are, folded away."""
    return join_html(
        tag("details", tag("summary", name), tag("pre", shortened(text, _MOST_FILE_CHARACTERS)))
        for name, text in run.texts.items()
    )

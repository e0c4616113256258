"""Curves over steps: loss, gradient norm, learning rate and tokens per second."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.report.drawing.chart import Series, line_chart
from megatrain.report.drawing.markup import Html, join_html, tag
from megatrain.report.drawing.thinning import FEW, averaged, smoothed
from megatrain.report.run import Run
from megatrain.text import count, figure

EVAL_SOURCE = "eval_loss/"
"""How metrics.jsonl begins the name of an evaluation's loss on one source."""
_TABLE_ROWS = 12
_COLUMNS = ("loss", "grad_norm", "learning_rate", "tokens_per_s")
_TITLES = ("Loss", "Gradient norm", "Learning rate", "Tokens per second")


_BY_LOSS = (
    ("rewards/accuracies", "Pairs ranked right", "share whose chosen answer has the larger reward"),
    ("rewards/margins", "Reward margin", "of good answers over bad ones"),
    ("rewards/chosen", "Reward of good answers", "beta x log-ratio to the reference, if any"),
    ("rewards/rejected", "Reward of bad answers", "beta x log-ratio to the reference, if any"),
    ("reward", "Reward", "mean of the answers of a step, and of held-out prompts"),
    ("ended", "Answers that came to their end", "share of those of a step"),
    ("answer_tokens", "Tokens of an answer", "mean of those of a step"),
    ("kl", "Drift from the reference", "as the loss estimates it"),
)
"""Figures of losses over preferences, or on rewards: name, title, what it is."""


def curves(runs: Sequence[Run]) -> Html:
    """Return the charts, several runs laid over each other, and the same as tables."""
    charts = [
        line_chart("Loss", _lines(runs, "loss") + _eval_lines(runs, "loss"), _unit(runs)),
        line_chart("Evaluation loss by source", _source_lines(runs), _unit(runs)),
        *(
            line_chart(title, _lines(runs, name) + _eval_lines(runs, name), text)
            for name, title, text in _BY_LOSS
        ),
        line_chart(
            "Balance of experts", _lines(runs, "aux_loss"), "top_k where they are used evenly"
        ),
        line_chart("Gradient norm", _lines(runs, "grad_norm"), "before clipping"),
        line_chart("Learning rate", _plain_lines(runs, "learning_rate")),
        line_chart("Tokens per second", _lines(runs, "tokens_per_s")),
        line_chart(
            "Share of the bound", _lines(runs, "of_bound"), "least time by the plan over measured"
        ),
    ]
    if not any(charts):
        return Html()
    return join_html(
        [tag("div", *charts, class_="charts"), *(_table(run, len(runs)) for run in runs)]
    )


def _lines(runs: Sequence[Run], name: str) -> list[Series]:
    faint, strong = [], []
    for color, run in enumerate(runs):
        points = run.curve(name)
        label = run.name if len(runs) > 1 else ""
        if len(points) < FEW:
            plain = label or "each step"
            strong.append(Series(label=plain, points=points, look="strong", color=color))
            continue
        faint.append(
            Series(label="" if label else "each step", points=points, look="faint", color=color)
        )
        smooth = smoothed(points)
        strong.append(Series(label=label or "smoothed", points=smooth, look="strong", color=color))
    return faint + strong


def _plain_lines(runs: Sequence[Run], name: str) -> list[Series]:
    return [
        Series(label=run.name if len(runs) > 1 else "", points=run.curve(name), look="strong",
             color=color)
        for color, run in enumerate(runs)
    ]  # fmt: skip


def _unit(runs: Sequence[Run]) -> str:
    """Return what the loss is a mean over."""
    if any(run.curve("reward") for run in runs):
        return "of answers that were drawn: around 0, whatever is learned"
    is_of_rows = any(run.curve("rewards/chosen") or run.curve("kl") for run in runs)
    return "per row of preferences" if is_of_rows else "per trained token"


def _eval_lines(runs: Sequence[Run], name: str) -> list[Series]:
    return [
        Series(
            label="eval" if len(runs) == 1 else f"{run.name}, eval",
            points=run.curve(f"eval_{name}"),
            look="dots",
            color=1 if len(runs) == 1 else color,
        )
        for color, run in enumerate(runs)
    ]


def _source_lines(runs: Sequence[Run]) -> list[Series]:
    """Return a line for each source that a run is evaluated on, if there are several."""
    found = [
        (run, name)
        for run in runs
        for name in dict.fromkeys(name for line in run.evals for name in line.values)
        if name.startswith(EVAL_SOURCE)
    ]
    return [
        Series(
            label=("" if len(runs) == 1 else f"{run.name}, ") + name.removeprefix(EVAL_SOURCE),
            points=run.curve(name),
            look="strong",
            color=color,
        )
        for color, (run, name) in enumerate(found)
    ]


def _table(run: Run, num_runs: int) -> Html:
    """Return means over a dozen stretches, for those who would rather read."""
    columns = {
        title: dict(averaged(run.curve(name), _TABLE_ROWS))
        for name, title in zip(_COLUMNS, _TITLES, strict=True)
    }
    columns = {title: means for title, means in columns.items() if means}
    steps = sorted({step for means in columns.values() for step in means})
    if not steps:
        return Html()
    head = tag("tr", *(tag("th", title, scope="col") for title in ("From step", *columns)))
    rows = (
        tag("tr", tag("th", count(step), scope="row"), *(_cell(m, step) for m in columns.values()))
        for step in steps
    )
    name = f"{run.name}: means" if num_runs > 1 else "Means"
    table = tag("div", tag("table", tag("thead", head), tag("tbody", *rows)), class_="wide")
    return tag("details", tag("summary", f"{name} as a table"), table)


def _cell(means: dict[int, float], step: int) -> Html:
    return tag("td", figure(means[step]) if step in means else "", class_="number")

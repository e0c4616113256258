"""Generated texts before and after training, side by side. The text is untrusted: only shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatrain.report.drawing.markup import Html, join_html, shortened, tag
from megatrain.report.run import Run, Sample

_MOST_PROMPTS = 8
_MOST_CHARACTERS = 3000


def samples_section(runs: Sequence[Run]) -> Html:
    """Return for each prompt its first and last answer, of every run."""
    prompts = list(dict.fromkeys(sample.prompt for run in runs for sample in run.samples))
    left = len(prompts) - _MOST_PROMPTS
    note = [tag("p", f"{left:,} more prompts in samples.jsonl.", class_="note")] if left > 0 else []
    return join_html([*(_prompt(runs, prompt) for prompt in prompts[:_MOST_PROMPTS]), *note])


def _prompt(runs: Sequence[Run], prompt: str) -> Html:
    answers = [
        tag("div", tag("h4", f"{title}{_rewarded(sample)}"), _quoted(sample.text))
        for title, sample in _answers(runs, prompt)
    ]
    if expected := _expected(runs, prompt):
        answers.append(tag("div", tag("h4", "expected, from the row"), _quoted(expected)))
    return tag(
        "article",
        tag("h3", "Prompt"),
        _quoted(prompt, "prompt"),
        tag("div", *answers, class_="answers"),
        class_="sample",
    )


def _rewarded(sample: Sample) -> str:
    return "" if sample.reward is None else f", reward {sample.reward:.3g}"


def _answers(runs: Sequence[Run], prompt: str) -> Iterator[tuple[str, Sample]]:
    """Yield titles and answers; runs that began alike share one answer from before."""
    before: set[str] = set()
    for run in runs:
        samples = [sample for sample in run.samples if sample.prompt == prompt]
        name = f"{run.name}: " if len(runs) > 1 else ""
        if len(samples) > 1 and samples[0].text not in before:
            before.add(samples[0].text)
            yield f"{name}before, step {samples[0].step:,}", samples[0]
        if samples:
            when = "after" if len(samples) > 1 else "at"
            comma = ", " if len(samples) > 1 else " "
            yield f"{name}{when}{comma}step {samples[-1].step:,}", samples[-1]


def _expected(runs: Sequence[Run], prompt: str) -> str:
    """Return the expected text after a prompt, if any run has recorded it."""
    noted = (sample.expected for run in runs for sample in run.samples if sample.prompt == prompt)
    return next(filter(None, noted), "")


def _quoted(text: str, look: str | None = None) -> Html:
    shown = shortened(text, _MOST_CHARACTERS) if text.strip() else "(nothing)"
    return tag("pre", shown, dir="auto", class_=look)

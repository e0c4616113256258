"""The same preferences prepared by TRL's trainers and by MegaTrain: tokens and trained tokens.

    python -m proofs.preferences.prepared --json

In an environment that has `trl` beside MegaTrain's requirements. For each case every row must
become the same two documents, with the same tokens trained. Ends with 1 if a case differs.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain.config import Config
from megatrain.data.training_rows import gather
from proofs.parity.cases import CHATML, NEWLINE, resolved
from proofs.parity.models import write_model
from proofs.parity.rows import TOOLS, Row, Rows
from proofs.side_by_side import main_of

Document = tuple[list[int], list[bool]]
"""Tokens, and which of them are trained."""
GROUP = 4
"""Rows among which completions change places, and of a batch of TRL's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """Rows and what both tools are to make of them."""

    rows: list[Row]
    template: str | None = CHATML
    end: str = "<|im_end|>"
    kto: bool = False
    max_length: int = 512
    ours: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the section data."""
    untrained_after: str | None = None
    """The token after this one is no target of ours."""
    difference: str = ""
    """What differs, and why, if anything."""


RAW = {"chat_template": "none"}
LLAMA: dict[str, Any] = {"template": "trl:llama3", "end": "<|eot_id|>"}


class Preferences(Rows):
    """Makes rows that prefer, from a seed."""

    def texts(self, count: int, most: int = 12) -> list[Row]:
        return [
            {
                "prompt": self.words(most),
                **self._answers(" " + self.words(most), " " + self.words()),
            }
            for _ in range(count)
        ]

    def implicit_texts(self, count: int) -> list[Row]:
        """Both answers begin with the prompt; some share first letters."""
        prompts = [f"Human: {self.words()} Assistant:" for _ in range(count)]
        return [self._answers(f"{p} {self.words()}", f"{p} {self.words()}") for p in prompts]

    def talks(self, count: int, turns: int = 1, later: int = 0, tools: bool = False) -> list[Row]:
        """A prompt of so many turns; answers have as many as asked for and `later` more."""
        rows = []
        for _ in range(count):
            asked = [self._turn("user")]
            for _ in range(turns - 1):
                asked += [self._turn("assistant"), self._turn("user")]
            row = {"prompt": asked, **self._answers(self._talk(later), self._talk(later))}
            rows.append(row | ({"tools": TOOLS} if tools else {}))
        return rows

    def implicit(self, count: int, turns: int = 1) -> list[Row]:
        return [
            self._answers(row["prompt"] + row["chosen"], row["prompt"] + row["rejected"])
            for row in self.talks(count, turns)
        ]

    def marked(self, count: int, *, talks: bool = False, most: int = 12) -> list[Row]:
        """Completions with their marks."""
        rows = self.talks(count) if talks else self.texts(count, most)
        return [
            {
                "prompt": row["prompt"],
                "completion": row["chosen"],
                "label": self._draw.random() > 0.4,
            }
            for row in rows
        ]

    def _turn(self, role: str) -> Row:
        return {"role": role, "content": self.words()}

    def _talk(self, later: int) -> list[Row]:
        more = [self._turn(role) for _ in range(later) for role in ("user", "assistant")]
        return [self._turn("assistant"), *more]

    def _answers(self, chosen: Any, rejected: Any) -> Row:
        return {"chosen": chosen, "rejected": rejected}


CASES = {
    "text": Rendering(rows=Preferences(1).texts(40), ours=RAW),
    "text, no template": Rendering(rows=Preferences(2).texts(40), template=None),
    "text, implicit prompt": Rendering(rows=Preferences(3).implicit_texts(200)),
    "text, truncated": Rendering(rows=Preferences(4).texts(60), ours=RAW, max_length=8),
    "messages": Rendering(rows=Preferences(5).talks(40), **LLAMA),
    "messages, several turns": Rendering(rows=Preferences(6).talks(40, 3), **LLAMA),
    "messages, implicit prompt": Rendering(rows=Preferences(7).implicit(40, 2), **LLAMA),
    "messages, answers of several turns": Rendering(
        rows=Preferences(8).talks(40, later=1), ours={"train_on": "completion"}, **LLAMA
    ),
    "messages, truncated": Rendering(rows=Preferences(9).talks(60), max_length=40, **LLAMA),
    "messages, tools": Rendering(
        rows=Preferences(10).talks(20, tools=True), template="trl:qwen3", max_length=2048,
        untrained_after="<|im_end|>", difference=NEWLINE,
    ),
    "messages, Qwen3's template": Rendering(
        rows=Preferences(11).talks(40, 2), template="trl:qwen3",
        untrained_after="<|im_end|>", difference=NEWLINE,
    ),
    "kto, text": Rendering(rows=Preferences(12).marked(40), ours=RAW, kto=True),
    "kto, messages": Rendering(rows=Preferences(13).marked(38, talks=True), kto=True, **LLAMA),
    "kto, unrelated answers cut": Rendering(
        rows=Preferences(14).marked(60, most=20), ours=RAW | {"overlong": "drop"}, kto=True,
        max_length=34,
        difference="TRL cuts what we leave out here: it gets the rows that fit",
    ),
}  # fmt: skip


def ours(case: Rendering, model: Path, path: Path) -> tuple[list[Document], list[bool]]:
    """Return the documents that MegaTrain makes, and the marks."""
    from transformers import AutoTokenizer

    given = {name: resolved(value) for name, value in case.ours.items()}
    kind = {"path": str(path), "format": "kto" if case.kto else "pairs"}
    data = {
        "train": [kind], "max_length": case.max_length, "overlong": "truncate",
        "max_dropped": 1.0, **given,
    }  # fmt: skip
    config = Config.model_validate(
        {"model": str(model), "data": data, "train": {"batch_rows": GROUP, "batch_tokens": None}}
    )
    rows = gather(config, AutoTokenizer.from_pretrained(model))
    assert rows.answers is not None
    marks = [] if rows.answers.desirable is None else rows.answers.desirable.tolist()
    made = [rows.train.tokens(number) for number in range(len(rows.train.lengths))]
    return [(ids.tolist(), trained.tolist()) for ids, trained in made], marks


def theirs(
    case: Rendering, model: Path, rows: list[Row], scratch: Path
) -> tuple[list[Document], list[bool], Any]:
    """Return what TRL's trainer trains on, two documents for each row; marks; its tokenizer."""
    import trl
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoModelForCausalLM, AutoTokenizer

    disable_progress_bars()
    name = "KTO" if case.kto else "DPO"
    settings = getattr(trl, f"{name}Config")(
        output_dir=str(scratch), use_cpu=True, bf16=False, report_to=[],
        max_length=case.max_length, per_device_train_batch_size=GROUP,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = getattr(trl, f"{name}Trainer")(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    made = list(trainer.train_dataset)
    batch = trainer.data_collator(made)
    if not case.kto:
        half = len(made)
        found = list(_documents(batch, ""))
        return [one for n in range(half) for one in (found[n], found[half + n])], [], tokenizer
    pairs = zip(_documents(batch, ""), _documents(batch, "KL_"), strict=True)
    return [one for pair in pairs for one in pair], batch["label"].bool().tolist(), tokenizer


def _documents(batch: Mapping[str, Any], prefix: str) -> Iterator[Document]:
    columns = (
        batch[f"{prefix}{name}"].tolist()
        for name in ("input_ids", "attention_mask", "completion_mask")
    )
    for ids, mask, trained in zip(*columns, strict=True):
        length = sum(mask)
        yield ids[:length], [bool(one) for one in trained[:length]]


def compare(name: str) -> dict[str, Any]:
    """Prepare the rows of one case with both tools; return what differs."""
    case = CASES[name]
    with tempfile.TemporaryDirectory(prefix="megatrain-prepared-") as folder:
        scratch = Path(folder)
        os.environ["MEGATRAIN_CACHE"] = str(scratch / "cache")
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # no workers for few rows
        path = scratch / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in case.rows))
        template = None if case.template is None else _text(case.template)
        write_model(scratch / "model", "llama", [path.read_text()], template, case.end)
        own, own_marks = ours(case, scratch / "model", path)
        rows = case.rows
        if case.ours.get("overlong") == "drop":
            rows = _that_fit(case, scratch / "model")
        other, other_marks, tokenizer = theirs(case, scratch / "model", rows, scratch / "theirs")
    left_out = 0
    if case.untrained_after is not None:
        mark = tokenizer.convert_tokens_to_ids(case.untrained_after)
        left_out = sum(_untrain_after(mark, document) for document in other)
    wrong = [n for n, pair in enumerate(zip(own, other, strict=False)) if pair[0] != pair[1]]
    return {
        "case": name,
        "rows": len(case.rows),
        "documents": len(own),
        "trained": sum(sum(trained) for _, trained in own),
        "left_out_of_theirs": left_out,
        "known_difference": case.difference,
        "wrong": wrong[:5],
        "equal": own == other and own_marks == other_marks and bool(own),
    }


def _that_fit(case: Rendering, model: Path) -> list[Row]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    lengths = [len(tokenizer(row["prompt"] + row["completion"])["input_ids"]) for row in case.rows]
    pairs = zip(case.rows, lengths, strict=True)
    return [row for row, length in pairs if length < case.max_length]  # and its end


def _text(template: str) -> str:
    found = resolved(template)
    return found if found == template else Path(found).read_text(encoding="utf-8")


def _untrain_after(mark: int, document: Document) -> int:
    """Take the tokens after `mark` out of the targets; return how many."""
    ids, trained = document
    places = [n + 1 for n, token in enumerate(ids[:-1]) if token == mark and trained[n + 1]]
    for place in places:
        trained[place] = False
    return len(places)


def main() -> None:
    main_of(
        __doc__,
        package="trl",
        kind="case",
        names=lambda: CASES,
        compare=compare,
        is_wrong=lambda result: not result["equal"],
        line=_line,
    )


def _line(found: dict[str, Any]) -> str:
    return (
        f"{found['case']:36} {found['documents']:4} documents, {found['trained']:5} trained tokens"
        f"  {'equal' if found['equal'] else 'DIFFERENT'} {found['wrong'] or ''}"
    )


if __name__ == "__main__":
    main()

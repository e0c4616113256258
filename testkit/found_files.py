"""Files as people have them: the same questions and answers under the names and in the shapes that
spreadsheets, scrapers, other trainers and APIs write."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, DatasetDict

from megatrain.choices import RowFormat

ASKED = ("How far is it; really?", "Who said: \u00bbno, never\u00ab?", "Why?")
SAID = (
    "Two miles, by road.",
    "Nobody did, as far as I know; ask again.",
    "Because it rains today.",
)
WORSE = ("Five hundred feet.", "You, twice.", "It does not.")
SYSTEM = "You are brief."
NUM_ROWS = len(ASKED)
PAIRS = [(("user", asked), ("assistant", said)) for asked, said in zip(ASKED, SAID, strict=True)]
"""The conversations that every file has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFile:
    """A file, and how it is read."""

    write: Callable[[Path], Path]
    """Writes it into a folder; returns its path."""
    wanted: RowFormat = "auto"
    """The format, as a loss names it."""
    printed: str = ""
    """A part of the format that is printed; empty: the file is refused with a line that helps."""
    behind: str = ""
    """Text that every question has behind it."""


def _table(name: str, columns: Mapping[str, Sequence[str]], **style: Any) -> FoundFile:
    """Return a maker of a table; `style` has its separator, encoding and first line."""
    printed, wanted = style.pop("printed", ""), style.pop("wanted", "auto")
    encoding, first = style.pop("encoding", "utf-8"), style.pop("first", "")
    behind = style.pop("behind", "")

    def write(folder: Path) -> Path:
        text = io.StringIO()
        text.write(first)
        writer = csv.writer(text, **style)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
        (folder / name).write_bytes(text.getvalue().encode(encoding))
        return folder / name

    return FoundFile(write=write, wanted=wanted, printed=printed, behind=behind)


def _lines(name: str, rows: Sequence[Any], **facts: Any) -> FoundFile:
    def write(folder: Path) -> Path:
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        if name.endswith(".gz"):
            data = gzip.compress(data)
        if name.endswith(".zst"):
            data = pa.compress(data, codec="zstd", asbytes=True)
        (folder / name).write_bytes(data)
        return folder / name

    return FoundFile(write=write, **facts)


def _whole(name: str, value: Any, **facts: Any) -> FoundFile:
    def write(folder: Path) -> Path:
        (folder / name).write_text(json.dumps(value, indent=2))
        return folder / name

    return FoundFile(write=write, **facts)


def _arrow(name: str, columns: Mapping[str, Sequence[Any]], *, stream: bool) -> FoundFile:
    def write(folder: Path) -> Path:
        table = pa.table(dict(columns))
        begin = pa.ipc.new_stream if stream else pa.ipc.new_file
        with begin(str(folder / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
        return folder / name

    return FoundFile(write=write, printed="completion = A")


def _saved(folder: Path) -> Path:
    Dataset.from_dict({"Question": ASKED, "Answer": SAID}).save_to_disk(folder / "saved")
    return folder / "saved"


def _saved_splits(folder: Path) -> Path:
    rows = Dataset.from_dict({"question": ASKED, "answer": SAID})
    DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(folder / "splits")
    return folder / "splits"


def _each(make: Callable[[str, str], Any]) -> list[Any]:
    return [make(asked, said) for asked, said in zip(ASKED, SAID, strict=True)]


def _turns(role: str, content: str, user: str, assistant: str) -> list[Any]:
    return _each(lambda q, a: [{role: user, content: q}, {role: assistant, content: a}])


def _requests(folder: Path) -> Path:
    """Both files of a batch; the path is that of the requests."""
    asked: list[Any] = []
    said: list[Any] = []
    for number, (q, a) in enumerate(zip(ASKED, SAID, strict=True)):
        body = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": q}]}
        asked.append({"custom_id": f"r{number}", "method": "POST",
                      "url": "/v1/chat/completions", "body": body})  # fmt: skip
        message = {"role": "assistant", "content": a, "refusal": None}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        answer = {"status_code": 200, "request_id": "x",
                  "body": {"object": "chat.completion", "choices": choices}}  # fmt: skip
        said.insert(0, {"id": f"b{number}", "custom_id": f"r{number}", "response": answer,
                        "error": None})  # fmt: skip
    for name, rows in (("REQUESTS.jsonl", asked), ("OUTPUTS.jsonl", said)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "REQUESTS.jsonl"


def _outputs(folder: Path) -> Path:
    return _requests(folder).with_name("OUTPUTS.jsonl")


def _answered_requests() -> list[Any]:
    talks = _turns("role", "content", "user", "assistant")
    return [{"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions",
             "body": {"model": "m", "messages": talk}} for n, talk in enumerate(talks)]  # fmt: skip


def _ultrafeedback() -> list[Any]:
    def row(q: str, a: str, b: str) -> Any:
        said = [
            [{"role": "user", "content": q}, {"role": "assistant", "content": t}] for t in (a, b)
        ]
        return {"prompt": q, "prompt_id": "0f", "chosen": said[0], "rejected": said[1],
                "messages": said[0], "score_chosen": 8.5, "score_rejected": 3.0}  # fmt: skip

    return [row(*cells) for cells in zip(ASKED, SAID, WORSE, strict=True)]


def _openai_preferences() -> list[Any]:
    return [
        {"input": {"messages": [{"role": "user", "content": q}], "tools": []},
         "preferred_output": [{"role": "assistant", "content": a}],
         "non_preferred_output": [{"role": "assistant", "content": b}]}
        for q, a, b in zip(ASKED, SAID, WORSE, strict=True)
    ]  # fmt: skip


_IDS = [f"{n:04}" for n in range(NUM_ROWS)]
_BOM = "utf-8-sig"

FOUND_FILES: dict[str, FoundFile] = {
    # Tables.
    "capitals": _table("faq.csv", {"Question": ASKED, "Answer": SAID}, printed="Answer"),
    "a spreadsheet in Europe": _table(
        "export.csv", {" Question ": ASKED, "Answer": SAID, "": [""] * 3, " ": [""] * 3},
        delimiter=";", encoding=_BOM, lineterminator="\r\n", printed="prompt = Question",
    ),
    "a spreadsheet with its separator": _table(
        "sep.csv", {"input": ASKED, "output": SAID}, delimiter=";", first="sep=;\r\n",
        encoding=_BOM, printed="completion = output",
    ),
    "q and a": _table("qa.tsv", {"Q": ASKED, "A": SAID}, delimiter="\t", printed="prompt = Q"),
    "UTF-16": _table("unicode.csv", {"prompt": ASKED, "completion": SAID}, encoding="utf-16"),
    "names that say little": _table(
        "crm.csv", {"id": _IDS, "customer_said": ASKED, "we_replied": SAID}
    ),
    "two answers": _table(
        "two.csv", {"Query": ASKED, "Answer": SAID, "Response": SAID, "id": _IDS}
    ),
    "a question and a context": _table(
        "rag.csv", {"question": ASKED, "input": [SYSTEM] * 3, "output": SAID},
        behind=f"\n{SYSTEM}",
    ),
    # Files of other tools and datasets.
    "alpaca": _whole(
        "alpaca.json", _each(lambda q, a: {"instruction": q, "input": "", "output": a}),
        printed="alpaca",
    ),
    "dolly": _lines(
        "dolly.jsonl",
        _each(lambda q, a: {"instruction": q, "context": SYSTEM, "response": a, "category": "x"}),
        printed="input = context", behind=f"\n{SYSTEM}",
    ),
    "instruction and response": _lines(
        "ir.jsonl", _each(lambda q, a: {"instruction": q, "response": a}), printed="response"
    ),
    "sharegpt": _whole(
        "sharegpt.json",
        [{"id": "x", "conversations": talk} for talk in _turns("from", "value", "human", "gpt")],
        printed="conversations (from, value)",
    ),
    "sharegpt in a column of another name": _lines(
        "dialog.jsonl", [{"Dialog": talk} for talk in _turns("from", "value", "human", "chatgpt")],
        printed="messages = Dialog",
    ),
    "speaker and text": _lines(
        "speakers.jsonl", [{"turns": talk} for talk in _turns("speaker", "text", "user", "bot")],
        printed="messages = turns",
    ),
    "a question and its answer in one turn": _lines(
        "pairs_of_turns.jsonl",
        _each(lambda q, a: {"conversation": [{"human": q, "assistant": a}]}),
        printed="conversation",
    ),
    "roles of a help desk": _lines(
        "desk.jsonl",
        [{"conversation": talk} for talk in _turns("who", "said", "Customer", "Agent")],
    ),
    "turns in a column of no meaning": _lines(
        "log.jsonl", [{"id": "1", "log": talk} for talk in _turns("role", "content", "user", "ai")]
    ),
    "messages in a body": _lines("batch.jsonl", _answered_requests(), printed="body.messages"),
    "requests of a batch": FoundFile(write=_requests),
    "outputs of a batch": FoundFile(write=_outputs),
    "a list in an object": _whole(
        "squad.json",
        {"version": "1.1", "data": _each(lambda q, a: {"question": q, "answer": a})},
    ),
    # Compressed and columnar files.
    "zstd": _lines(
        "qa.jsonl.zst", _each(lambda q, a: {"q": q, "a": a}), printed="prompt = q"
    ),
    "gzip": _lines("qa.ndjson.gz", _each(lambda q, a: {"USER": q, "Assistant": a}), printed="USER"),
    "arrow file": _arrow("rows.arrow", {"Q": ASKED, "A": SAID}, stream=False),
    "arrow stream": _arrow("stream.arrow", {"Q": ASKED, "A": SAID}, stream=True),
    "save_to_disk": FoundFile(write=_saved, printed="prompt = Question"),
    "save_to_disk with splits": FoundFile(write=_saved_splits, printed="question / answer"),
    # Preferences.
    "hh": _lines(
        "hh.jsonl",
        [{"chosen": f"\n\nHuman: {q}\n\nAssistant: {a}",
          "rejected": f"\n\nHuman: {q}\n\nAssistant: {b}"}
         for q, a, b in zip(ASKED, SAID, WORSE, strict=True)],
        wanted="pairs", printed="pairs (chosen, rejected)",
    ),
    "ultrafeedback": _lines(
        "uf.jsonl", _ultrafeedback(), wanted="pairs", printed="pairs (prompt, chosen, rejected)"
    ),
    "preferences of OpenAI": _lines(
        "openai_dpo.jsonl", _openai_preferences(), wanted="pairs", printed="input.messages"
    ),
    "preferences in capitals": _table(
        "dpo.csv", {"Prompt": ASKED, "Chosen": SAID, "Rejected": WORSE}, wanted="pairs",
        printed="rejected = Rejected",
    ),
    "better and worse": _table(
        "ab.csv", {"id": _IDS, "question": ASKED, "better_text": SAID, "worse_text": WORSE},
        wanted="pairs",
    ),
    "thumbs": _table(
        "thumbs.csv", {"question": ASKED, "answer": SAID, "thumbs_up": ["1", "0", "1"]},
        wanted="kto",
    ),
}  # fmt: skip
"""Files by a few words about them."""

"""Columns under other names than ours: found where it is plain which is which, else refused.

    Question, Answer              prompt = Question, completion = Answer
    instruction, context, ...     instruction, input = context, output = response
    body: {messages: [...]}       messages = body.messages
    source, target                refused, with the line `columns: {prompt: source, ...}`

Case, and spaces around a name, do not count. It is plain if each column that a format needs has one
candidate with a name of PLAIN. With several, or none, the error proposes lines for the config: the
user decides, and `megatrain data FILE --columns ...` shows the result. Names in a config come
before any other.

Laws (tests/data/rows/test_columns.py, tests/data/rows/test_strangers.py)
    1. The same rows under other names give the same documents.
    2. The line of a refusal makes the file train.
    3. Two columns that could both be the prompt, or the answer, are never chosen from.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType
from typing import Any, TypeGuard

from megatrain.choices import RowFormat
from megatrain.config.load import write_yaml
from megatrain.data.rows.cells import decoded
from megatrain.data.rows.formats import FORMATS, KNOWN, Format, has_turns, usual_format
from megatrain.data.rows.hub_rows import TRAIN, FileRows, HubRows
from megatrain.data.rows.in_memory import GivenRows
from megatrain.data.rows.messages import ROLES
from megatrain.data.rows.reading import FIRST_ROWS
from megatrain.data.rows.turns import TALKS, Names, by_role, turn_keys
from megatrain.errors import DataError, listing
from megatrain.text import printable

PLAIN: Mapping[str, frozenset[str]] = {
    ours: frozenset(names.split())
    for ours, names in {
        "messages": "messages conversations conversation dialog dialogue turns chat",
        "prompt": "prompt question query q input instruction user human",
        "completion": "completion answer a response output reply assistant gpt",
        "text": "text",
        "instruction": "instruction",
        "input": "input context",
        "output": "output response answer completion",
        "history": "history",
        "system": "system system_prompt",
        "tools": "tools",
        "chosen": "chosen preferred preferred_output chosen_response",
        "rejected": "rejected dispreferred non_preferred_output rejected_response",
        "label": "label kto_tag desirable",
        "input_ids": "input_ids",
        "labels": "labels",
        "attention_mask": "attention_mask",
        "chat_template_kwargs": "chat_template_kwargs",
        "images": "images",
        "audios": "audios",
    }.items()
}
"""Names that leave no doubt, in lower case and with underscores, by our column."""
_TURN = ("role", "content")
_MEDIA = ("images", "audios")
_BESIDE = ("system", "tools", "chat_template_kwargs", *_MEDIA, *_TURN)
_ALPACA = ("input", "history", "system", "tools", "chat_template_kwargs", *_MEDIA)
_LISTS = ("messages", "input_ids", "labels", "attention_mask")
_MOST_LINES = 3
_MOST_CELLS = 8
_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class _Form:
    """The columns of one way to write a format."""

    kind: str
    needs: tuple[str, ...]
    may: tuple[str, ...]


_FORMS = (
    _Form("tokens", ("input_ids",), ("labels", "attention_mask")),
    _Form("messages", ("messages",), _BESIDE),
    _Form("alpaca", ("instruction", "output"), _ALPACA),
    _Form("pair", ("prompt", "completion"), _BESIDE),
    _Form("text", ("text",), ()),
    _Form("pairs", ("instruction", "chosen", "rejected"), _ALPACA),
    _Form("pairs", ("messages", "chosen", "rejected"), _BESIDE),
    _Form("pairs", ("prompt", "chosen", "rejected"), _BESIDE),
    _Form("pairs", ("chosen", "rejected"), _BESIDE),
    _Form("kto", ("instruction", "output", "label"), _ALPACA),
    _Form("kto", ("messages", "label"), _BESIDE),
    _Form("kto", ("prompt", "completion", "label"), _BESIDE),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """A column of the first rows, perhaps inside of another."""

    path: tuple[str, ...]
    plain: str
    """Its name in lower case, with underscores."""
    cells: tuple[Any, ...]
    """Those that are not empty."""
    rows: frozenset[int]

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def holds(self, kind: type) -> bool:
        """Return whether most of its cells are of a type."""
        return 2 * sum(isinstance(cell, kind) for cell in self.cells) > len(self.cells)

    @property
    def turns(self) -> list[Mapping[str, Any]]:
        """All turns, if most cells are lists of them; else none."""
        lists = [found for cell in self.cells if _are_turns(found := decoded(cell))]
        return (
            [turn for found in lists for turn in found] if 2 * len(lists) > len(self.cells) else []
        )


_Found = Mapping[str, tuple[_Column, ...]]
"""Our columns, each with its spellings in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proposal:
    """Keys of a source that would settle it."""

    columns: Mapping[str, str]
    roles: Mapping[str, str] = field(default_factory=dict)

    def keys(self) -> dict[str, Any]:
        found = {"columns": dict(self.columns), "roles": dict(self.roles)}
        return {key: value for key, value in found.items() if value}


class _Unclear(Exception):
    """Several columns could be one of ours."""

    def __init__(self, ours: str, choice: Sequence[_Column], settled: Mapping[str, str]) -> None:
        """`settled` has one column for each other that the form needs."""
        super().__init__(ours)
        self.ours, self.choice, self.settled = ours, choice, settled


def find_format(
    first: Sequence[object],
    where: object,
    wanted: RowFormat,
    columns: Mapping[str, str],
    roles: Mapping[str, Sequence[str]],
) -> Format:
    """Return the format of rows whose columns or roles have other names than ours.

    Raises DataError with the lines that would settle it.
    """
    rows = [value for value in first if isinstance(value, Mapping)]
    there = _columns_of(rows)
    given = {ours: _named(theirs, ours, there, rows, where)
             for ours, theirs in columns.items() if ours not in _TURN}  # fmt: skip
    _check_batch_file(where, there)
    names = Names(
        role=columns.get("role"),
        content=columns.get("content"),
        roles=tuple((name.lower(), ours) for ours, named in roles.items() for name in named),
    )
    asked = [key for key in _TURN if key in columns]
    try:
        for form in _forms(wanted, given):
            if not {*given, *asked} <= {*form.needs, *form.may}:
                continue
            for found in _matches(form, given, there):
                if (shape := _shape(form, found, names, rows)) is not None:
                    return replace(shape, is_given=wanted != "auto")
    except _Unclear as unclear:
        raise _unclear(where, unclear, wanted) from None
    raise _refusal(where, first, rows, there, wanted, columns)


def _forms(wanted: RowFormat, given: _Found) -> Iterator[_Form]:
    for form in _FORMS:
        is_plain = form.kind != "kto" or "label" in given
        if FORMATS[form.kind].name == wanted or (wanted == "auto" and is_plain):
            yield form


def plain_name(name: str) -> str:
    """Return a name without regard to case and to spaces: `User Message` is user_message."""
    return re.sub(r"[\s-]+", "_", name.strip().lower())


def _columns_of(rows: Sequence[Mapping[Any, Any]]) -> list[_Column]:
    """Return the columns of the rows in their order; then the lists of turns inside of objects."""
    there = _collected(rows, ())
    inner: list[_Column] = []
    for column in there:
        if column.holds(dict):
            objects = [cell if isinstance(cell, dict) else {} for cell in column.cells]
            inner += _collected(objects, column.path)
    return [*there, *inner]


def _collected(rows: Sequence[Mapping[Any, Any]], under: tuple[str, ...]) -> list[_Column]:
    cells: dict[str, dict[int, Any]] = {}
    for number, row in enumerate(rows):
        for name, cell in row.items():
            if isinstance(name, str) and cell is not None and cell not in ("", []):
                cells.setdefault(name, {})[number] = cell
    return [
        _Column(
            path=(*under, name),
            plain=plain_name(name),
            cells=tuple(found.values()),
            rows=frozenset(found),
        )
        for name, found in cells.items()
    ]


def _named(
    theirs: str, ours: str, there: Sequence[_Column], rows: Sequence[Any], where: object
) -> tuple[_Column, ...]:
    """Return the column that a config names, in every spelling that the rows have."""
    found = [column for column in there if column.name == theirs]
    found = found or [column for column in there if plain_name(column.name) == plain_name(theirs)]
    if found:
        return _spellings(found) or tuple(found[:1])
    path = tuple(theirs.split("."))
    cells = [Names(columns=((path, ours),)).read(row).get(ours) for row in rows]
    if any(cell is not None for cell in cells):
        return (_Column(path=path, plain="", cells=tuple(cells), rows=frozenset()),)
    known = [column.name for column in there if len(column.path) == 1]
    near = difflib.get_close_matches(theirs, known, n=1)
    raise DataError(
        f"{where}: columns has {ours}: {theirs}, and the first {len(rows)} rows have no such "
        f"column; theirs are {printable(listing(known, most=20))}."
        + (f" Did you mean {printable(near[0])}?" if near else "")
    )


def _spellings(found: Sequence[_Column]) -> tuple[_Column, ...]:
    """Return columns that are one under several spellings: no row has two of them. Else none."""
    together = sum(len(column.rows) for column in found)
    return tuple(found) if together == len(frozenset[int]().union(*(c.rows for c in found))) else ()


def _matches(form: _Form, given: _Found, there: Sequence[_Column]) -> Iterator[_Found]:
    """Yield the columns for a form: those of the rows, then those one level deeper."""
    top = [column for column in there if len(column.path) == 1]
    if (found := _match(form, given, top)) is not None:
        yield found
    if "messages" in form.needs:
        for outer in top:
            inner = [c for c in there if c.path[0] == outer.path[0] and len(c.path) == 2]
            talks = [column for column in inner if column.plain in TALKS and column.turns]
            if len(talks) == 1:
                beside = [c for c in inner if c.plain in ("tools", "system")]
                deeper = {"messages": tuple(talks)} | {c.plain: (c,) for c in beside}
                others = [column for column in top if column is not outer]
                if (found := _match(form, {**deeper, **given}, others)) is not None:
                    yield found


def _match(form: _Form, given: _Found, there: Sequence[_Column]) -> _Found | None:
    """Return the columns for a form, or None. Raises _Unclear."""
    found = dict(given)
    for ours in (*form.needs, *form.may):
        if ours in found or ours in _TURN:
            continue
        taken = {column.path for columns in found.values() for column in columns}
        free = [column for column in there if column.path not in taken]
        choice = [column for column in free if column.plain in PLAIN[ours] and _fits(ours, column)]
        exact = [column for column in choice if column.plain == ours]
        if ours in form.may and exact:
            choice = exact
        if not choice and ours in form.needs:
            return None
        if len(choice) > 1 and not _spellings(choice):
            raise _Unclear(ours, choice, _settled(form, found, free))
        if choice:
            found[ours] = tuple(choice)
    return found


def _fits(ours: str, column: _Column) -> bool:
    if ours == "messages":
        return bool(column.turns)
    if ours in ("label", "tools", "chat_template_kwargs", "history", *_MEDIA):
        return True
    return column.holds(list) if ours in _LISTS else column.holds(str) or bool(column.turns)


def _shape(
    form: _Form, found: _Found, names: Names, rows: Sequence[Mapping[str, Any]]
) -> Format | None:
    """Return the format of the rows under our names, if most of them have it."""
    moved = tuple((column.path, ours) for ours, columns in found.items() for column in columns
                  if column.path != (ours,))  # fmt: skip
    talk = [turn for columns in found.values() for column in columns for turn in column.turns]
    is_keyed = not names.role and not names.content and any(map(by_role, talk[:1]))
    names = replace(names, columns=moved, keyed=is_keyed)
    read = [names.read(row) for row in rows]
    shapes = Counter(
        shape
        for row in read
        for shape in FORMATS[form.kind].find(row, {key for key, cell in row.items() if cell})
        if {*form.needs} <= {*shape.columns}
    )
    if not shapes:
        return None
    shape = shapes.most_common(1)[0][0]
    return replace(shape, names=names) if has_turns(read, shape) else None


# Refusals.


def _settled(form: _Form, found: _Found, free: Sequence[_Column]) -> dict[str, str]:
    """Return the columns found so far, and the likeliest for the others that a form needs."""
    settled = {ours: columns[0].name for ours, columns in found.items()}
    for ours in form.needs:
        choice = [column.name for column in free if column.plain in PLAIN[ours]]
        if ours not in settled and choice:
            settled[ours] = choice[0]
    return settled


def _unclear(where: object, unclear: _Unclear, wanted: RowFormat) -> DataError:
    """Return the refusal of several candidates, with a line for each."""
    ours, choice = unclear.ours, unclear.choice
    lines = [_Proposal(columns={**unclear.settled, ours: column.name}) for column in choice]
    behind = [column for column in choice if column.plain in PLAIN["input"]]
    asked = [column for column in choice if column not in behind]
    if ours == "prompt" and behind and asked and "completion" in unclear.settled:
        both = {"instruction": asked[0].name, "input": behind[0].name}
        lines.insert(0, _Proposal(columns={**both, "output": unclear.settled["completion"]}))
    names = printable(listing(column.name for column in choice))
    return DataError(
        f"{where}: {names} could each be the {ours} of a row.\n{_advice(where, lines, wanted)}"
    )


def _refusal(
    where: object,
    first: Sequence[object],
    rows: Sequence[Mapping[Any, Any]],
    there: Sequence[_Column],
    wanted: RowFormat,
    columns: Mapping[str, str],
) -> DataError:
    """Return the refusal of rows that have no known format, with the likeliest lines."""
    known = listing({printable(str(key)) for row in rows for key in row}, most=20) or "(none)"
    usual = {FORMATS[found.kind].name for form in _FORMS
             if (found := usual_format(first, FORMATS[form.kind].name))}  # fmt: skip
    what = f"no known format in the first {len(first)} rows; their columns are {known}"
    if wanted != "auto":
        needed = next(spec.columns for spec in FORMATS.values() if spec.name == wanted)
        what = (
            f"format {wanted} needs the columns {needed}; those of the first {len(first)} rows are "
            f"{known}"
        )
        if usual - {wanted}:
            what += f". Formats that fit: {listing(usual)}"
    elif columns:
        what = (
            f"columns names {listing(columns)}, and no format has all of them and is found in the "
            f"first {len(first)} rows; their columns are {known}"
        )
    if (shape := usual_format(first, wanted)) is not None and not has_turns(first, shape):
        what = f"the turns of {shape.columns[0]} have keys or roles that are not known"
    lines = list(_proposals(there, wanted))[:_MOST_LINES]
    advice = _advice(where, lines, wanted) if lines else f"  Known formats: {KNOWN}."
    return DataError(f"{where}: {what}.\n{_first_row(rows)}{advice}")


def _first_row(rows: Sequence[Mapping[Any, Any]]) -> str:
    """Return the cells of the first row, cut."""
    if not rows:
        return ""
    lines = ["  The first row:"]
    for name, cell in list(rows[0].items())[:_MOST_CELLS]:
        text = printable(
            cell if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False, default=str)
        )
        cut = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]} ..."
        lines.append(f"    {printable(str(name))}: {cut}")
    return "\n".join(lines) + "\n"


def _advice(where: object, lines: Sequence[_Proposal], wanted: RowFormat) -> str:
    """Return the lines of a config that would settle it, and the command that shows the first."""
    source = _source_keys(where)
    if source is None:  # rows of a program
        renamed = {theirs: ours for ours, theirs in lines[0].columns.items()}
        return f"  Rename them, as datasets does: rows.rename_columns({renamed})."
    given = {} if wanted in ("auto", "pairs", "kto") else {"format": wanted}
    text = "  Map them in the config" + (", one of:\n" if len(lines) > 1 else ":\n")
    for line in lines:
        text += f"    data: {write_yaml({'train': {**source, **given, **line.keys()}})}\n"
    options = {**source, **lines[0].keys()} | ({} if wanted == "auto" else {"format": wanted})
    path = shlex.quote(str(options.pop("path")))
    shown = (f"--{key} {shlex.quote(_as_option(value))}" for key, value in options.items())
    return f"{text}  To see the rows with it: megatrain data {path} -m MODEL {' '.join(shown)}"


def _as_option(value: object) -> str:
    return value if isinstance(value, str) else write_yaml(value)


def _source_keys(where: object) -> dict[str, str] | None:
    """Return the keys of a source in a config; None if it is not from one."""
    if isinstance(where, HubRows):
        found = {"path": where.id, "name": where.name, "split": where.split}
        return {key: value for key, value in found.items() if value and value != TRAIN}
    if isinstance(where, FileRows):
        return {"path": str(where.path), "split": where.split}
    return None if isinstance(where, GivenRows) else {"path": str(where)}


def _proposals(there: Sequence[_Column], wanted: RowFormat) -> Iterator[_Proposal]:
    """Yield guesses, the likeliest first: none of them is plain, so none is taken."""
    top = [column for column in there if len(column.path) == 1]
    texts = [column for column in top if column.holds(str) and not column.turns]
    if wanted in ("auto", "messages"):
        for column in there:
            if column.turns:
                yield _turns_proposal(column)
    if wanted == "pairs":
        yield from _compared(top, texts)
    if wanted in ("auto", "prompt_completion", "kto") and len(texts) > 1:
        yield from _asked_and_said(top, texts, wanted)
    if len(texts) == 1 and wanted in ("auto", "text") and not any(c.turns for c in there):
        yield _Proposal(columns={"text": texts[0].name})
    if wanted == "alpaca" and len(texts) > 1:
        asked, said = _longest(texts, 2)
        yield _Proposal(columns={"instruction": asked.name, "output": said.name})


def _compared(top: Sequence[_Column], texts: Sequence[_Column]) -> Iterator[_Proposal]:
    """Yield a prompt and two answers: by their names, the others by their order."""
    found: dict[str, _Column] = {}
    for ours in ("prompt", "chosen", "rejected"):
        like = [column for column in top if _is_like(column, ours)]
        if like and like[0] not in found.values():
            found[ours] = like[0]
    free = [column for column in texts if column not in found.values()]
    free = _longest(free, 3 - len(found))
    missing = [ours for ours in ("prompt", "chosen", "rejected") if ours not in found]
    if len(free) < len(missing):
        missing = [ours for ours in missing if ours != "prompt"]
    found |= dict(zip(missing, free, strict=False))
    if {"chosen", "rejected"} <= found.keys():
        order = [ours for ours in ("prompt", "chosen", "rejected") if ours in found]
        yield _Proposal(columns={ours: found[ours].name for ours in order})


def _asked_and_said(
    top: Sequence[_Column], texts: Sequence[_Column], wanted: RowFormat
) -> Iterator[_Proposal]:
    marks = [column for column in top if _is_mark(column)]
    texts = [column for column in texts if column not in marks]
    asked = [column for column in texts if _is_like(column, "prompt")]
    said = [column for column in texts if _is_like(column, "completion") and column not in asked]
    left = [column for column in texts if column not in asked and column not in said]
    pair = (asked[:1] + said[:1]) if asked and said else []
    if not pair and asked and left:
        pair = [asked[0], _longest(left, 1)[0]]
    elif not pair and said and left:
        pair = [_longest(left, 1)[0], said[0]]
    elif not pair and len(texts) > 1:
        pair = _longest(texts, 2)
    if len(pair) < 2 or (wanted == "kto" and not marks):
        return
    mark = {"label": marks[0].name} if wanted == "kto" else {}
    yield _Proposal(columns={"prompt": pair[0].name, "completion": pair[1].name, **mark})


def _turns_proposal(column: _Column) -> _Proposal:
    """Return the line for a list of turns: its column, the keys of a turn, and its roles."""
    turns = column.turns
    columns = {} if column.path == ("messages",) else {"messages": column.name}
    role, content = turn_keys(turns)
    if not all(key in turns[0] for key in (role, content)):
        texts = [key for key, part in turns[0].items() if isinstance(part, str)]
        if len(texts) < 2:
            return _Proposal(columns=columns)
        lengths = {key: sum(len(str(turn.get(key, ""))) for turn in turns) for key in texts}
        content = max(texts, key=lambda key: lengths[key])
        variety = {key: len({str(turn.get(key)) for turn in turns}) for key in texts}
        role = min((key for key in texts if key != content), key=lambda key: variety[key])
        columns |= {"role": role, "content": content}
    said = dict.fromkeys(str(turn.get(role)).strip() for turn in turns)
    odd = [name for name in said if name.lower() not in ROLES]
    free = [ours for ours in ("user", "assistant") if ours not in
            {ROLES.get(name.lower()) for name in said}]  # fmt: skip
    return _Proposal(columns=columns, roles=dict(zip(free, odd, strict=False)))


def _is_like(column: _Column, ours: str) -> bool:
    """Return whether one of the words of a name is one of ours."""
    return bool({column.plain, *column.plain.split("_")} & PLAIN[ours])


def _is_mark(column: _Column) -> bool:
    return all(str(cell).lower() in ("true", "false", "0", "1") for cell in column.cells)


def _longest(columns: Sequence[_Column], count: int) -> list[_Column]:
    """Return the columns with the longest texts, in the order of the file."""
    chars = {column.path: sum(map(len, map(str, column.cells))) for column in columns}
    kept = sorted(columns, key=lambda column: -chars[column.path])[:count]
    return [column for column in columns if column in kept]


def _are_turns(value: object) -> TypeGuard[list[Mapping[str, Any]]]:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


_JOIN = """\
import json; rows = lambda name: map(json.loads, open(name)); \
said = {r["custom_id"]: r["response"]["body"]["choices"][0]["message"] \
for r in rows(%s) if r.get("response")}; \
[print(json.dumps({"messages": r["body"]["messages"] + [said[r["custom_id"]]]})) \
for r in rows(%s) if r["custom_id"] in said]"""


def _check_batch_file(where: object, there: Sequence[_Column]) -> None:
    """Raise DataError for files of OpenAI's Batch API: questions and answers are in two of them."""
    turns = {column.name: column.turns for column in there}
    asked = turns.get("body.messages", [])
    is_asked = bool(asked) and not any(turn.get("role") == "assistant" for turn in asked)
    if "custom_id" not in turns or not (is_asked or "response.body" in turns):
        return
    have, other = ("questions", "answers") if is_asked else ("answers", "questions")
    here = (_source_keys(where) or {}).get("path", "FILE")
    files = ("OUTPUTS.jsonl", here) if is_asked else (here, "REQUESTS.jsonl")
    raise DataError(
        f"{where} is a file of OpenAI's Batch API. It has the {have} of a batch; the {other} are "
        "in another file. This joins them, then train on joined.jsonl:\n"
        f"    python3 -c {shlex.quote(_JOIN % tuple(map(json.dumps, files)))} > joined.jsonl"
    )


def detect_format(
    values: Iterable[object],
    where: object = "the data",
    wanted: RowFormat = "auto",
    columns: Mapping[str, str] = MappingProxyType({}),
    roles: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Format:
    """Return the format that most of the first rows have, of those that `wanted` names.

    `columns` has the file's names for ours, `roles` its roles for ours. Without them, columns with
    other names are found where it is plain which is which. Raises DataError if none of the rows has
    the format; it proposes the line for a config that names the columns.
    """
    first = list(islice(values, FIRST_ROWS))
    if not columns and not roles:
        shape = usual_format(first, wanted)
        if shape is not None and has_turns(first, shape):
            return shape
    return find_format(first, where, wanted, columns, roles)

"""What files hold that is no row: each with the reason it must be counted under.

`MESSAGES` are values of a `messages` column; csv holds them as JSON. `CELLS` are rows of the other
shapes. `LINES` are lines of a jsonl file that are not even rows.
"""

from __future__ import annotations

from typing import Any

from megatrain.data.rows import cells, media
from megatrain.data.rows.reading import DUPLICATE_KEY

U = {"role": "user", "content": "hi"}
A = {"role": "assistant", "content": "hello"}

MESSAGES: dict[str, tuple[Any, str]] = {
    "no turns": ([], cells.EMPTY),
    "a number": (7, cells.WRONG_TYPE),
    "a fraction": (0.5, cells.WRONG_TYPE),
    "true": (True, cells.WRONG_TYPE),
    "an object": (U, cells.WRONG_TYPE),
    "text": ("hi there", cells.WRONG_TYPE),
    "a text of JSON text": ('"hi"', cells.WRONG_TYPE),
    "list of text": (["hi", "hello"], cells.WRONG_TYPE),
    "list of numbers": ([1, 2], cells.WRONG_TYPE),
    "list of lists": ([["user", "hi"], ["assistant", "hello"]], cells.WRONG_TYPE),
    "null turn": ([U, None, A], cells.IS_NULL),
    "only null turns": ([None], cells.IS_NULL),
    "no role": ([{"content": "hi"}, A], cells.OTHER_SHAPE),
    "no content": ([U, {"role": "assistant"}], cells.OTHER_SHAPE),
    "empty turn": ([{}, A], cells.OTHER_SHAPE),
    "keys of another tool": ([{"from": "human", "value": "hi"}], cells.OTHER_SHAPE),
    "misspelled role key": ([{"rol": "user", "content": "hi"}, A], cells.OTHER_SHAPE),
    "null role": ([{"role": None, "content": "hi"}, A], cells.IS_NULL),
    "null content": ([U, {"role": "assistant", "content": None}], cells.IS_NULL),
    "null question": ([{"role": "user", "content": None}, A], cells.IS_NULL),
    "role is a number": ([{"role": 1, "content": "hi"}, A], cells.WRONG_TYPE),
    "role is a list": ([{"role": ["user"], "content": "hi"}, A], cells.WRONG_TYPE),
    "content is a number": ([U, {"role": "assistant", "content": 42}], cells.WRONG_TYPE),
    "content is true": ([U, {"role": "assistant", "content": True}], cells.WRONG_TYPE),
    "content is a list": ([U, {"role": "assistant", "content": ["hello"]}], cells.WRONG_TYPE),
    "content is an object": ([U, {"role": "assistant", "content": {"a": 1}}], cells.WRONG_TYPE),
    "a place for a sound that no column has": (
        [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "input_audio"}]}, A],
        media.PLACES_DIFFER,
    ),
    "a part of another kind": (
        [{"role": "user", "content": [{"type": "tool_use", "text": "x"}]}, A],
        cells.WRONG_TYPE,
    ),
    "a part without text": ([{"role": "user", "content": [{"type": "text"}]}, A], cells.IS_NULL),
    "only empty parts": (
        [{"role": "user", "content": [{"type": "text", "text": ""}]}, A],
        cells.EMPTY,
    ),
    "half a weight": ([U, {**A, "weight": 0.5}], cells.BAD_WEIGHT),
    "a weight of text": ([U, {**A, "weight": "high"}], cells.BAD_WEIGHT),
    "train that is no truth value": ([U, {**A, "train": "yes"}], cells.WRONG_TYPE),
    "train on a question": ([{**U, "train": True}, A], cells.NOT_AN_ANSWER),
    "train on some characters": (
        [U, {**A, "train_detail": [{"begin_offset": 0}]}],
        cells.BAD_WEIGHT,
    ),
    "tool calls that are no list": ([U, {**A, "tool_calls": 3}], cells.WRONG_TYPE),
    "a tool call that is not an object": ([U, {**A, "tool_calls": [3]}], cells.WRONG_TYPE),
    "a tool call without a name": ([U, {**A, "tool_calls": [{"id": "7"}]}], cells.IS_NULL),
    "a call that is not JSON": (
        [U, {"role": "function_call", "content": "f(x)"}, A],
        cells.WRONG_TYPE,
    ),
    "a thought that is not text": ([U, {**A, "reasoning_content": 3}], cells.WRONG_TYPE),
    "surrogate in a tool call": (
        [U, {**A, "tool_calls": [{"name": "f", "arguments": {"a": "\ud800"}}]}],
        cells.NOT_TEXT,
    ),
    "empty answer": ([U, {"role": "assistant", "content": ""}], cells.EMPTY),
    "blank answer": ([U, {"role": "assistant", "content": " \n\t "}], cells.EMPTY),
    "empty question": ([{"role": "user", "content": ""}, A], cells.EMPTY),
    "empty role": ([{"role": "", "content": "hi"}, A], cells.EMPTY),
    "second answer empty": ([U, A, U, {"role": "assistant", "content": ""}], cells.EMPTY),
    "only a question": ([U], cells.NO_ANSWER),
    "only a system prompt": ([{"role": "system", "content": "s"}], cells.NO_ANSWER),
    "two questions": ([U, U], cells.NO_ANSWER),
    "only a tool": ([U, {"role": "tool", "content": "4"}], cells.NO_ANSWER),
    "unknown role": ([{"role": "wizard", "content": "hi"}, A], cells.UNKNOWN_ROLE),
    "role with a typo": ([U, {"role": "asistant", "content": "hello"}], cells.UNKNOWN_ROLE),
    "lone surrogate": ([U, {"role": "assistant", "content": "a\ud800b"}], cells.NOT_TEXT),
    "low surrogate": ([U, {"role": "assistant", "content": "\udc80"}], cells.NOT_TEXT),
    "surrogate in role": ([{"role": "user\ud800", "content": "hi"}, A], cells.NOT_TEXT),
    "surrogate in question": ([{"role": "user", "content": "\ude00\ud83d"}, A], cells.NOT_TEXT),
}

GOOD_CELLS: dict[str, dict[str, Any]] = {
    "text": {"text": "some text"},
    "pair": {"prompt": "hi", "completion": "hello"},
    "alpaca": {"instruction": "greet", "input": "", "output": "hello", "history": None},
}
CELLS: dict[str, tuple[str, dict[str, Any], str]] = {
    "text null": ("text", {"text": None}, cells.IS_NULL),
    "text empty": ("text", {"text": ""}, cells.EMPTY),
    "text blank": ("text", {"text": "  "}, cells.EMPTY),
    "text surrogate": ("text", {"text": "\udfff"}, cells.NOT_TEXT),
    "text number": ("text", {"text": 3}, cells.WRONG_TYPE),
    "text list": ("text", {"text": ["a"]}, cells.WRONG_TYPE),
    "text elsewhere": ("text", {"txt": "a"}, cells.OTHER_SHAPE),
    "prompt null": ("pair", {"prompt": None, "completion": "x"}, cells.IS_NULL),
    "completion null": ("pair", {"prompt": "x", "completion": None}, cells.IS_NULL),
    "completion empty": ("pair", {"prompt": "x", "completion": ""}, cells.EMPTY),
    "prompt blank": ("pair", {"prompt": "\n", "completion": "x"}, cells.EMPTY),
    "completion number": ("pair", {"prompt": "x", "completion": 1.5}, cells.WRONG_TYPE),
    "completion object": ("pair", {"prompt": "x", "completion": {"a": "b"}}, cells.WRONG_TYPE),
    "completion surrogate": ("pair", {"prompt": "x", "completion": "\ud900"}, cells.NOT_TEXT),
    "pair renamed": ("pair", {"prompt": "x", "chosen": "y"}, cells.OTHER_SHAPE),
    "instruction empty": ("alpaca", {"instruction": "", "output": "x"}, cells.EMPTY),
    "output empty": ("alpaca", {"instruction": "x", "output": " "}, cells.EMPTY),
    "output null": ("alpaca", {"instruction": "x", "output": None}, cells.IS_NULL),
    "input number": ("alpaca", {"instruction": "x", "input": 1, "output": "y"}, cells.WRONG_TYPE),
    "history number": (
        "alpaca",
        {"instruction": "x", "output": "y", "history": 4},
        cells.WRONG_TYPE,
    ),
    "history flat": (
        "alpaca",
        {"instruction": "x", "output": "y", "history": ["a", "b"]},
        cells.WRONG_TYPE,
    ),
    "history of three": (
        "alpaca",
        {"instruction": "x", "output": "y", "history": [["a", "b", "c"]]},
        cells.WRONG_TYPE,
    ),
    "history with null": (
        "alpaca",
        {"instruction": "x", "output": "y", "history": [["a", None]]},
        cells.IS_NULL,
    ),
    "history with empty": (
        "alpaca",
        {"instruction": "x", "output": "y", "history": [["", "b"]]},
        cells.EMPTY,
    ),
}

GOOD_LINE = b'{"text": "fine"}\n'
LINES: dict[str, tuple[bytes, str]] = {
    "cut off": (b'{"text": "abc\n', "broken JSON"),
    "not JSON": (b"hello\n", "broken JSON"),
    "single quotes": (b"{'text': 'a'}\n", "broken JSON"),
    "trailing comma": (b'{"text": "a",}\n', "broken JSON"),
    "two rows in a line": (b'{"text": "a"} {"text": "b"}\n', "broken JSON"),
    "bare control character": (b'{"text": "a\x01"}\n', "broken JSON"),
    "absurd number": (b'{"text": ' + b"9" * 5000 + b"}\n", "broken JSON"),
    "too deep": (b"[" * 200_000 + b"\n", "broken JSON"),
    "zero bytes": (b"\0" * 64 + b"\n", "broken JSON"),
    "not UTF-8": (b'{"text": "\xff\xfe"}\n', "not UTF-8"),
    "latin-1": (b'{"text": "caf\xe9"}\n', "not UTF-8"),
    "UTF-16": ('{"text": "a"}'.encode("utf-16") + b"\n", "not UTF-8"),
    "null": (b"null\n", cells.IS_NULL),
    "a number": (b"3\n", cells.WRONG_TYPE),
    "text": (b'"a"\n', cells.WRONG_TYPE),
    "a list": (b'[{"text": "a"}]\n', cells.WRONG_TYPE),
    "an empty object": (b"{}\n", cells.OTHER_SHAPE),
    "escaped surrogate": (b'{"text": "\\ud800"}\n', cells.NOT_TEXT),
    "NaN": (b'{"text": NaN}\n', cells.WRONG_TYPE),
}

# What else a kind of file can hold in the place of a row, as it stands in the file.

TXT_LINES: dict[str, tuple[bytes, str]] = {
    "not UTF-8": (b"\xff\xfe\n", "not UTF-8"),
    "latin-1": (b"caf\xe9\n", "not UTF-8"),
    "UTF-16": ("hello".encode("utf-16") + b"\n", "not UTF-8"),
    "a character cut off": (b"caf\xc3\n", "not UTF-8"),
    "an overlong character": (b"a\xc0\xafb\n", "not UTF-8"),
    "a character beyond Unicode": (b"\xf5\x80\x80\x80\n", "not UTF-8"),
    "a surrogate in bytes": (b"a\xed\xa0\x80b\n", "not UTF-8"),
    "a pair of surrogates in bytes": (b"\xed\xa0\xbd\xed\xb8\x80\n", "not UTF-8"),
    "a stray continuation": (b"\x80\n", "not UTF-8"),
    "too long": (b"x" * 5000 + b"\n", "line too long"),
}

CSV_LINES: dict[str, tuple[bytes, str]] = {
    "too few fields": (b"a\n", "broken CSV"),
    "too many fields": (b"a,1,2\n", "broken CSV"),
    "text after a quote": (b'"a"b,1\n', "broken CSV"),
    "a field too long": (b"x" * 5000 + b",1\n", "broken CSV"),
    "empty": (b",1\n", cells.EMPTY),
    "empty in quotes": (b'"",1\n', cells.EMPTY),
    "blank": (b'"  \t ",1\n', cells.EMPTY),
    "a blank of two lines": (b'" \n ",1\n', cells.EMPTY),
    "not UTF-8": (b"\xff\xfe,1\n", "not UTF-8"),
    "latin-1": (b"caf\xe9,1\n", "not UTF-8"),
    "a character cut off": (b"caf\xc3,1\n", "not UTF-8"),
    "an overlong character": (b"a\xc0\xafb,1\n", "not UTF-8"),
    "a surrogate in bytes": (b"a\xed\xa0\x80b,1\n", "not UTF-8"),
    "not UTF-8 in quotes": (b'"a\n\xff",1\n', "not UTF-8"),
}

JSON_ELEMENTS: dict[str, tuple[bytes, str]] = {
    "null": (b"null", cells.IS_NULL),
    "a number": (b"3", cells.WRONG_TYPE),
    "a fraction": (b"-0.5e3", cells.WRONG_TYPE),
    "true": (b"true", cells.WRONG_TYPE),
    "text": (b'"a"', cells.WRONG_TYPE),
    "a list": (b'[{"text": "a"}]', cells.WRONG_TYPE),
    "an empty list": (b"[]", cells.WRONG_TYPE),
    "an empty object": (b"{}", cells.OTHER_SHAPE),
    "another key": (b'{"txt": "a"}', cells.OTHER_SHAPE),
    "NaN": (b'{"text": NaN}', cells.WRONG_TYPE),
    "Infinity alone": (b"-Infinity", cells.WRONG_TYPE),
    "escaped surrogate": (b'{"text": "\\ud800"}', cells.NOT_TEXT),
    "not UTF-8": (b'{"text": "\xff\xfe"}', cells.NOT_TEXT),
    "latin-1": (b'{"text": "caf\xe9"}', cells.NOT_TEXT),
    "a character cut off": (b'{"text": "caf\xc3"}', cells.NOT_TEXT),
    "a surrogate in bytes": (b'{"text": "a\xed\xa0\x80b"}', cells.NOT_TEXT),
    "the same key twice": (b'{"text": "a", "text": null}', DUPLICATE_KEY),
    "deep": (b'{"text": ' + b"[" * 200 + b"]" * 200 + b"}", cells.WRONG_TYPE),
}

JSON_BREAKS: dict[str, bytes] = {
    "cut off": b'{"text": "abc',
    "not JSON": b"hello",
    "single quotes": b"{'text': 'a'}",
    "trailing comma": b'{"text": "a",}',
    "bare control character": b'{"text": "a\x01"}',
    "absurd number": b'{"text": ' + b"9" * 5000 + b"}",
    "too deep": b"[" * 100_000,
    "zero bytes": b"\0" * 64,
    "nothing between commas": b"",
    "a comment": b"// no",
}
"""In an array nothing after these can be found: the file is refused, and the row named."""

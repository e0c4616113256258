"""What files hold that is no row: each with the reason it must be counted under.

`MESSAGES` are values of a `messages` column; csv holds them as JSON. `CELLS` are rows of the other
shapes. `LINES` are lines of a jsonl file that are not even rows.
"""

from __future__ import annotations

from typing import Any

from megatrain.data import rows

U = {"role": "user", "content": "hi"}
A = {"role": "assistant", "content": "hello"}

MESSAGES: dict[str, tuple[Any, str]] = {
    "no turns": ([], rows.EMPTY),
    "a number": (7, rows.WRONG_TYPE),
    "a fraction": (0.5, rows.WRONG_TYPE),
    "true": (True, rows.WRONG_TYPE),
    "an object": (U, rows.WRONG_TYPE),
    "text": ("hi there", rows.WRONG_TYPE),
    "a text of JSON text": ('"hi"', rows.WRONG_TYPE),
    "list of text": (["hi", "hello"], rows.WRONG_TYPE),
    "list of numbers": ([1, 2], rows.WRONG_TYPE),
    "list of lists": ([["user", "hi"], ["assistant", "hello"]], rows.WRONG_TYPE),
    "null turn": ([U, None, A], rows.IS_NULL),
    "only null turns": ([None], rows.IS_NULL),
    "no role": ([{"content": "hi"}, A], rows.OTHER_SHAPE),
    "no content": ([U, {"role": "assistant"}], rows.OTHER_SHAPE),
    "empty turn": ([{}, A], rows.OTHER_SHAPE),
    "keys of another tool": ([{"from": "human", "value": "hi"}], rows.OTHER_SHAPE),
    "misspelt role key": ([{"rol": "user", "content": "hi"}, A], rows.OTHER_SHAPE),
    "null role": ([{"role": None, "content": "hi"}, A], rows.IS_NULL),
    "null content": ([U, {"role": "assistant", "content": None}], rows.IS_NULL),
    "null question": ([{"role": "user", "content": None}, A], rows.IS_NULL),
    "role is a number": ([{"role": 1, "content": "hi"}, A], rows.WRONG_TYPE),
    "role is a list": ([{"role": ["user"], "content": "hi"}, A], rows.WRONG_TYPE),
    "content is a number": ([U, {"role": "assistant", "content": 42}], rows.WRONG_TYPE),
    "content is true": ([U, {"role": "assistant", "content": True}], rows.WRONG_TYPE),
    "content is a list": ([U, {"role": "assistant", "content": ["hello"]}], rows.WRONG_TYPE),
    "content is an object": ([U, {"role": "assistant", "content": {"a": 1}}], rows.WRONG_TYPE),
    "content in parts": (
        [{"role": "user", "content": [{"type": "image", "url": "x"}]}, A],
        rows.WRONG_TYPE,
    ),
    "empty answer": ([U, {"role": "assistant", "content": ""}], rows.EMPTY),
    "blank answer": ([U, {"role": "assistant", "content": " \n\t "}], rows.EMPTY),
    "empty question": ([{"role": "user", "content": ""}, A], rows.EMPTY),
    "empty role": ([{"role": "", "content": "hi"}, A], rows.EMPTY),
    "second answer empty": ([U, A, U, {"role": "assistant", "content": ""}], rows.EMPTY),
    "only a question": ([U], rows.NO_ANSWER),
    "only a system prompt": ([{"role": "system", "content": "s"}], rows.NO_ANSWER),
    "two questions": ([U, U], rows.NO_ANSWER),
    "only a tool": ([U, {"role": "tool", "content": "4"}], rows.NO_ANSWER),
    "unknown role": ([{"role": "wizard", "content": "hi"}, A], rows.UNKNOWN_ROLE),
    "role with a typo": ([U, {"role": "asistant", "content": "hello"}], rows.UNKNOWN_ROLE),
    "lone surrogate": ([U, {"role": "assistant", "content": "a\ud800b"}], rows.NOT_TEXT),
    "low surrogate": ([U, {"role": "assistant", "content": "\udc80"}], rows.NOT_TEXT),
    "surrogate in role": ([{"role": "user\ud800", "content": "hi"}, A], rows.NOT_TEXT),
    "surrogate in question": ([{"role": "user", "content": "\ude00\ud83d"}, A], rows.NOT_TEXT),
}

GOOD_CELLS: dict[str, dict[str, Any]] = {
    "text": {"text": "some text"},
    "pair": {"prompt": "hi", "completion": "hello"},
    "alpaca": {"instruction": "greet", "input": "", "output": "hello", "history": None},
}
CELLS: dict[str, tuple[str, dict[str, Any], str]] = {
    "text null": ("text", {"text": None}, rows.IS_NULL),
    "text empty": ("text", {"text": ""}, rows.EMPTY),
    "text blank": ("text", {"text": "  "}, rows.EMPTY),
    "text surrogate": ("text", {"text": "\udfff"}, rows.NOT_TEXT),
    "text number": ("text", {"text": 3}, rows.WRONG_TYPE),
    "text list": ("text", {"text": ["a"]}, rows.WRONG_TYPE),
    "text elsewhere": ("text", {"txt": "a"}, rows.OTHER_SHAPE),
    "prompt null": ("pair", {"prompt": None, "completion": "x"}, rows.IS_NULL),
    "completion null": ("pair", {"prompt": "x", "completion": None}, rows.IS_NULL),
    "completion empty": ("pair", {"prompt": "x", "completion": ""}, rows.EMPTY),
    "prompt blank": ("pair", {"prompt": "\n", "completion": "x"}, rows.EMPTY),
    "completion number": ("pair", {"prompt": "x", "completion": 1.5}, rows.WRONG_TYPE),
    "completion object": ("pair", {"prompt": "x", "completion": {"a": "b"}}, rows.WRONG_TYPE),
    "completion surrogate": ("pair", {"prompt": "x", "completion": "\ud900"}, rows.NOT_TEXT),
    "pair renamed": ("pair", {"prompt": "x", "chosen": "y"}, rows.OTHER_SHAPE),
    "instruction empty": ("alpaca", {"instruction": "", "output": "x"}, rows.EMPTY),
    "output empty": ("alpaca", {"instruction": "x", "output": " "}, rows.EMPTY),
    "output null": ("alpaca", {"instruction": "x", "output": None}, rows.IS_NULL),
    "input number": ("alpaca", {"instruction": "x", "input": 1, "output": "y"}, rows.WRONG_TYPE),
    "history number": (
        "alpaca",
        {"instruction": "x", "output": "y", "history": 4},
        rows.WRONG_TYPE,
    ),
    "history flat": (
        "alpaca",
        {"instruction": "x", "output": "y", "history": ["a", "b"]},
        rows.WRONG_TYPE,
    ),
    "history of three": (
        "alpaca",
        {"instruction": "x", "output": "y", "history": [["a", "b", "c"]]},
        rows.WRONG_TYPE,
    ),
    "history with null": (
        "alpaca",
        {"instruction": "x", "output": "y", "history": [["a", None]]},
        rows.IS_NULL,
    ),
    "history with empty": (
        "alpaca",
        {"instruction": "x", "output": "y", "history": [["", "b"]]},
        rows.EMPTY,
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
    "null": (b"null\n", rows.IS_NULL),
    "a number": (b"3\n", rows.WRONG_TYPE),
    "text": (b'"a"\n', rows.WRONG_TYPE),
    "a list": (b'[{"text": "a"}]\n', rows.WRONG_TYPE),
    "an empty object": (b"{}\n", rows.OTHER_SHAPE),
    "escaped surrogate": (b'{"text": "\\ud800"}\n', rows.NOT_TEXT),
    "NaN": (b'{"text": NaN}\n', rows.WRONG_TYPE),
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
    "empty": (b",1\n", rows.EMPTY),
    "empty in quotes": (b'"",1\n', rows.EMPTY),
    "blank": (b'"  \t ",1\n', rows.EMPTY),
    "a blank of two lines": (b'" \n ",1\n', rows.EMPTY),
    "not UTF-8": (b"\xff\xfe,1\n", rows.NOT_TEXT),
    "latin-1": (b"caf\xe9,1\n", rows.NOT_TEXT),
    "a character cut off": (b"caf\xc3,1\n", rows.NOT_TEXT),
    "an overlong character": (b"a\xc0\xafb,1\n", rows.NOT_TEXT),
    "a surrogate in bytes": (b"a\xed\xa0\x80b,1\n", rows.NOT_TEXT),
    "not UTF-8 in quotes": (b'"a\n\xff",1\n', rows.NOT_TEXT),
}

JSON_ELEMENTS: dict[str, tuple[bytes, str]] = {
    "null": (b"null", rows.IS_NULL),
    "a number": (b"3", rows.WRONG_TYPE),
    "a fraction": (b"-0.5e3", rows.WRONG_TYPE),
    "true": (b"true", rows.WRONG_TYPE),
    "text": (b'"a"', rows.WRONG_TYPE),
    "a list": (b'[{"text": "a"}]', rows.WRONG_TYPE),
    "an empty list": (b"[]", rows.WRONG_TYPE),
    "an empty object": (b"{}", rows.OTHER_SHAPE),
    "another key": (b'{"txt": "a"}', rows.OTHER_SHAPE),
    "NaN": (b'{"text": NaN}', rows.WRONG_TYPE),
    "Infinity alone": (b"-Infinity", rows.WRONG_TYPE),
    "escaped surrogate": (b'{"text": "\\ud800"}', rows.NOT_TEXT),
    "not UTF-8": (b'{"text": "\xff\xfe"}', rows.NOT_TEXT),
    "latin-1": (b'{"text": "caf\xe9"}', rows.NOT_TEXT),
    "a character cut off": (b'{"text": "caf\xc3"}', rows.NOT_TEXT),
    "a surrogate in bytes": (b'{"text": "a\xed\xa0\x80b"}', rows.NOT_TEXT),
    "the same key twice": (b'{"text": "a", "text": null}', rows.IS_NULL),
    "deep": (b'{"text": ' + b"[" * 200 + b"]" * 200 + b"}", rows.WRONG_TYPE),
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

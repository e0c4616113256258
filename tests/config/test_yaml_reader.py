"""YAML: plain data and the line of every key, or a ConfigError, whatever the bytes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.config import yaml_reader
from megatrain.config.yaml_reader import MAX_YAML_BYTES, Document, parse_document, read_document
from megatrain.errors import ConfigError, DiskError


def parse(text: str) -> Document:
    return parse_document(text.encode(), "run.yaml")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("1e-5", 1e-5), ("1E5", 1e5), ("010", 10), ("1_000", 1000), ("-3", -3), (".5", 0.5),
        ("no", "no"), ("on", "on"), ("true", True), ("~", None), ("", None), ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"), ("'3'", "3"), ("!!str 3", "3"), ("9" * 50, "9" * 50),
        ("[a, {b: c}]", ["a", {"b": "c"}]), ("0x1f", "0x1f"), (".inf", ".inf"), ("12e03", 12e3),
    ],
)  # fmt: skip
def test_scalars_are_those_of_the_core_schema(text: str, meant: object) -> None:
    assert parse(f"key: {text}").value == {"key": meant}


def test_lines_are_where_keys_stand() -> None:
    document = parse(
        "# first\nmodel: {a: 1}\n\ndata:\n  train:\n    - path: x\n      n: 2\n    - y\n"
    )
    assert document.lines == {
        ("model",): 2, ("model", "a"): 2, ("data",): 4, ("data", "train"): 5,
        ("data", "train", 0): 6, ("data", "train", 0, "path"): 6, ("data", "train", 0, "n"): 7,
        ("data", "train", 1): 8,
    }  # fmt: skip
    assert document.place(("data", "train", 0, "n")) == "run.yaml:7"
    assert document.place(("data", "train", 0, "absent")) == "run.yaml:6"
    assert document.place(("absent",)) == "run.yaml"


_LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(20)
)


REFUSED = [
    ("a: 1\nb: 2\na: 3", "run.yaml:3: a is given twice, first in line 1."),
    ("a:\n  b: 1\n  b: 2", "run.yaml:3: a.b is given twice, first in line 2."),
    ('{"a": 1, "a": 2}', "run.yaml:1: a is given twice, first in line 1."),
    (_LAUGHS,
     "run.yaml:1: anchors and aliases are not supported. Quote text that begins with * or &."),
    ("a: *b",
     "run.yaml:1: anchors and aliases are not supported. Quote text that begins with * or &."),
    ("a: [*.norm]",
     "run.yaml:1: invalid YAML: expected alphabetic or numeric character, but found '.'. "
     "Quote text that begins with * or &"),
    ("x: 1\n<<: {a: 1}", "run.yaml:2: merge keys (<<) are not supported. Write the keys out."),
    ("a: !!python/object/apply:os.system [ls]",
     "run.yaml:1: the tag tag:yaml.org,2002:python/object/apply:os.system is not supported. "
     "Write a plain value."),
    ("? [a]\n: 1", "run.yaml:1: a key is a list or a mapping. Use text as the key."),
    ("a: 1\n---\nb: 2", "run.yaml:2: a second document begins. Give only one."),
    ("[" * 100_00, "run.yaml:1: nested deeper than 16."),
    ("- " * 100, "run.yaml:1: nested deeper than 16."),
    ("[" + "1," * 10_001 + "]", "run.yaml:1: more than 10000 values, too many for a config."),
    ("a: [1", "run.yaml:1: invalid YAML: expected ',' or ']', but got '<stream end>'"),
    ("a: 1\n\tb: 2",
     "run.yaml:2: invalid YAML: found character '\\t' that cannot start any "
     "token"),
    ("a: b: c", "run.yaml:1: invalid YAML: mapping values are not allowed here"),
    (r'a: "\ud800"', "run.yaml:1: half of a surrogate pair is not a character."),
    ("x" * (MAX_YAML_BYTES + 1), "run.yaml: larger than 64 KiB. Is it a config?"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text)
    assert str(error.value) == message


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(ConfigError, match=r"^run.yaml: byte 3 is not UTF-8. Is it a config\?$"):
        parse_document(b"a: \xff", "run.yaml")


@pytest.mark.parametrize(
    "text", [r'a: "\UFFFFFFFF"', r'a: "\U00110000"', "a: \0", "%YAML 9.9\n--- a"]
)
def test_what_the_parser_stumbles_over(text: str) -> None:
    with pytest.raises(ConfigError, match="invalid YAML"):
        parse(text)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=5).filter(lambda key: key != "<<"), _JSON, max_size=4))
def test_json_is_read_as_what_it_is(value: dict[str, Any]) -> None:
    if "<<" not in json.dumps(value):
        assert parse(json.dumps(value)).value == value
        assert parse(json.dumps(value, indent="\t")).value == value


@given(
    st.binary(max_size=60) | st.text(":-[]{}&*!?|>'\"%#,\n\t ab1.e~", max_size=40).map(str.encode)
)
def test_any_bytes_give_data_or_our_error(data: bytes) -> None:
    try:
        document = parse_document(data, "x")
    except ConfigError:
        return
    assert all(line >= 1 for line in document.lines.values())


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, text in (
        ("", "is not a file. Give the path of a YAML file."),
        ("pipe", "is not a file. Give the path of a YAML file."),
        ("absent", "no such file. Give the path of a YAML file; `megatrain init` writes one."),
    ):
        with pytest.raises(ConfigError, match=rf"{name}: {text}$"):
            read_document(tmp_path / name)


def test_a_file_the_system_does_not_give(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("a: 1")
    assert read_document(tmp_path / "run.yaml").value == {"a": 1}

    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(yaml_reader, "open", fail, raising=False)
    with pytest.raises(DiskError, match=r"run.yaml: cannot read it: Permission denied$"):
        read_document(tmp_path / "run.yaml")

"""Hostile safetensors: headers that lie, and tensors that are not the model's."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from tests.attacks.folders import (
    Q_PROJ,
    SHAPES,
    Case,
    Make,
    cases,
    config,
    data_of,
    entries,
    pack,
    write_config,
    write_weights,
)

HEADER = entries()
DATA = data_of(HEADER)
FIRST, SECOND, *_ = HEADER


def _file(data: bytes, **changes: Any) -> Make:
    def make(folder: Path) -> None:
        write_config(folder, config(**changes))
        write_weights(folder, data)

    return make


def _header(text: bytes | dict[str, Any], data: bytes = DATA) -> Make:
    return _file(pack(text, data))


def _entry(**changes: Any) -> Make:
    """Change what the header says of its first tensor."""
    return _header(HEADER | {FIRST: HEADER[FIRST] | changes})


def _tensors(shapes: dict[str, Any], dtype: str = "BF16", **changes: Any) -> Make:
    header = entries(shapes, dtype)
    return _file(pack(header, data_of(header)), **changes)


def _without(name: str) -> dict[str, Any]:
    return {key: value for key, value in HEADER.items() if key != name}


def _retyped(dtype: str, factor: float) -> Make:
    """One tensor of another dtype, in a file that is otherwise right."""
    header: dict[str, Any] = {}
    position = 0
    for name, entry in HEADER.items():
        begin, end = entry["data_offsets"]
        size = int((end - begin) * (factor if name == Q_PROJ else 1))
        header[name] = entry | {"data_offsets": [position, position + size]}
        position += size
    header[Q_PROJ] |= {"dtype": dtype}
    return _file(pack(header, data_of(header)))


def _sparse(folder: Path) -> None:
    """A file of ten terabytes that takes no room, and a header that is honest about it."""
    write_config(folder, config())
    size = 10 << 40
    entry = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    write_weights(folder, pack({"a": entry}, b""))
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(0, 2)
        file.truncate(file.tell() + size)


def _cut_after_header(folder: Path) -> None:
    write_config(folder, config())
    write_weights(folder, pack(HEADER, b""))


_TEXT = json.dumps(HEADER).encode()
_MORE = {f"model.layers.{i}.evil": [0] for i in range(60_000)}
_PATTERN_BOMB = {"model.layers." * 39 + str(i): [0] for i in range(3000)}
_BEGIN, _END = HEADER[FIRST]["data_offsets"]

FORMAT = cases(
    "header",
    "WeightsFormatError",
    {
        "empty file": (_file(b""), "has 0 bytes, too few"),
        "seven bytes": _file(b"\0" * 7),
        "only a length": _file(struct.pack("<Q", 100)),
        "length zero": (_file(pack(_TEXT, DATA, 0)), "header of 0 bytes"),
        "length one": (_file(pack(_TEXT, DATA, 1)), "header of 1 bytes"),
        "length beyond the file": (_file(pack(_TEXT, DATA, 1 << 20)), "it must have 2 to"),
        "length of 2^40": (_file(pack(_TEXT, DATA, 1 << 40)), "it must have 2 to"),
        "length of 2^63": (_file(pack(_TEXT, DATA, 1 << 63)), "it must have 2 to"),
        "length of 2^64 - 1": (_file(pack(_TEXT, DATA, (1 << 64) - 1)), "it must have 2 to"),
        "length too short": (_file(pack(_TEXT, DATA, len(_TEXT) - 9)), "not valid JSON"),
        "length too long": (_file(pack(_TEXT, DATA, len(_TEXT) + 9)), "not valid JSON"),
        "zeros": _file(b"\0" * (1 << 20)),
        "ones": _file(b"\xff" * (1 << 20)),
        "a list": (_header(b"[]"), "is a list"),
        "not UTF-8": (_header(b'{"\xff": 1}'), "not valid JSON"),
        "deep lists": (_header(b"[" * 100_000), "not valid JSON"),
        "deep objects": (_header(b'{"a":' * 100_000), "not valid JSON"),
        "deep shape": (_entry(shape=json.loads("[" * 400 + "]" * 400)), "short list of sizes"),
        "a tensor twice": (_header(_TEXT[:-1] + b"," + _TEXT[1:]), "given twice"),
        "a field twice": (_header(b'{"a": {"dtype": "F32", "dtype": "U8"}}'), "given twice"),
        "metadata that is a list": (_header(HEADER | {"__metadata__": [1]}), "contain only text"),
        "metadata that nests": (
            _header(HEADER | {"__metadata__": {"a": {"b": {"c": "d"}}}}), "contain only text",
        ),
        "metadata twice": (
            _header(b'{"__metadata__": {}, "__metadata__": {}, ' + _TEXT[1:]), "given twice",
        ),
        "bomb of objects": (
            _header(b'{"__metadata__": {"x": [' + b"{}," * 2_000_000 + b"{}]}}"), "contain only "
                                        "text",
        ),
        "bomb of strings": (
            _header(b'{"__metadata__": [' + b'"ab",' * 2_000_000 + b'"ab"]}'), "contain only text",
        ),
        "bomb of keys": (
            _header(
                b'{"__metadata__": {' + b",".join(b'"%x":1' % i for i in range(10**6)) + b"}}"
            ),
            "contain only text",
        ),
        "header of 20 MiB": (_header(_TEXT + b" " * (20 << 20)), "2 to 16777216"),
        "truncated data": (_header(HEADER, DATA[:-1]), "was truncated"),
        "no data": (_cut_after_header, "was truncated"),
        "appended byte": (_header(HEADER, DATA + b"x"), "truncated or extended"),
        "appended program": (_header(HEADER, DATA + b"#!/bin/sh\n"), "truncated or extended"),
        "overlap": (_entry(data_offsets=[_BEGIN + 2, _END + 2]), "overlap or leave a gap"),
        "two tensors in one place": (
            _header(HEADER | {"twin": HEADER[FIRST]}), "overlap or leave a gap",
        ),
        "hole": (_header(_without(SECOND)), "overlap or leave a gap"),
        "first tensor gone": (_header(_without(FIRST)), "overlap or leave a gap"),
        "backwards": (_entry(data_offsets=[_END, _BEGIN]), "do not match"),
        "offsets beyond the end": (
            _entry(data_offsets=[_BEGIN + (1 << 40), _END + (1 << 40)]), "overlap or leave a gap",
        ),
        "offsets of 2^60": (_entry(data_offsets=[1 << 60, (1 << 60) + 1024]), "two positions"),
        "negative offsets": (_entry(data_offsets=[-1024, 0]), "two positions"),
        "fractions": (_entry(data_offsets=[0.0, 1024.0]), "two positions"),
        "truths": (_entry(data_offsets=[False, True]), "two positions"),
        "texts": (_entry(data_offsets=["0", "1024"]), "two positions"),
        "three offsets": (_entry(data_offsets=[0, 1024, 1024]), "two positions"),
        "one offset": (_entry(data_offsets=[0]), "two positions"),
        "no offsets": (_entry(data_offsets=None), "two positions"),
        "offset without end": (
            _header(_TEXT.replace(b"[0, ", b"[" + b"9" * 4000 + b", ", 1)), "two positions",
        ),
        "shape of other size": (_entry(shape=[32, 17]), "do not match"),
        "shape that overflows to fit": (_entry(shape=[1 << 32, 1 << 32, 512]), "do not match"),
        "shape of 2^52 twice": (_entry(shape=[1 << 52, 1 << 52]), "do not match"),
        "shape of 2^64": (_entry(shape=[1 << 64]), "short list of sizes"),
        "negative shape": (_entry(shape=[-32, -16]), "short list of sizes"),
        "fraction in shape": (_entry(shape=[32.0, 16]), "short list of sizes"),
        "truth in shape": (_entry(shape=[True, 512]), "short list of sizes"),
        "shape of a hundred": (_entry(shape=[1] * 99 + [512]), "short list of sizes"),
        "shape of a million": (_entry(shape=[1] * 1_000_000), "short list of sizes"),
        "shape that is text": (_entry(shape="32x16"), "short list of sizes"),
        "shape that is an object": (_entry(shape={"0": 32}), "short list of sizes"),
        "dtype of other size": (_entry(dtype="F32"), "do not match"),
        "dtype of half a byte": (_entry(dtype="F4"), "do not match"),
        "dtype unknown": (_entry(dtype="PICKLE"), "unknown dtype"),
        "dtype object": (_entry(dtype={"a": 1}), "unknown dtype"),
        "dtype in small letters": (_entry(dtype="bf16"), "unknown dtype"),
        "one field more": (_entry(loader="evil"), "data_offsets only"),
        "one field less": (_header(HEADER | {FIRST: {"dtype": "BF16"}}), "data_offsets only"),
        "entry that is a number": (_header(HEADER | {FIRST: 1}), "data_offsets only"),
        "name without end": (_header(HEADER | {"x" * 100_000: HEADER[FIRST]}), "100000 char"),
    },
)  # fmt: skip

MISMATCH = cases(
    "tensors",
    "WeightsMismatch",
    {
        "none": (_file(pack({}, b"")), "21 tensors are missing"),
        "one missing": (
            _tensors({k: v for k, v in SHAPES.items() if k != Q_PROJ}),
            f"1 tensors are missing: {Q_PROJ}",
        ),
        "one more": (_tensors(SHAPES | {"evil": [4]}), "1 tensors are not in the model: evil"),
        "one more layer": (
            _tensors(SHAPES | {"model.layers.2.mlp.up_proj.weight": [24, 16]}), "not in the model",
        ),
        "60,000 more": (_tensors(SHAPES | _MORE), "the weights are 60021 tensors"),
        "names against patterns": (_tensors(SHAPES | _PATTERN_BOMB), "3000 tensors are not"),
        "name with an escape": (_tensors(SHAPES | {"\x1b]0;owned\x07": [4]}), r"\\x1b\]0;owned"),
        "name with lines": (_tensors(SHAPES | {"a\r\n\nAll is well.": [4]}), "not in the model"),
        "name that is empty": (_tensors(SHAPES | {"": [4]}), "not in the model"),
        "name with NUL": (_tensors(SHAPES | {"\0": [4]}), r"\\x00"),
        "lone surrogate": (_tensors(SHAPES | {"\ud800": [4]}), r"\\ud800"),
        "transposed": (
            _tensors(SHAPES | {"model.layers.0.mlp.up_proj.weight": [16, 24]}),
            r"has shape \(16, 24\); the model has \(24, 16\)",
        ),
        "flat": (_tensors(SHAPES | {Q_PROJ: [256]}), "has shape"),
        "scalar": (_tensors(SHAPES | {Q_PROJ: []}), "has shape"),
        "of nothing": (_tensors(SHAPES | {Q_PROJ: [0]}), "has shape"),
        "wider": (_tensors(SHAPES | {Q_PROJ: [16, 1600]}), "has shape"),
        "twice by another name": (
            _tensors(SHAPES | {Q_PROJ.removeprefix("model."): [16, 16]}), "are given twice|not in",
        ),
        "all of I8": (_tensors(SHAPES, "I8"), "is I8; weights must be"),
        "all of F64": (_tensors(SHAPES, "F64"), "is F64; weights must be"),
        "all of BOOL": (_tensors(SHAPES, "BOOL"), "is BOOL; weights must be"),
        "all of F8": (_tensors(SHAPES, "F8_E4M3"), "is F8_E4M3; weights must be"),
        "one of U8": (_retyped("U8", 0.5), "is U8; weights must be"),
        "ties that differ": (
            _tensors(SHAPES, tie_word_embeddings=True),
            "lm_head.weight differs from model.embed_tokens.weight",
        ),
        "tie of another shape": (
            _tensors(SHAPES | {"lm_head.weight": [16, 32]}, tie_word_embeddings=True), "has shape",
        ),
        "ten terabytes that take no room": (_sparse, "not in the model"),
    },
)  # fmt: skip

WEIGHTS_CASES: list[Case] = [*FORMAT, *MISMATCH]

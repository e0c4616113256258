"""Hostile names: an index and files that lead out of the folder, to devices, or nowhere."""

from __future__ import annotations

import json
import os
import socket
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
    write_benign,
    write_config,
    write_index,
    write_shards,
    write_weights,
)
from tests.attacks.sandbox import LOADED

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NAMES: dict[str, Any] = {
    "parent": "../a.safetensors",
    "parents in the middle": "x/../../a.safetensors",
    "absolute": "/etc/a.safetensors",
    "home": "~/a.safetensors",
    "subfolder": "x/a.safetensors",
    "backslash": "..\\a.safetensors",
    "drive": "C:\\a.safetensors",
    "address": "https://evil.example/a.safetensors",
    "hidden": ".a.safetensors",
    "option": "-a.safetensors",
    "NUL": "a\0.safetensors",
    "NUL at the end": "a.safetensors\0",
    "newline": "a\n.safetensors",
    "newline at the end": "a.safetensors\n",
    "terminal escape": "\x1b[2J.safetensors",
    "lone surrogate": "\ud800.safetensors",
    "look-alike": "\u0430.safetensors",
    "endless": "a" * 5000 + ".safetensors",
    "pickle": "pytorch_model.bin",
    "pickle twice": "model.safetensors.bin",
    "empty": "",
    "nothing": None,
    "number": 7,
    "truth": True,
    "list": ["a.safetensors"],
    "object": {"a.safetensors": 1},
    "deep list": json.loads("[" * 500 + "]" * 500),
}


def _named(name: Any) -> Make:
    def make(folder: Path) -> None:
        # What the name might mean does exist, and would load.
        write_shards(folder.parent)
        write_shards(folder, **{Q_PROJ: name})

    return make


def _index(data: Any) -> Make:
    def make(folder: Path) -> None:
        write_shards(folder)
        write_index(folder, data)

    return make


def _in_place_of(name: str, create: Any, sharded: bool = False) -> Make:
    """Replace a file of a benign folder by something that `create` makes of its path."""

    def make(folder: Path) -> None:
        write_shards(folder.parent)
        write_weights(folder.parent)
        (write_shards if sharded else write_benign)(folder)
        (folder / name).unlink()
        create(folder / name)

    return make


def _link(target: str) -> Any:
    return lambda path: path.symlink_to(target)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        where = os.open(path.parent, os.O_PATH)  # the path itself may be too long for a socket
        server.bind(f"/proc/self/fd/{where}/{path.name}")
        os.close(where)


def _many_files(folder: Path) -> None:
    write_config(folder, config())
    write_index(folder, {"weight_map": {f"t{i}": f"{i}.safetensors" for i in range(10_001)}})


def _many_links(folder: Path) -> None:
    """One large file of no tensors, under a thousand names."""
    write_config(folder, config())
    padding = b'{"__metadata__": {"x": "%s"}}' % (b"y" * (8 << 20))
    write_weights(folder, pack(padding, b""), "big.safetensors")
    for i in range(1000):
        (folder / f"{i}.safetensors").symlink_to("big.safetensors")
    write_index(folder, {"weight_map": {f"t{i}": f"{i}.safetensors" for i in range(1000)}})


def _half(folder: Path) -> None:
    """The shard holds a tensor that the index does not know."""
    write_shards(folder)
    header = entries(SHAPES | {"more": [4]})
    write_weights(folder, pack(header, data_of(header)), "a.safetensors")


def _link_inside(path: Path) -> None:
    write_weights(path.parent, name="real.safetensors")
    path.symlink_to("real.safetensors")


def _tokenizer(create: Any) -> Make:
    """What an export would copy."""

    def make(folder: Path) -> None:
        write_benign(folder)
        (folder.parent / "secret").write_text("private")
        create(folder / "tokenizer.json")

    return make


def _terabyte(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _cached(target: str) -> Make:
    """The folder becomes a snapshot in a cache of the hub, its weights a link."""

    def make(folder: Path) -> None:
        write_config(folder, config())
        (folder.parent / "other").mkdir()
        (folder.parent / "blobs").mkdir()
        write_weights(folder.parent / "blobs", name="0f")
        write_weights(folder.parent / "other", name="0f")
        (folder.parent / "snapshots").mkdir()
        moved = folder.rename(folder.parent / "snapshots" / folder.name)
        (moved / SINGLE).symlink_to(target)
        folder.symlink_to(moved)

    return make


def _oversized(folder: Path) -> None:
    write_shards(folder)
    with (folder / INDEX).open("r+b") as file:
        file.truncate(40 << 20)


_GOOD_MAP = dict.fromkeys(SHAPES, "a.safetensors")
INDEX_CASES: list[Case] = [
    *cases(
        "index",
        "WeightsFormatError",
        {f"name {key}": (_named(name), "not the plain name") for key, name in NAMES.items()}
        | {
            "empty": _index(b""),
            "not UTF-8": _index(b'{"weight_map": {"\xff": "a.safetensors"}}'),
            "a list": (_index([]), "no weight_map"),
            "without map": (_index({"metadata": {}}), "no weight_map"),
            "map that is a list": (_index({"weight_map": ["a.safetensors"]}), "no weight_map"),
            "map of nothing": (_index({"weight_map": {}}), "no weight_map"),
            "map twice": (
                _index(b'{"weight_map": {"a": "a.safetensors"}, "weight_map": {}}'), "given twice",
            ),
            "tensor twice": (
                _index(b'{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}'),
                "given twice",
            ),
            "deep": _index(b'{"weight_map": ' + b"[" * 100_000),
            "40 MiB": (_oversized, "larger than 32 MiB"),
            "a name without end": (
                _index({"weight_map": {"x" * 100_000: "a.safetensors"}}), "100000 characters",
            ),
            "ten thousand files": (_many_files, "names 10001 files"),
            "a thousand links to one": (_many_links, "which lacks them"),
            "all in one shard": (_index({"weight_map": _GOOD_MAP}), "which lacks them"),
            "a tensor it does not know": (_half, "disagrees"),
            "a tensor nobody has": (
                lambda folder: write_shards(folder, nobody="b.safetensors"), "lacks them: nobody",
            ),
        },
    ),
    *cases(
        "files",
        "ModelFolderError",
        {
            f"{kind} in place of {what}": (_in_place_of(name, create, sharded), says)
            for what, name, sharded in (
                ("the file", SINGLE, False), ("a shard", "b.safetensors", True),
                ("the index", INDEX, True),
            )
            for kind, create, says in (
                ("pipe", os.mkfifo, "not a regular file"),
                ("folder", Path.mkdir, "not a regular file"),
                ("socket", _socket, "not a regular file"),
                ("link out", _link(f"../{name}"), "points outside"),
                ("link to a device", _link("/dev/zero"), "points outside"),
                ("link to this process", _link("/proc/self/mem"), "points outside"),
                ("link to nothing", _link("nothing"), "neither|does not exist"),
                ("link to itself", _link(name), "neither|cannot follow|does not exist"),
            )
        }
        | {
            "a shard that is absent": (_in_place_of("b.safetensors", str, True), "does not exist"),
            "tokenizer that links out": (_tokenizer(_link("../secret")), "points outside"),
            "tokenizer that is a device": (_tokenizer(_link("/dev/zero")), "points outside"),
            "tokenizer that is a pipe": (_tokenizer(os.mkfifo), "not a regular file"),
            "tokenizer of a terabyte": (_tokenizer(_terabyte), "larger than 256 MiB"),
            "link out of the hub's cache": (_cached("../../other/0f"), "points outside"),
            "link round the hub's cache": (_cached("../../blobs/../other/0f"), "points outside"),
        },
    ),
    *cases(
        "files",
        LOADED,
        {
            "link inside": _in_place_of(SINGLE, _link_inside),
            "link as the hub's cache has": _cached("../../blobs/0f"),
        },
    ),
]  # fmt: skip

"""The sandbox notices: each of these loaders does one thing that no loader may do."""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import re
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.errors import ModelFolderError
from tests.attacks.code_corpus import pickled, torch_saved
from tests.attacks.folders import Case, payload, write_benign
from tests.attacks.sandbox import MARKER, Sandbox
from tests.attacks.test_attacks import faults


def _unpickles(folder: Path) -> None:
    pickle.loads((folder / "pytorch_model.bin").read_bytes())  # noqa: S301


def _loads_with_torch(folder: Path) -> None:
    torch.load(folder / "optimizer.pt", weights_only=False)


def _runs_text(folder: Path) -> None:
    exec((folder / "modeling_evil.py").read_text())


def _runs_file(folder: Path) -> None:
    runpy.run_path(str(folder / "modeling_evil.py"))


def _imports(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    importlib.import_module("modeling_harmless")


def _starts_a_program(folder: Path) -> None:
    subprocess.run(["true"], check=False)


def _calls_the_shell(folder: Path) -> None:
    os.system("true")


def _links_a_library(folder: Path) -> None:
    ctypes.CDLL(str(folder / "model.so"))


def _connects(folder: Path) -> None:
    with socket.socket() as client:
        client.connect_ex(("127.0.0.1", 9))


def _downloads(folder: Path) -> None:
    urllib.request.urlopen("http://127.0.0.1:9/")


def _writes(folder: Path) -> None:
    (folder.parent / "elsewhere").write_text("x")


def _writes_inside(folder: Path) -> None:
    os.close(os.open(folder / "cache", os.O_CREAT | os.O_WRONLY))


def _makes_a_folder(folder: Path) -> None:
    tempfile.mkdtemp(dir=folder.parent)


def _removes(folder: Path) -> None:
    (folder / "config.json").unlink()


def _moves(folder: Path) -> None:
    shutil.move(folder / "config.json", folder / "moved.json")


def _follows_a_link(folder: Path) -> None:
    (folder / "link").read_bytes()


def _reads_beside(folder: Path) -> None:
    (folder / ".." / "secret").read_bytes()


def _takes_memory(folder: Path) -> None:
    bytearray(os.urandom(1 << 20) * 700)


def _takes_all_memory(folder: Path) -> None:
    try:
        torch.zeros(1 << 40)
    except RuntimeError as error:
        raise ModelFolderError("looks like a refusal") from error


def _fails_otherwise(folder: Path) -> None:
    raise KeyError("weight_map")


def _prints_an_escape(folder: Path) -> None:
    error = ModelFolderError("x")
    error.args = ("\x1b]0;owned\x07",)
    raise error


BROKEN = {
    _unpickles: r"pickle\.find_class|os\.system",
    _loads_with_torch: r"pickle\.find_class|os\.system",
    _runs_text: "compiles",
    _runs_file: "compiles",
    _imports: "imported modeling_harmless|runs ",
    _starts_a_program: r"subprocess\.Popen",
    _calls_the_shell: r"os\.system",
    _links_a_library: r"ctypes\.dlopen",
    _connects: r"socket\.",
    _downloads: r"urllib\.Request|socket\.",
    _writes: "writes .*elsewhere",
    _writes_inside: "writes .*cache",
    _makes_a_folder: "mkdtemp|os.mkdir",
    _removes: r"os\.remove",
    _moves: r"shutil\.move|os\.rename",
    _follows_a_link: "reads .*secret",
    _reads_beside: "reads .*secret",
    _takes_memory: r"took \d+ MiB",
    _takes_all_memory: "an allocation failed",
    _fails_otherwise: "KeyError is not an error of ours",
    _prints_an_escape: "not fit to print",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_benign(folder)
    (tmp_path / "secret").write_text("secret")
    (folder / "link").symlink_to("../secret")
    (folder / "pytorch_model.bin").write_bytes(pickled(folder))
    (folder / "optimizer.pt").write_bytes(torch_saved(folder))
    (folder / "modeling_evil.py").write_text(payload(folder))
    (folder / "modeling_harmless.py").write_text("x = 1\n")
    (folder / "model.so").write_bytes(b"\x7fELF")
    return folder


def _found(loader: Any, folder: Path) -> str:
    with Sandbox(loader) as sandbox:
        outcome = sandbox.attack(folder)
    case = Case(name="sibling", make=write_benign, end=outcome.end)
    return "; ".join(faults(case, outcome, folder.parent))


@pytest.mark.few(16)
@pytest.mark.parametrize(
    ("loader", "fault"), BROKEN.items(), ids=[loader.__name__ for loader in BROKEN]
)
def test_a_broken_loader_is_caught(loader: Any, fault: str, folder: Path) -> None:
    found = _found(loader, folder)
    assert found
    assert re.search(fault, found), found


def test_payloads_do_run_where_they_are_loaded(folder: Path) -> None:
    for loader in (_unpickles, _loads_with_torch, _runs_text, _runs_file):
        assert "code of the folder ran" in _found(loader, folder), loader.__name__
        (folder.parent / MARKER).unlink()

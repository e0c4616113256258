"""The header: anything malformed is refused, and what we write others read."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatrain.disk.hf.safetensors_format import format_header, parse_header, read_entries
from megatrain.errors import WeightsFormatError


def _file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def _tensor(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32", **more: Any) -> Any:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)} | more


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {
        "b": torch.ones(3, 5, dtype=torch.bfloat16),
        "a": torch.zeros(()),
        "c": torch.ones(0),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    entries = {entry.name: entry for entry in read_entries(tmp_path / "x.safetensors")}
    assert {n: e.shape for n, e in entries.items()} == {"a": (), "b": (3, 5), "c": (0,)}
    assert entries["b"].dtype == "BF16"
    data = (tmp_path / "x.safetensors").read_bytes()
    assert data[entries["b"].start : entries["b"].stop] == b"\x80\x3f" * 15


def test_writes_what_the_library_reads(tmp_path: Path) -> None:
    header, data_bytes = format_header([("x", torch.float32, (2, 3)), ("y", torch.bfloat16, ())])
    assert data_bytes == 26
    path = tmp_path / "x.safetensors"
    path.write_bytes(header + bytes(data_bytes))
    with safe_open(path, "pt") as file:
        assert file.get_tensor("x").shape == (2, 3)
        assert file.get_tensor("y").dtype is torch.bfloat16
    assert [entry.name for entry in read_entries(path)] == ["x", "y"]


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        ({"x": _tensor()}, b"1234567", "tensors end at byte"),
        ({"x": _tensor()}, b"123456789", "truncated or extended"),
        ({"x": _tensor(), "y": _tensor((1,), (4, 8))}, b"12345678", "overlap or leave a gap"),
        ({"x": _tensor((1,), (4, 8))}, b"12345678", "overlap or leave a gap"),
        ({"x": _tensor((3,))}, b"12345678", "8 bytes do not match F32"),
        ({"x": _tensor((2**40, 2**40))}, b"12345678", "do not match F32"),
        ({"x": _tensor(dtype="F77")}, b"12345678", "unknown dtype 'F77'"),
        ({"x": _tensor(dtype=["F32"])}, b"12345678", "unknown dtype"),
        ({"x": _tensor((-2,))}, b"12345678", "not a short list of sizes"),
        ({"x": _tensor((2.0,))}, b"12345678", "not a short list of sizes"),
        ({"x": _tensor((True, 2))}, b"12345678", "not a short list of sizes"),
        ({"x": _tensor([1] * 17)}, b"1234", "not a short list of sizes"),
        ({"x": _tensor(offsets=(0, 8, 8))}, b"12345678", "not two positions"),
        ({"x": _tensor(offsets=(8, 0))}, b"12345678", "do not match"),
        ({"x": _tensor(extra=1)}, b"12345678", "data_offsets only"),
        ({"x": 5}, b"", "must have dtype"),
        ([], b"", "header is a list"),
        (b"{not json", b"", "not valid JSON"),
        (b'{"x": 1, "x": 2}', b"", "given twice"),
        (b"[" * 50_000, b"", "not valid JSON"),
    ],
)
def test_malformed_headers_are_refused(
    header: Any, data: bytes, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(WeightsFormatError, match=reason):
        read_entries(_file(tmp_path / "x.safetensors", header, data))


@pytest.mark.parametrize("length", [0, 1, 2**40, 2**63, 1 << 26])
def test_a_lying_length_is_not_believed(length: int, tmp_path: Path) -> None:
    with pytest.raises(WeightsFormatError, match="header of"):
        read_entries(_file(tmp_path / "x.safetensors", {}, length=length))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"")
    with pytest.raises(WeightsFormatError, match="has 0 bytes, too few"):
        read_entries(tmp_path / "x.safetensors")


def test_a_file_that_git_lfs_left_behind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 133\n")
    with pytest.raises(WeightsFormatError, match=r"is a Git LFS pointer.* Run `git lfs pull`"):
        read_entries(path)


def test_metadata_is_ignored() -> None:
    assert parse_header(b'{"__metadata__": {"a": "b"}}', 0, "x") == []

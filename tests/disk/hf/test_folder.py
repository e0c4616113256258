"""A folder's names lead only to regular files inside it, and index and files agree."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatrain.disk.hf.folder import parse_index, read_config_bytes, read_folder
from megatrain.errors import DiskError, ModelConfigError, ModelFolderError, WeightsFormatError
from megatrain.model_files import INDEX_NAME


def _index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _shard(path: Path, *names: str) -> None:
    save_file({name: torch.ones(4) for name in names}, path)


def test_single_and_sharded(tmp_path: Path) -> None:
    _shard(tmp_path / "one.safetensors", "a", "b")
    _shard(tmp_path / "two.safetensors", "c")
    _index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
    assert {n: t.path.name for n, t in read_folder(tmp_path).items()} == {
        "a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors",
    }  # fmt: skip
    _shard(tmp_path / "model.safetensors", "z")
    assert list(read_folder(tmp_path)) == ["z"]


def test_shards_without_their_index_are_not_called_unsupported(tmp_path: Path) -> None:
    _shard(tmp_path / "model-00001-of-00002.safetensors", "a")
    with pytest.raises(ModelFolderError, match=r"00001-of-00002\.safetensors: fetch the index too"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin", ".hidden.safetensors",
     "..safetensors", "a\\b.safetensors", "a\0.safetensors", "a\n.safetensors", "", 5, None, ["x"]],
)  # fmt: skip
def test_the_index_may_only_name_plain_files(name: Any) -> None:
    with pytest.raises(WeightsFormatError, match="not the plain name"):
        parse_index(json.dumps({"weight_map": {"w": name}}).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {}}'])
def test_a_malformed_index_is_refused(data: bytes) -> None:
    with pytest.raises(WeightsFormatError):
        parse_index(data)


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    _shard(tmp_path / "secret.safetensors", "w")
    (inside / "model.safetensors").symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(ModelFolderError, match="points outside the folder"):
        read_folder(inside)


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    _shard(tmp_path / "blobs" / "0f", "w")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0f")
    assert list(read_folder(snapshot)) == ["w"]


def _shared_blob(cache: Path, name: str) -> Path:
    """Make a model in a cache whose weights lie in the store that models share."""
    model = cache / "models--a--b"
    snapshot = model / "snapshots" / "abc"
    for folder in (snapshot, model / "blobs", (cache / "blobs" / name).parent):
        folder.mkdir(parents=True)
    _shard(cache / "blobs" / name, "w")
    (model / "blobs" / "etag").symlink_to(f"../../blobs/{name}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/etag")
    return snapshot


def test_links_into_the_store_shared_by_models_are_followed(tmp_path: Path) -> None:
    snapshot = _shared_blob(tmp_path, "0f/" + "0f" * 32)
    with pytest.raises(ModelFolderError, match="points outside the folder"):  # it has no mark
        read_folder(snapshot)
    (tmp_path / "blobs" / ".huggingface-shared-blobs").write_text("1\n")
    assert list(read_folder(snapshot)) == ["w"]


@pytest.mark.parametrize("name", ["0f/secret", "ab/" + "0f" * 32, "0f/x/" + "0f" * 32])
def test_other_files_of_the_shared_store_are_refused(tmp_path: Path, name: str) -> None:
    snapshot = _shared_blob(tmp_path, name)
    (tmp_path / "blobs" / ".huggingface-shared-blobs").write_text("1\n")
    with pytest.raises(ModelFolderError, match="points outside the folder"):
        read_folder(snapshot)


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ModelFolderError, match="not a regular file"):
        read_folder(tmp_path)


def test_index_and_files_must_agree(tmp_path: Path) -> None:
    _shard(tmp_path / "one.safetensors", "a", "b")
    _index(tmp_path, {"a": "one.safetensors"})
    with pytest.raises(WeightsFormatError, match="has tensor 'b'"):
        read_folder(tmp_path)
    _index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors", "c": "one.safetensors"})
    with pytest.raises(WeightsFormatError, match="which lacks them: c"):
        read_folder(tmp_path)
    _index(tmp_path, {"a": "gone.safetensors"})
    with pytest.raises(ModelFolderError, match="does not exist"):
        read_folder(tmp_path)


def test_folders_without_weights_say_what_they_have(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="is not a folder"):
        read_folder(tmp_path / "nothing")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelFolderError, match=r"neither .* It has pytorch_model\.bin"):
        read_folder(tmp_path)


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"no config\.json"):
        read_config_bytes(tmp_path)


def test_a_huge_config_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b" " * (5 << 20))
    with pytest.raises(ModelConfigError, match="larger than 4 MiB"):
        read_config_bytes(tmp_path)


def test_a_folder_that_cannot_be_read_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "config.json").write_text("{}")
    _index(tmp_path, {"a": "gone.safetensors"})
    monkeypatch.setattr(Path, "open", refuse)
    for read in (read_config_bytes, read_folder):
        with pytest.raises(DiskError, match=r"cannot read .*Permission denied"):
            read(tmp_path)

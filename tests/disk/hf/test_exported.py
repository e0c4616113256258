"""Model folders with hashes beside them: a byte that has changed is found where they are read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatrain.disk.hf.export import Origin
from megatrain.disk.hf.exported import RECORD_NAME, read_exported, require_as_written
from megatrain.disk.hf.model import load_model
from megatrain.errors import CheckpointCorrupted, DiskError
from megatrain.model_files import SINGLE_NAME
from testkit.faulty_os import READS, faulty
from testkit.runs import write_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    write_model(folder, 0.0)
    return folder


@pytest.fixture
def exported(source: Path, tmp_path: Path) -> Path:
    load_model(source).export(tmp_path / "out", origin=Origin(step=3))
    return tmp_path / "out"


def flip(path: Path, at: int = -3) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_what_is_as_written_passes_and_so_does_a_folder_without_hashes(
    source: Path, exported: Path
) -> None:
    require_as_written(exported)
    require_as_written(source)
    flip(source / SINGLE_NAME)
    require_as_written(source)
    flip(source / SINGLE_NAME)


@pytest.mark.parametrize("name", [SINGLE_NAME, "config.json", "tokenizer.json"])
def test_a_flipped_bit_of_any_file_is_named_with_the_way_out(exported: Path, name: str) -> None:
    flip(exported / name, at=5)
    for use in (require_as_written, load_model):
        with pytest.raises(CheckpointCorrupted, match="do not match their hash") as failure:
            use(exported)
        assert str(exported / name) in str(failure.value)
        assert f"If the change is yours, delete {exported / RECORD_NAME}" in str(failure.value)
    (exported / RECORD_NAME).unlink()
    require_as_written(exported)


def test_a_file_that_is_gone_is_named(exported: Path) -> None:
    (exported / "tokenizer.json").unlink()
    with pytest.raises(CheckpointCorrupted, match=r"tokenizer\.json is missing"):
        require_as_written(exported)


def test_a_record_with_a_flipped_bit_does_not_switch_the_check_off(exported: Path) -> None:
    flip(exported / RECORD_NAME)
    assert read_exported(exported) is None
    with pytest.raises(CheckpointCorrupted, match=f"{RECORD_NAME} has changed since"):
        require_as_written(exported)


def test_a_disk_that_does_not_answer_is_not_damage(exported: Path) -> None:
    with (
        faulty(fail_at=0, error=5, counted=READS, persistent=True),
        pytest.raises(DiskError, match="Input/output error"),
    ):
        require_as_written(exported)


def test_a_link_leads_to_the_hashes(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(exported)
    shutil.copytree(exported, tmp_path / "copy")
    flip(exported / SINGLE_NAME)
    with pytest.raises(CheckpointCorrupted):
        require_as_written(tmp_path / "link")
    require_as_written(tmp_path / "copy")

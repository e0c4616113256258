"""Laws of run_folder.py."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatrain.config import Config, dump_config, load_config
from megatrain.config.load import file_of_run
from megatrain.errors import DiskError, RunFolderError
from megatrain.run.folder import (
    EVENTS,
    MARK,
    RESUMED_FILES,
    RunFolder,
    ask_for_save,
    require_idle,
    require_new,
)

CONFIG = Config.model_validate({"model": "m", "data": "rows.jsonl"})


def test_two_processes_cannot_share_a_folder(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run"), pytest.raises(RunFolderError, match="another process"):
        RunFolder(tmp_path / "run")
    RunFolder(tmp_path / "run").close()


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="as a run folder"):
        RunFolder(tmp_path / "file" / "run")


def _everything(folder: Path) -> dict[str, bytes | None]:
    """Return every name under a folder, with what the files hold."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize(
    "name",
    ["config.yaml", "plan.json", "metrics.jsonl", "model/model.safetensors", ".hidden", MARK],
)
def test_a_folder_of_somebody_else_is_refused_and_stays_as_it_is(tmp_path: Path, name: str) -> None:
    """Also where it holds names that a run of ours has: anybody may use those."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("precious")
    before = _everything(tmp_path)
    for dry in (False, True):
        with pytest.raises(RunFolderError, match=r"is not empty and is not a run folder"):
            RunFolder(tmp_path, dry=dry)
    assert _everything(tmp_path) == before


def test_new_empty_and_our_own_folders_are_used(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "killed").mkdir()
    for name in (".lock", f".{MARK}.0123abcd.tmp", "lost+found"):
        (tmp_path / "killed" / name).write_text("")
    for name in ("new/deep", "empty", "killed"):
        for _ in range(2):
            with RunFolder(tmp_path / name) as folder:
                folder.append("metrics.jsonl", {"step": 1})
    assert len((tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_dry_run_folder_writes_nothing(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", dry=True) as folder:
        folder.append("metrics.jsonl", {"step": 1})
        folder.write_json("plan.json", {})
        folder.write_config(CONFIG)
        folder.cut({})
    assert _everything(tmp_path) == {}


def test_a_config_that_was_edited_is_not_replaced(tmp_path: Path) -> None:
    longer = CONFIG.model_copy(
        update={"train": CONFIG.train.model_copy(update={"epochs": None, "steps": 7})}
    )
    with RunFolder(tmp_path) as folder:
        assert folder.write_config(CONFIG) == []
        assert folder.write_config(longer) == []
        assert load_config(tmp_path / "config.yaml") == longer
        edited = "# my notes\n" + (tmp_path / "config.yaml").read_text()
        (tmp_path / "config.yaml").write_text(edited)
        (said,) = folder.write_config(CONFIG)
    assert said.endswith("is kept; the settings in use are in config.used.yaml")
    assert (tmp_path / "config.yaml").read_text() == edited
    assert load_config(tmp_path / "config.used.yaml") == CONFIG
    assert file_of_run(tmp_path) == tmp_path / "config.used.yaml"
    (tmp_path / "config.yaml").write_text(dump_config(CONFIG))
    with RunFolder(tmp_path) as folder:
        assert folder.write_config(longer) == []
    assert load_config(file_of_run(tmp_path)) == longer  # the used one of before is gone


def test_a_torn_line_is_dropped_and_the_next_one_is_whole(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        for step in (1, 2, 3):
            folder.append("metrics.jsonl", {"step": step})
            folder.append(EVENTS, {"event": step})
        known = folder.lengths()
    for name, torn in (("metrics.jsonl", 5), (EVENTS, 3)):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[:-torn])
    with RunFolder(tmp_path) as folder:
        said = folder.cut(known)
        folder.append("metrics.jsonl", {"step": 4})
        folder.append(EVENTS, {"event": 4})
    assert said == [
        "metrics.jsonl: 5 bytes have disappeared since the checkpoint",
        "metrics.jsonl: dropped an incomplete last line of 7 bytes",
        "events.jsonl: dropped an incomplete last line of 10 bytes",
    ]
    for name, key in (("metrics.jsonl", "step"), (EVENTS, "event")):
        lines = (tmp_path / name).read_text().splitlines()
        assert [json.loads(line)[key] for line in lines] == [1, 2, 4]


def test_a_run_in_training_is_told_from_one_that_is_over(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.append("metrics.jsonl", {"step": 1})
        with pytest.raises(RunFolderError, match=rf"another process \({os.getpid()}\) is writing"):
            require_idle(folder.path)
    require_idle(folder.path)
    with pytest.raises(RunFolderError, match=r"already has a run\. Continue it with --resume"):
        require_new(folder.path)
    require_new(tmp_path / "other")


@pytest.mark.parametrize("exists", [True, False], ids=["file", "nothing"])
@pytest.mark.parametrize("name", sorted({*RESUMED_FILES, EVENTS, ".lock"}))
def test_a_run_folder_with_a_link_where_a_run_appends_is_refused(
    tmp_path: Path, name: str, exists: bool
) -> None:
    victim = tmp_path / "victim"
    if exists:
        victim.write_text("precious")
    RunFolder(tmp_path / "run").close()
    (tmp_path / "run" / name).unlink(missing_ok=True)
    (tmp_path / "run" / name).symlink_to(victim)
    for _ in range(2):  # the refusal leaves it refused, and unlocked
        with pytest.raises(RunFolderError, match=rf"{name} is a link to .*victim"):
            RunFolder(tmp_path / "run")
    assert victim.exists() == exists
    assert not exists or victim.read_text() == "precious"


def test_a_link_that_comes_while_a_run_lives_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    with RunFolder(tmp_path / "run") as folder:
        folder.append("metrics.jsonl", {"step": 1})
        for name in ("metrics.jsonl", "samples.jsonl", EVENTS):
            (folder.path / name).unlink(missing_ok=True)
            (folder.path / name).symlink_to(tmp_path / "victim")
            folder.append(name, {"step": 2})
            assert folder.trouble is not None
            assert f"{name} is a link" in folder.trouble or "metrics.jsonl is" in folder.trouble
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.parametrize(
    "name", ["config.yaml", "plan.json", "data_card.json", "machine.json", MARK, ".save"]
)
def test_files_of_a_run_that_are_written_whole_replace_a_link(tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    RunFolder(tmp_path / "run").close()
    (tmp_path / "run" / name).unlink(missing_ok=True)
    if name == MARK:
        victim.write_text(json.dumps({"megatrain": "run folder"}) + "\n")
    before = victim.read_bytes()
    (tmp_path / "run" / name).symlink_to(victim)
    with RunFolder(tmp_path / "run") as folder:
        folder.write(name, "ours")
        assert folder.save_was_asked() == (name == ".save")
    assert victim.read_bytes() == before


def test_a_request_to_save_follows_no_link(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.append("metrics.jsonl", {"step": 1})
        (folder.path / ".save").symlink_to(tmp_path / "victim")
        with pytest.raises(DiskError, match=r"\.save is a link"):
            ask_for_save(folder.path)
    assert not (tmp_path / "victim").exists()

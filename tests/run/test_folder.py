"""Laws of run_folder.py."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatrain.config import Config, dump_config, load_config
from megatrain.config.load import file_of_run
from megatrain.errors import RunFolderError
from megatrain.run.folder import EVENTS, MARK, RunFolder, require_idle, require_new

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

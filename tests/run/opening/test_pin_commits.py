"""Names of a config: files here, or commits on the Hub that a resumed run keeps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from megatrain.config import Config, load_config
from megatrain.errors import ConfigError, DataError, HubError
from megatrain.run.opening.pin_commits import check_places
from testkit.hub_on_loopback import Files, Hub, serving, use, use_for_datasets
from testkit.runs import Setting, State, config_of, lines_of, run

MODEL, ROWS = "acme/tiny", "acme/sums"


@pytest.fixture
def hub(world: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(world / "cache"))
    with serving() as served:
        use(monkeypatch, served.url, str(tmp_path / "cache"))
        use_for_datasets(monkeypatch, served.url, tmp_path / "datasets")
        yield served


def _files(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _serve(hub: Hub, world: Path) -> tuple[str, str]:
    model = hub.put(MODEL, _files(world / "model-0.0"))
    rows = {"train.jsonl": (world / "rows.jsonl").read_bytes()}
    return model, hub.put(ROWS, rows, "datasets")


def _move(hub: Hub, world: Path) -> None:
    """Let main be another model and other rows."""
    hub.put(MODEL, _files(world / "model-0.1"))
    lines = (world / "rows.jsonl").read_text().splitlines(keepends=True)
    hub.put(ROWS, {"train.jsonl": "".join(lines[:20]).encode()}, "datasets")


def _config(world: Path, folder: Path, **data: object) -> Config:
    return config_of(
        world, folder, Setting(), model={"name_or_path": MODEL}, data={"train": ROWS} | data
    )


def _equal(first: State | None, second: State | None) -> bool:
    assert first is not None
    assert second is not None
    return all(torch.equal(value, second[key]) for key, value in first.items())


@pytest.mark.merge
def test_a_run_by_ids_is_the_run_by_folders(
    hub: Hub, world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, rows = _serve(hub, world)
    here = run(config_of(world, tmp_path / "here", Setting()))
    there = run(_config(world, tmp_path / "there"))
    assert _equal(here, there)
    assert lines_of(tmp_path / "here") == lines_of(tmp_path / "there")
    assert json.loads((tmp_path / "there" / "hub.json").read_text()) == {
        "models": {f"{MODEL}@main": model},
        "datasets": {f"{ROWS}@main": rows},
    }
    written = load_config(tmp_path / "there" / "config.yaml")
    assert written.model.revision == model
    assert written.data.train[0].revision == rows
    assert json.loads((tmp_path / "there" / "data_card.json").read_text())["commit"] == rows
    assert not (tmp_path / "here" / "hub.json").exists()
    told = "".join(capsys.readouterr())
    assert told.count(f"{MODEL}@main: commit {model[:12]}") == 1
    assert told.count(f"{ROWS}@main: commit {rows[:12]}") == 1


@pytest.mark.merge
@pytest.mark.parametrize("step", [1, 4])  # before the first checkpoint, and after it
def test_a_resumed_run_keeps_its_commits_when_main_moves(
    hub: Hub, world: Path, tmp_path: Path, step: int
) -> None:
    _serve(hub, world)
    whole = run(_config(world, tmp_path / "whole"))
    config = _config(world, tmp_path / "stopped")
    run(config, die=step)
    _move(hub, world)
    assert _equal(run(config, resume=True), whole)
    assert not _equal(run(_config(world, tmp_path / "moved")), whole)


@pytest.mark.merge
def test_a_resumed_run_needs_no_hub(
    hub: Hub, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _serve(hub, world)
    config = _config(world, tmp_path / "run")
    run(config, die=1)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert run(config, resume=True) is not None


def test_weights_are_downloaded_after_the_data_was_read(
    hub: Hub, world: Path, tmp_path: Path
) -> None:
    _serve(hub, world)
    with pytest.raises(HubError, match="acme/none: no such folder here"):
        run(_config(world, tmp_path / "run", train="acme/none"))
    assert not (tmp_path / "run").exists()
    hub.put("acme/odd", {"train.jsonl": b'{"unknown": 1}'}, "datasets")
    with pytest.raises(DataError, match="acme/odd train: no known format"):
        run(_config(world, tmp_path / "run", train="acme/odd"))
    assert "tokenizer.json" in hub.fetched()
    assert "model.safetensors" not in hub.fetched()


def test_a_name_that_leads_nowhere_is_told_before_torch_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.yaml").write_text("model: acme/none\ndata: rows.jsonl\n")
    script = (
        "import sys\nfrom megatrain.cli.app import app\nfrom megatrain.errors import HubError\n"
        "for words in (['train', 'run.yaml'], ['sample', 'acme/none', 'hi'],\n"
        "              ['data', 'rows.jsonl', '-m', 'acme/none'], ['eval', 'acme/none', 'x']):\n"
        "    try:\n        app(words, standalone_mode=False)\n"
        "    except HubError as error:\n        assert 'acme/none' in str(error)\n"
        "    else:\n        raise AssertionError(words)\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, cwd=tmp_path)


@pytest.mark.parametrize("key", ["model", "data.train", "data.eval"])
def test_a_path_beside_the_config_is_not_taken_for_one_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    (there / "thing").mkdir()
    monkeypatch.chdir(here)
    values = {"model": "m", "data.train": "d", "data.eval": "e"} | {key: "thing"}
    value = {
        "model": values["model"],
        "data": {"train": values["data.train"], "eval": values["data.eval"]},
    }
    config = Config.model_validate(value)
    with pytest.raises(ConfigError, match=rf"{key} is thing, which is not in .*here but beside"):
        check_places(config, Path("../there/run.yaml"))
    (here / "thing").mkdir()
    check_places(config, Path("../there/run.yaml"))

"""A run on the Hub, from the command line: bytes, card, and refusals with a way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatrain.cli.exporting import export_model, push_run
from megatrain.errors import CheckpointCorrupted, ConfigError, HubError, RunFolderError
from megatrain.run.folder import RunFolder
from megatrain.run.trainer import Trainer
from testkit import hub_on_loopback
from testkit.runs import Setting, config_of, write_world

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
SHORT = {"train": {"steps": 2}, "eval": {"samples": 0, "every": None}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with two checkpoints and without an export."""
    folder = tmp_path_factory.mktemp("push")
    write_world(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRAIN_CACHE", str(folder / "cache"))
        config = config_of(folder, folder / "run", Setting(save_every=1), **SHORT)
        with Trainer(config) as trainer:
            trainer.train()
    return folder / "run"


def push(run: Path, **changes: Any) -> str:
    options = {"best": False, "merge": False, "private": True, **changes}
    return push_run(run, "me/adder", **options)


def test_a_run_is_pushed_with_the_card_of_its_step(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sorted((run / "checkpoints").glob("step-*1-*"))[0]
    for model, step in ((run, 2), (first, 1)):
        with hub_on_loopback.serving() as hub:
            hub_on_loopback.use(monkeypatch, hub.url, str(tmp_path / "hf"))
            hub.accepts_pushes = True
            address = push(model)
        files = dict(hub.commits["models", "me/adder"][address.rpartition("/")[2]])
        assert address == f"{hub.url}/me/adder/commit/{address.rpartition('/')[2]}"
        assert hub.visibility == {"me/adder": "private"}
        card = files.pop("README.md").decode()
        export_model(model, tmp_path / f"model-{step}")
        written = {p.name: p.read_bytes() for p in (tmp_path / f"model-{step}").iterdir()}
        assert files == written
        assert f" with MegaTrain: model of step {step}." in card
        assert yaml.safe_load(card.split("---\n")[1])["library_name"] == "transformers"
        assert str(run.parent) not in card
    assert not (run / ".hub").exists()


def test_a_run_that_is_training_or_not_whole_is_not_pushed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_on_loopback.serving() as hub:
        hub_on_loopback.use(monkeypatch, hub.url, str(tmp_path / "hf"))
        hub.accepts_pushes = True
        with RunFolder(run), pytest.raises(RunFolderError, match="is writing to this run"):
            push(run)
        newest = max((run / "last").resolve().glob("model/*.safetensors"))
        whole = newest.read_bytes()
        newest.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        try:
            with pytest.raises(
                CheckpointCorrupted, match=r"(?s)newest model .*To push step 1 inst"
            ):
                push(run)
        finally:
            newest.write_bytes(whole)
        with pytest.raises(ConfigError, match=r"not a run .* `hf upload me/adder"):
            push(run.parent / "model")
        assert hub.requests == []


def test_a_hub_that_refuses_does_so_before_the_export(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain.cli.exporting.export_found", pytest.fail)
    with hub_on_loopback.serving() as hub:
        hub_on_loopback.use(monkeypatch, hub.url, str(tmp_path / "hf"))
        for token, said in ((None, "there is no token here"), ("hf_x", "may not write there")):
            monkeypatch.setattr("huggingface_hub.get_token", lambda token=token: token)
            with pytest.raises(HubError, match=f"answered 401 .*{said}.* `hf auth login`"):
                push(run)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"):
            push(run)
    hub_on_loopback.use(monkeypatch, "http://127.0.0.1:9", str(tmp_path / "hf"))
    with pytest.raises(HubError, match=r"the push failed .* push again"):
        push(run)


@pytest.mark.merge
def test_adapters_are_pushed_alone_or_in_their_model(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(run.parent / "cache"))
    config = config_of(run.parent, tmp_path / "run", Setting(), lora={"rank": 2}, **SHORT)
    with Trainer(config) as trainer:
        trainer.train()
    found = []
    for merge in (False, True):
        with hub_on_loopback.serving() as hub:
            hub_on_loopback.use(monkeypatch, hub.url, str(tmp_path / "hf"))
            hub.accepts_pushes = True
            address = push(tmp_path / "run", merge=merge, private=False)
        assert hub.visibility == {"me/adder": "public"}
        files = hub.commits["models", "me/adder"][address.rpartition("/")[2]]
        front = yaml.safe_load(files["README.md"].decode().split("---\n")[1])
        found.append(("adapter_model.safetensors" in files, front["library_name"]))
    assert found == [(True, "peft"), (False, "transformers")]

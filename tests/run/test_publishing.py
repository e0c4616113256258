"""A run on the Hub: every byte of the export, a card of the run folder, errors with a way out."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatrain.errors import ConfigError, HubError
from megatrain.run.trainer import Trainer
from testkit import hub_on_loopback
from testkit.runs import Setting, config_of

pytestmark = pytest.mark.usefixtures("cache_in_world")
SHORT = {"train": {"steps": 2}, "eval": {"samples": 0}}


@pytest.mark.merge
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's own
def test_a_run_is_pushed_with_its_card(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(world, tmp_path / "run", Setting(save_every=None), **SHORT)
    with hub_on_loopback.serving() as hub, Trainer(config) as trainer:
        hub_on_loopback.use(monkeypatch, hub.url, str(tmp_path / "hf"))
        trainer.train()
        with pytest.raises(HubError, match=r"answered 401 .* `hf auth login`"):
            trainer.push_to_hub("me/adder")
        hub.accepts_pushes = True
        address = trainer.push_to_hub("me/adder")
        trainer.save_model(tmp_path / "model")
        for wrong in ("adder", "me/ad der", "../x"):
            with pytest.raises(ConfigError, match="not an id like me/name"):
                trainer.push_to_hub(wrong)
    commit = address.rpartition("/")[2]
    files = dict(hub.commits["models", "me/adder"][commit])
    card = files.pop("README.md").decode()
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    assert any(line.startswith("PUT /lfs/") for line in hub.requests)
    assert not (tmp_path / "run/.hub").exists()
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "transformers"
    for said in ("# adder", "MegaTrain: model of step 2.", "| data.train | rows.jsonl |"):
        assert said in text
    assert "| optim.learning_rate | 0.01 |" in text
    assert str(world) not in card
    assert str(tmp_path) not in card

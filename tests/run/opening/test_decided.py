"""A config of two lines trains in every family; what it leaves open is chosen, told and kept."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megatrain.config import Config, load_config
from megatrain.errors import CheckpointMismatch, ConfigError, Interrupted
from megatrain.models import isolation
from megatrain.models.build import build_decoder
from megatrain.run.opening import recipe
from megatrain.run.opening.recipe import decide
from megatrain.run.opening.training_data import TrainingData
from megatrain.run.trainer import Trainer
from testkit.families import FAMILIES, save_tiny, tiny_config
from testkit.joint_families import save_tiny_joint
from testkit.runs import Setting, config_of, run

pytestmark = pytest.mark.usefixtures("cache_in_world")
MIXING = sorted(set(FAMILIES) - isolation.ISOLATES)
"""Families that do not keep packed documents apart."""
JOINT_MIXING = ["llama4", "qwen3_5", "qwen3_5_moe"]
"""The same families as they are published, with towers."""
USUAL = ["granitemoehybrid", "lfm2", "llama4_text", "qwen3_next", "qwen3_5"]
OTHERS = sorted({*MIXING, *JOINT_MIXING} - {*USUAL})
NUM_ROWS = 6
OFF = "packing: auto is off, so each row is one document: "


def two_lines(world: Path, family: str) -> Path:
    """Write a tiny model of a family and a config of two lines here; return its path."""
    model = Path("model")
    (save_tiny_joint if family in JOINT_MIXING else save_tiny)(model, family)
    AutoTokenizer.from_pretrained(world / "model-0.0").save_pretrained(model)
    rows = (world / "rows.jsonl").read_text().splitlines(keepends=True)
    Path("rows.jsonl").write_text("".join(rows[:NUM_ROWS]))
    path = Path("run.yaml")
    path.write_text("model: model\ndata: rows.jsonl\n")
    return path


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "family", [*USUAL, *(pytest.param(family, marks=pytest.mark.merge) for family in OTHERS)]
)
def test_two_lines_train_a_step_where_packed_documents_would_mix(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with Trainer(load_config(two_lines(world, family))) as trainer:
        assert [family in note for note in trainer.notes if note.startswith(OFF)] == [True]
        assert trainer.config.data.packing is False
        assert isinstance(trainer.data, TrainingData)
        batch = trainer.data.next_batch()
        assert sum(len(micro.input_ids) for micro in batch) == NUM_ROWS
        assert all(micro.position_ids is None for micro in batch)
        assert math.isfinite(trainer.engine.step(batch).loss)
    assert load_config("runs/model/config.yaml").data.packing is False


def test_where_they_are_kept_apart_rows_are_packed_without_a_word(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Trainer(load_config(two_lines(world, "llama"))) as trainer:
        assert not [note for note in trainer.notes if note.startswith(OFF)]
        assert trainer.config.data.packing is True
        assert isinstance(trainer.data, TrainingData)
        (micro,) = trainer.data.next_batch()
        assert len(micro.input_ids) == 1  # all rows in one
    assert load_config("runs/model/config.yaml").data.packing is True


def made(**sections: Any) -> Config:
    return Config.model_validate({"model": "m", "data": {"train": "r"}} | sections)


@pytest.mark.parametrize(
    ("family", "attn", "expected"),
    [
        ("nemotron", "auto", True),
        ("nemotron", "flash_attention_2", False),
        ("llama", "flash_attention_2", True),
        ("lfm2", "auto", False),
    ],
)
def test_the_attention_counts_too(family: str, attn: str, expected: bool) -> None:
    decoder, notes = build_decoder(tiny_config(family), "bf16"), list[str]()
    config = decide(made(model={"name_or_path": "m", "attn": attn}), decoder, None, notes)
    assert config.packs is expected
    assert [note for note in notes if note.startswith(OFF)] == (
        [] if expected else [OFF + str(isolation.why_mixed(family, attn))]
    )


def test_packing_that_is_asked_for_and_would_mix_stays_an_error() -> None:
    decoder = build_decoder(tiny_config("lfm2"), "bf16")
    text = r"^data\.packing: lfm2 is not known .* Set data\.packing to auto; then each row is one"
    with pytest.raises(ConfigError, match=text):
        decide(made(data={"train": "r", "packing": True}), decoder, None, [])
    notes: list[str] = []
    assert not decide(made(data={"train": "r", "packing": False}), decoder, None, notes).packs
    assert not [note for note in notes if note.startswith(OFF)]


PREFERENCES = ["dpo", "ipo", "orpo", "simpo", "kto"]


@pytest.mark.parametrize(
    ("sections", "rate", "method"),
    [
        ({}, 1e-5, "fine-tuning of all params"),
        ({"lora": {"rank": 8}}, 1e-4, "fine-tuning with adapters"),
        ({"lora": {"path": "there"}}, 1e-4, "fine-tuning with adapters"),
        *[({"loss": name}, 1e-6, f"{name} of all params") for name in PREFERENCES],
        *[
            ({"loss": name, "lora": {"rank": 8}}, 1e-5, f"{name} with adapters")
            for name in PREFERENCES
        ],
    ],
    ids=str,
)
def test_the_learning_rate_suits_the_method_and_is_told(
    sections: dict[str, Any], rate: float, method: str
) -> None:
    decoder, notes = build_decoder(tiny_config("llama"), "bf16"), list[str]()
    config = decide(made(**sections), decoder, None, notes)
    assert config.optim.learning_rate == rate
    assert notes == [
        f"learning rate: auto is {rate:g}, the usual one for {method}; "
        "optim.learning_rate sets another"
    ]
    given = made(**sections, optim={"learning_rate": 3e-5})
    assert decide(given, decoder, None, notes).optim.learning_rate == 3e-5
    assert len(notes) == 1


def test_a_loss_of_ones_own_is_not_taken_for_one_of_ours() -> None:
    decoder, notes = build_decoder(tiny_config("llama"), "bf16"), list[str]()
    config = decide(made(loss="dpo"), decoder, None, notes, own_loss=True)
    assert config.optim.learning_rate == 1e-5
    assert "for a loss of your own;" in notes[0]


OPEN: dict[str, Any] = {"data": {"packing": "auto"}, "optim": {"learning_rate": "auto"}}


def in_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, other choices."""
    monkeypatch.setattr(recipe, "FINE_TUNING_RATE", 5e-3)
    monkeypatch.setattr(recipe, "why_mixed", lambda *_: "so we believe now")


@pytest.mark.merge
def test_a_resumed_run_keeps_what_it_began_with(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting(save_every=2)
    config = config_of(world, tmp_path / "run", setting, **OPEN)
    with pytest.raises(Interrupted):
        run(config, stop=4)
    in_another_version(monkeypatch)
    run(config, resume=True)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rates = [one["learning_rate"] for one in map(json.loads, lines) if "learning_rate" in one]
    assert max(rates) == 1e-5
    written = load_config(tmp_path / "run" / "config.yaml")
    assert (written.data.packing, written.optim.learning_rate) == (True, 1e-5)
    closed = config_of(world, tmp_path / "run", setting, **OPEN | {"data": {"packing": False}})
    with pytest.raises(CheckpointMismatch, match=r"data\.packing: true -> false"):
        run(closed, resume=True)

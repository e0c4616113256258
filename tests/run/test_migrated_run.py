"""A config of another tool, brought over and run: as many steps and rows as there.

Other files start the method that they name, on a model and rows of this machine.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli.starting import init_config
from megatrain.cli.verbs import train_from
from megatrain.config import load_config
from megatrain.config.yaml_reader import read_document
from megatrain.errors import MegaTrainError
from megatrain.run.opening.pin_commits import read_config
from megatrain.run.trainer import Trainer


def test_a_file_of_trl_is_run_with_its_rows_and_steps(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(world / "cache"))
    theirs = {
        "model_name_or_path": str(world / "model-0.0"), "dataset_name": str(world / "rows.jsonl"),
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_train_epochs": 2,
        "max_length": 64, "assistant_only_loss": True, "learning_rate": 1e-3, "use_cpu": True,
        "output_dir": str(tmp_path / "run"), "save_strategy": "no",
    }  # fmt: skip
    (tmp_path / "sft.json").write_text(json.dumps(theirs))
    init_config(tmp_path / "run.yaml", tmp_path / "sft.json", tool="trl")
    config = load_config(tmp_path / "run.yaml", ["eval.samples=0"])
    with Trainer(config) as trainer:
        assert trainer.num_steps == 2 * math.ceil(60 / 8)
        trainer.train()
        assert trainer.state.step == trainer.num_steps
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines if "loss" in json.loads(line)]
    assert [step["learning_rate"] for step in steps[:2]] == pytest.approx([1e-3, 1e-3 * 15 / 16])


SFT, PAIRS, MARKED = "rows.jsonl", "pairs.jsonl", "marked.jsonl"
CONFIGS = Path(__file__).parent.parent / "config/other_tools/configs"
STARTED = {
    "trl/sft_full.yaml": (SFT, "next_token", None),
    "trl/sft_lora.yaml": (SFT, "next_token", 32),
    "trl/dpo_full.yaml": (PAIRS, "dpo", None),
    "trl/dpo_list.yaml": (PAIRS, "dpo", None),
    "trl/dpo_lora.yaml": (PAIRS, "dpo", 32),
    "trl/dpo_ipo.yaml": (PAIRS, "ipo", None),
    "trl/kto_lora.yaml": (MARKED, "kto", 64),
    "trl/orpo.yaml": (PAIRS, "orpo", None),
    "trl/cpo_simpo.yaml": (PAIRS, "simpo", None),
    "llama_factory/sft_lora.yaml": (SFT, "next_token", 8),
    "llama_factory/dpo_lora.yaml": (PAIRS, "dpo", 8),
    "llama_factory/kto_lora.yaml": (MARKED, "kto", 8),
    "axolotl/sft_lora.yaml": (SFT, "next_token", 32),
    "axolotl/dpo_lora.yaml": (PAIRS, "dpo", 32),
    "axolotl/orpo_lora.yaml": (PAIRS, "orpo", 32),
    "axolotl/kto_lora.yaml": (MARKED, "kto", 32),
}
"""Configs, the rows they get, and the loss and rank of adapters that they start with."""


@pytest.fixture(scope="module")
def preferences(world: Path) -> Path:
    """The world with pairs, marked answers, and LLaMA-Factory's names for all rows."""
    asked = [{"prompt": f"What is {n} + 1?", "good": str(n + 1), "bad": str(n)} for n in range(40)]
    pairs = [{"prompt": row["prompt"], "chosen": row["good"], "rejected": row["bad"]}
             for row in asked]  # fmt: skip
    marked = [{"prompt": row["prompt"], "completion": row["good" if n % 2 else "bad"],
               "label": bool(n % 2)} for n, row in enumerate(asked)]  # fmt: skip
    for name, rows in ((PAIRS, pairs), (MARKED, marked)):
        (world / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    info = {
        SFT: {"file_name": SFT, "formatting": "sharegpt", "columns": {"messages": "messages"}},
        PAIRS: {"file_name": PAIRS, "ranking": True, "columns": {"chosen": "chosen",
                                                                 "rejected": "rejected"}},
        MARKED: {"file_name": MARKED, "columns": {"kto_tag": "label"}},
    }  # fmt: skip
    (world / "dataset_info.json").write_text(json.dumps(info))
    return world


def _on_this_machine(name: str, rows: str, world: Path) -> dict[str, Any]:
    """Return a config's values with a model and rows of this machine."""
    values: dict[str, Any] = read_document(CONFIGS / name).value
    model, place = str(world / "model-0.0"), str(world / rows)
    if name.startswith("trl/"):
        return values | {"model_name_or_path": model, "dataset_name": place, "eval_strategy": "no"}
    if name.startswith("axolotl/"):
        return values | {"base_model": model, "datasets": [{"path": place}]}
    return values | {"model_name_or_path": model, "dataset": rows, "dataset_dir": str(world)}


@pytest.mark.few(9)
@pytest.mark.parametrize("name", STARTED)
def test_a_migrated_run_starts_with_the_method_of_its_file(
    name: str, preferences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(preferences / "cache"))
    rows, loss, rank = STARTED[name]
    values = _on_this_machine(name, rows, preferences)
    (tmp_path / "theirs.json").write_text(json.dumps(values | {"output_dir": str(tmp_path / "o")}))
    first = (CONFIGS / name).read_text().split("\n", 1)[0].split()
    tool = {"trl": f"trl-{first[2]}", "llamafactory-cli": "llamafactory"}.get(first[1], "axolotl")
    init_config(tmp_path / "run.yaml", tmp_path / "theirs.json", tool=tool, say=lambda _: None)
    small = ["eval.samples=0", "memory.device=cpu", "data.max_length=128"]
    config = load_config(tmp_path / "run.yaml", small)
    assert (config.loss.name, config.lora.rank) == (loss, rank)
    said = train_from(read_config(tmp_path / "run.yaml", small), dry_run=True)
    assert "ready to train" in said


def test_a_migrated_run_with_the_wrong_rows_would_not_start(
    preferences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are marked are not pairs: the dry run reads them, and says so."""
    monkeypatch.setenv("MEGATRAIN_CACHE", str(preferences / "cache"))
    values = _on_this_machine("trl/dpo_list.yaml", MARKED, preferences)
    (tmp_path / "theirs.json").write_text(json.dumps(values | {"output_dir": str(tmp_path / "o")}))
    target = tmp_path / "run.yaml"
    init_config(target, tmp_path / "theirs.json", tool="trl-dpo", say=lambda _: None)
    with pytest.raises(MegaTrainError, match="pairs"):
        train_from(read_config(target, ["memory.device=cpu", "data.max_length=128"]), dry_run=True)

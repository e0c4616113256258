"""`init --from`: keys that mean the same are written, and every other one is listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.cli.starting import init_config
from megatrain.config import load_config
from megatrain.errors import ConfigError

SFT = """\
model_name_or_path: org/model
dataset_name: rows.jsonl
num_train_epochs: 3
learning_rate: 2.0e-5
lr_scheduler_type: constant
lora_r: 16
lora_target_modules: [q_proj, v_proj]
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
bf16: true
output_dir:
unheard_of: {a: [1, 2]}
"""


def test_a_file_becomes_a_config_and_a_list(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(SFT)
    said: list[str] = []
    init_config(tmp_path / "run.yaml", tmp_path / "sft.yaml", say=said.append)
    config = load_config(tmp_path / "run.yaml")
    assert config.model.name_or_path == "org/model"
    assert [source.path for source in config.data.train] == ["rows.jsonl"]
    assert (config.train.epochs, config.optim.learning_rate) == (3, 2e-5)
    assert (config.lora.rank, config.lora.targets) == (16, ("q_proj", "v_proj"))
    assert config.train.batch_tokens == "auto"
    same, _, undecided = said[0].partition("yours to decide (6):\n")
    assert "  num_train_epochs: 3  train.epochs\n" in same
    assert "rows per device x accumulation x GPUs" in undecided
    assert "  lr_scheduler_type: constant  optim.schedule: there is no warm-up" in undecided
    assert "  output_dir: null  save.dir has a default of its own here.\n" in undecided
    assert '  unheard_of: {"a": [1, 2]}  Not known here; see docs/config.md.\n' in undecided
    written = (tmp_path / "run.yaml").read_text()
    assert "#   bf16: true  model.dtype is bf16 or fp32" in written


def test_a_file_that_lacks_rows_is_written_and_refused(tmp_path: Path) -> None:
    (tmp_path / "sft.json").write_text('{"base_model": "m", "bad\\u001bname": "\\u001b[0m\\n"}')
    with pytest.raises(ConfigError, match=r"run\.yaml was written, and does not load yet:\n.*data"):
        init_config(tmp_path / "run.yaml", tmp_path / "sft.json", say=lambda _: None)
    assert all(line.isprintable() for line in (tmp_path / "run.yaml").read_text().splitlines())
    with pytest.raises(ConfigError, match="Give another name"):
        init_config(tmp_path / "run.yaml", tmp_path / "sft.json")


def test_a_file_without_keys_is_refused_and_nothing_written(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(ConfigError, match="it has no keys and values"):
        init_config(tmp_path / "run.yaml", tmp_path / "list.yaml")
    assert not (tmp_path / "run.yaml").exists()


def test_a_name_that_cuts_texts_elsewhere_says_what_cuts_them_here(tmp_path: Path) -> None:
    """With the default, longer rows are dropped."""
    for name, line in (("stage", "stage: pt"), ("datasets", "datasets: [{type: completion}]")):
        (tmp_path / f"{name}.yaml").write_text(f"model_name_or_path: org/model\n{line}\n")
        with pytest.raises(ConfigError, match="does not load yet"):
            init_config(
                tmp_path / f"{name}-run.yaml", tmp_path / f"{name}.yaml", say=lambda _: None
            )
        assert "data.overlong: split, not drop" in (tmp_path / f"{name}-run.yaml").read_text()

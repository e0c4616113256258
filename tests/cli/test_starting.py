"""What `init` finds on this machine about the rows and the model of another tool's config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatrain.cli.starting import init_config
from megatrain.config import Config, load_config
from megatrain.errors import ConfigError


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def brought(folder: Path, tool: str = "trl", **values: object) -> Config:
    (folder / "theirs.json").write_text(json.dumps(values))
    init_config(folder / "run.yaml", folder / "theirs.json", tool=tool, say=lambda _: None)
    return load_config(folder / "run.yaml")


def test_rows_tell_the_trainer_of_trl(tmp_path: Path) -> None:
    rows = write(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b"})
    config = brought(tmp_path, model_name_or_path="m", dataset_name=rows)
    assert (config.loss.name, config.optim.learning_rate) == ("next_token", 2e-5)
    assert config.data.train_on == "completion"


def test_rows_with_a_label_may_be_of_kto(tmp_path: Path) -> None:
    marked = write(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b", "label": True})
    with pytest.raises(ConfigError, match="fit sft, dpo, kto"):
        brought(tmp_path, model_name_or_path="m", dataset_name=marked)
    config = brought(tmp_path, "trl-kto", model_name_or_path="m", dataset_name=marked)
    assert (config.loss.name, config.optim.learning_rate) == ("kto", 1e-6)
    assert config.data.shuffle is False


def test_pairs_leave_several_trainers_and_none_is_chosen(tmp_path: Path) -> None:
    pairs = write(tmp_path / "a.jsonl", {"prompt": "a", "chosen": "b", "rejected": "c"})
    with pytest.raises(ConfigError, match="fit dpo, orpo, cpo or reward") as error:
        brought(tmp_path, model_name_or_path="m", dataset_name=pairs)
    assert "`--tool trl-dpo`" in str(error.value)
    config = brought(tmp_path, "trl-dpo", model_name_or_path="m", dataset_name=pairs)
    assert (config.loss.name, config.data.train_on) == ("dpo", "assistant")


@pytest.mark.parametrize(
    ("kind", "targets"), [("gpt_neox", ("query_key_value",)), ("llama", ("q_proj", "v_proj"))]
)
def test_the_type_of_a_model_is_read_from_its_folder(
    tmp_path: Path, kind: str, targets: tuple[str, ...]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": kind}))
    model = str(tmp_path / "model")
    config = brought(
        tmp_path, "trl-sft", model_name_or_path=model, dataset_name="a/b", use_peft=True
    )
    assert config.lora.targets == targets


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model_type": 3}'])
def test_a_model_whose_type_cannot_be_read_is_one_of_unknown_type(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(text)
    said: list[str] = []
    values = {"model_name_or_path": str(tmp_path / "model"), "dataset_name": "a/b"}
    (tmp_path / "theirs.json").write_text(json.dumps(values | {"use_peft": True}))
    target = tmp_path / "run.yaml"
    init_config(target, tmp_path / "theirs.json", tool="trl-sft", say=said.append)
    assert "the type of this model is not known on this machine" in said[0]


def test_rows_in_files_count_the_steps_between_saves(tmp_path: Path) -> None:
    rows = write(tmp_path / "a.jsonl", *({"text": str(number)} for number in range(40)))
    config = brought(
        tmp_path, "axolotl", base_model="m", datasets=[{"path": rows, "type": "completion"}],
        micro_batch_size=2, saves_per_epoch=2, learning_rate=1e-5,
    )  # fmt: skip
    assert config.save.every == 10

"""The model that is meant: by name, folder or file; a hostile config.json is refused in words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.config import Config
from megatrain.errors import ConfigError, ModelConfigError, ModelFolderError, UnsupportedModel
from megatrain.planning.catalog.asked_models import find_shape, shape_for
from testkit.families import save_tiny
from testkit.hub_on_loopback import serving, use

QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 151936, "tie_word_embeddings": False, "max_position_embeddings": 40960,
}  # fmt: skip


def _write(folder: Path, config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def test_a_name_a_folder_and_a_file_give_the_same_model(tmp_path: Path) -> None:
    known = find_shape("qwen3-8b")
    folder = _write(tmp_path / "mine", QWEN3_8B)
    for asked in (str(folder), str(folder / "config.json")):
        shape = find_shape(asked)
        assert (shape.name, shape.positions) == ("mine", 40960)
        assert replace(shape, name=known.name, positions=None) == known


def test_an_id_that_is_not_in_the_table_is_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as hub:
        use(monkeypatch, hub.url, str(tmp_path))
        hub.put("acme/fresh", {"config.json": json.dumps(QWEN3_8B).encode()})
        shape = find_shape("acme/fresh")
        assert (shape.name, shape.params) == ("fresh", find_shape("qwen3-8b").params)
        assert hub.fetched() == ["config.json"]
        with pytest.raises(ConfigError, match=r"acme/qwen is not a folder, .*the Hub has no model"):
            find_shape("acme/qwen")
        hub.requests.clear()
        find_shape("Qwen/Qwen3-8B")
        assert hub.requests == []


def test_a_family_that_is_not_listed_is_built_without_weights(tmp_path: Path) -> None:
    save_tiny(tmp_path / "hf", "gpt2", torch.bfloat16)
    shape = find_shape(str(tmp_path / "hf"))
    assert shape.family == "gpt2"
    assert shape.params > 0


def test_a_model_with_eyes_counts_its_decoder(tmp_path: Path) -> None:
    text = {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
        "head_dim": 256, "num_hidden_layers": 34, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 262208, "sliding_window": 1024,
    }  # fmt: skip
    folder = _write(tmp_path / "m", {"model_type": "gemma3", "text_config": text, "x": 1})
    assert find_shape(str(folder)).params == find_shape("gemma-3-4b-pt").params


def test_adapters_of_a_folder_need_a_rank_to_be_estimated() -> None:
    given: dict[str, Any] = {"model": "Qwen/Qwen3-8B", "data": "rows.jsonl"}
    with pytest.raises(ConfigError, match=r"Give their rank too, like lora\.rank=16"):
        shape_for(Config.model_validate(given | {"lora": {"path": "adapters"}}))
    with_rank = {"lora": {"path": "adapters", "rank": 16}}
    alone = {"lora": {"rank": 16}}
    assert shape_for(Config.model_validate(given | with_rank)) == shape_for(
        Config.model_validate(given | alone)
    )


def test_what_is_nowhere_is_said() -> None:
    with pytest.raises(ConfigError, match="not a folder, a file or a known model"):
        find_shape("no/such-thing")


def test_a_folder_without_config_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"config\.json: cannot read it: No such file"):
        find_shape(str(tmp_path))


LLAMA = QWEN3_8B | {"model_type": "llama"}
_NO_SIZES: tuple[Any, ...] = (10**30, "x", None, [], {})
HOSTILE = [
    "",
    "[" * 100_000,
    "[]",
    "null",
    "{}",
    '{"model_type": 3}',
    *(json.dumps(LLAMA | {"num_hidden_layers": value}) for value in (0, -1, 10**9, "x", None, 1.5)),
    *(json.dumps(LLAMA | {"hidden_size": value}) for value in _NO_SIZES),
    *(json.dumps(LLAMA | {"num_attention_heads": value}) for value in (0, None, "x")),
    json.dumps({"model_type": "no_such_family", "hidden_size": 64}),
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_config_is_refused_in_words(tmp_path: Path, text: str) -> None:
    folder = _write(tmp_path / "m", text)
    with pytest.raises((ModelConfigError, UnsupportedModel)):
        find_shape(str(folder))


def test_a_huge_file_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelConfigError, match=r"not a config\.json"):
        find_shape(str(path))

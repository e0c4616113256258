"""The model that is meant: by name, folder or file; a hostile config.json is refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.config import Config
from megatrain.errors import ConfigError, ModelConfigError, ModelFolderError
from megatrain.planning.catalog.asked_models import find_shape, shape_for
from megatrain.planning.catalog.known_models import find_known_model
from testkit.families import save_tiny
from testkit.hub_on_loopback import serving, use


def _write(folder: Path, config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def test_a_name_a_folder_and_a_file_give_the_same_model(tmp_path: Path) -> None:
    known = find_shape("qwen3-8b")
    folder = _write(tmp_path / "mine", find_known_model("qwen3-8b").config)
    for asked in (str(folder), str(folder / "config.json")):
        shape = find_shape(asked)
        assert shape.renamed(known.name) == known
        assert shape.name == "mine"


def test_an_id_that_is_not_in_the_table_is_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = find_known_model("qwen3-8b")
    with serving() as hub:
        use(monkeypatch, hub.url, str(tmp_path))
        hub.put("acme/fresh", {"config.json": json.dumps(known.config).encode()})
        shape = find_shape("acme/fresh")
        assert shape.renamed(known.name) == find_shape("qwen3-8b")
        assert shape.name == "fresh"
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
    text = find_known_model("gemma-3-4b-it").config
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


LLAMA = find_known_model("Llama-3.2-1B").config
_NO_SIZES: tuple[Any, ...] = (10**30, "x", None, [], {})
HOSTILE = [
    "",
    "[" * 100_000,
    "[]",
    "null",
    "{}",
    '{"model_type": 3}',
    '{"model_type": "llama"}',
    *(json.dumps(LLAMA | {"num_hidden_layers": value}) for value in (0, -1, 10**9, "x", None, 1.5)),
    *(json.dumps(LLAMA | {"hidden_size": value}) for value in _NO_SIZES),
    *(json.dumps(LLAMA | {"num_attention_heads": value}) for value in (0, None, "x")),
    json.dumps({"model_type": "no_such_family", "hidden_size": 64}),
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_config_is_refused_in_words(tmp_path: Path, text: str) -> None:
    folder = _write(tmp_path / "m", text)
    with pytest.raises(ModelConfigError):
        find_shape(str(folder))


def test_a_huge_file_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelConfigError, match=r"not a config\.json"):
        find_shape(str(path))

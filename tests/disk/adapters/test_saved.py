"""Modules that are trained whole beside adapters: in one folder with them, as PEFT has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatrain import AdamW, Engine, load_model
from megatrain.disk.hf.growth import Growth
from megatrain.disk.hf.model import HostModel, read_model_folder
from megatrain.errors import ConfigError, WeightsMismatch
from megatrain.memory.kinds import TensorKind
from megatrain.model_files import ADAPTER_CONFIG_NAME, ADAPTER_NAME
from megatrain.models.adapters.lora import LoraConfig
from megatrain.models.build import build_decoder
from testkit.families import save_tiny, tiny_config
from testkit.plain import make_batch

KINDS = (TensorKind.HI, TensorKind.LO)
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LORA = LoraConfig(
    rank=2, alpha=4, target_modules=("q_proj",), modules_to_save=("embed_tokens", "lm_head")
)


def _changed(home: HostModel) -> HostModel:
    """Return the model with other numbers in all that is trained."""
    draw = torch.Generator().manual_seed(7)
    for param in home.decoder.params:
        if param.trained:
            home.store.param(param.name, TensorKind.HI).copy_(
                torch.randn(param.shape, generator=draw)
            )
    return home


@pytest.mark.parametrize("tied", [False, True])
def test_tables_go_with_the_adapters_and_come_back(tied: bool, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama", torch.float32, tie_word_embeddings=tied)
    home = _changed(load_model(base, dtype="fp32", lora=LORA))
    own = {param.name for param in home.decoder.params if param.trained and not param.is_adapter}
    assert own == ({TABLE} if tied else {TABLE, HEAD})
    home.export(tmp_path / "out")
    tensors = load_file(tmp_path / "out" / ADAPTER_NAME)
    table = home.store.param(TABLE, TensorKind.HI)
    assert torch.equal(tensors[f"base_model.model.{TABLE}"], table)
    head = table if tied else home.store.param(HEAD, TensorKind.HI)
    assert torch.equal(tensors[f"base_model.model.{HEAD}"], head)
    config = json.loads((tmp_path / "out" / ADAPTER_CONFIG_NAME).read_text())
    assert config["ensure_weight_tying"] is tied
    assert config["modules_to_save"] == [*([] if tied else ["lm_head"]), "model.embed_tokens"]
    alone = read_model_folder(tmp_path / "out").load_adapters(KINDS)
    alone.export(tmp_path / "again")
    for name in (ADAPTER_CONFIG_NAME, ADAPTER_NAME):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    whole = load_model(tmp_path / "out", dtype="fp32")
    whole.export(tmp_path / "merged", merge=True)
    assert torch.equal(
        load_model(tmp_path / "merged").store.param(TABLE, TensorKind.HI), table.bfloat16()
    )


def test_tied_tables_that_were_trained_apart_are_refused(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama", torch.float32, tie_word_embeddings=True)
    load_model(base, lora=LORA).export(tmp_path / "out")
    path = tmp_path / "out" / ADAPTER_CONFIG_NAME
    apart = {"ensure_weight_tying": False, "modules_to_save": ["embed_tokens", "lm_head"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | apart))
    with pytest.raises(WeightsMismatch, match=r"lm_head\.weight was trained apart from the table"):
        load_model(tmp_path / "out")


def test_tables_with_rows_of_new_tokens_are_read_over_a_base_without(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama", torch.float32)
    rows = tiny_config("llama").vocab_size
    growth = Growth(num_tokens=rows, new_ids=(rows, rows + 1), files={})
    model = read_model_folder(base, dtype="fp32", growth=growth, lora=LORA)
    home = _changed(model.load(KINDS))
    home.export(tmp_path / "out")
    again = load_model(tmp_path / "out", dtype="fp32", kinds=KINDS)
    for name in (TABLE, HEAD):
        assert again.store.param(name, TensorKind.HI).shape[0] == rows + 2
        assert torch.equal(
            again.store.param(name, TensorKind.HI), home.store.param(name, TensorKind.HI)
        )
    with pytest.raises(ConfigError, match=r"model\.add_tokens gives lm_head.weight new rows"):
        read_model_folder(
            base, growth=growth, lora=LoraConfig(rank=2, alpha=4, modules_to_save=("embed_tokens",))
        )


def test_a_step_moves_what_is_saved_and_nothing_else(tmp_path: Path) -> None:
    home = load_model(save_tiny(tmp_path, "llama", torch.float32), dtype="fp32", lora=LORA)
    before = {p.name: home.store.param(p.name, TensorKind.HI).clone() for p in home.decoder.params}
    with Engine(home.decoder, home.store, optimizer=AdamW(learning_rate=1e-2)) as engine:
        engine.step(make_batch([(2, 24)]))
        engine.synchronize()
    moved = {
        n for n, old in before.items() if not torch.equal(home.store.param(n, TensorKind.HI), old)
    }
    trained = {param.name for param in home.decoder.params if param.trained}
    assert moved <= trained
    assert {TABLE, HEAD} <= moved


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("wte", r"lora\.modules_to_save: wte matches no module .*model\.embed_tokens"),
        ("q_proj", r"q_proj has model\.layers\.0\.self_attn\.q_proj\.weight, which has an adapter"),
    ],
)
def test_what_cannot_be_trained_whole_is_named(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_decoder(
            tiny_config("llama"), "bf16", lora=LoraConfig(rank=2, alpha=4, modules_to_save=(name,))
        )

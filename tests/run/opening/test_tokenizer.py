"""New special tokens reach the data, the model and what a run leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain.cli.demo import byte_tokenizer
from megatrain.errors import CheckpointMismatch, ConfigError, Interrupted
from megatrain.memory.kinds import TensorKind
from megatrain.run.opening.model import add_tokens
from megatrain.run.opening.training_data import TrainingData
from megatrain.run.trainer import Trainer
from testkit.runs import Setting, config_of, differences, run, write_world

TOKENS = ["<call>", "</call>"]
TABLES = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows whose answers have the new tokens in them."""
    folder = tmp_path_factory.mktemp("world")
    write_world(folder)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    for row in rows:
        row["messages"][1]["content"] = f"<call>{row['messages'][1]['content']}</call>"
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))


def config_with(world: Path, folder: Path, tokens: list[str], **changes: Any) -> Any:
    changes["model"] = {"add_tokens": tokens} | changes.get("model", {})
    return config_of(world, folder, Setting(), **changes)


@pytest.mark.merge
def test_a_run_trains_and_exports_them(world: Path, tmp_path: Path) -> None:
    with Trainer(config_with(world, tmp_path / "run", TOKENS)) as trainer:
        num_old = len(byte_tokenizer())
        ids = [num_old, num_old + 1]
        assert [trainer.tokenizer.encode(t, add_special_tokens=False) for t in TOKENS] == [
            [number] for number in ids
        ]
        first = {name: trainer.home.store.master(name) for name in TABLES}
        assert isinstance(trainer.data, TrainingData)
        seen = torch.cat([m.input_ids.flatten() for m in trainer.data.next_batch()])
        assert {int(number) for number in seen} >= set(ids)
        assert any("new tokens: <call> " in note for note in trainer.notes)
        trainer.train()
        trainer.save_model(tmp_path / "out")
        last = {name: trainer.home.store.param(name, TensorKind.HI).clone() for name in TABLES}
        masters = {name: trainer.home.store.master(name) for name in TABLES}
    for name in TABLES:
        mean = first[name][:num_old].double().mean(0).float()
        assert torch.allclose(first[name][ids[0]], mean, rtol=1e-6, atol=1e-9)
        assert not torch.equal(masters[name][ids[0]], first[name][ids[0]])
        assert not torch.equal(masters[name][ids[0]], masters[name][ids[1]])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.get_parameter(TABLES[0]), last[TABLES[0]])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert [tokenizer.encode(t, add_special_tokens=False) for t in TOKENS] == [[n] for n in ids]
    assert tokenizer.decode(tokenizer.encode("5<call>6"), skip_special_tokens=True) == "56"
    assert tokenizer.chat_template


@pytest.mark.merge
def test_a_run_with_new_tokens_resumes_to_the_bit(world: Path, tmp_path: Path) -> None:
    whole = run(config_with(world, tmp_path / "whole", TOKENS))
    assert whole is not None
    config = config_with(world, tmp_path / "stopped", TOKENS)
    with pytest.raises(Interrupted):
        run(config, stop=4)
    ended = run(config, resume=True)
    assert differences(world, ended, tmp_path / "stopped", (whole, tmp_path / "whole")) == []
    with pytest.raises(CheckpointMismatch, match=r"model\.add_tokens"):
        run(config_with(world, tmp_path / "stopped", [*TOKENS, "<more>"]), resume=True)


def test_a_frozen_embedding_is_a_conflict(world: Path, tmp_path: Path) -> None:
    changes = {"model": {"frozen": ["model.embed_tokens.*"]}}
    with pytest.raises(ConfigError, match=r"model\.add_tokens gives model\.embed_tokens\.weight"):
        Trainer(config_with(world, tmp_path / "run", TOKENS, **changes))


def test_a_token_that_is_there_already_is_kept_and_reported() -> None:
    tokenizer = byte_tokenizer()
    end, size = tokenizer.eos_token, len(tokenizer)
    growth, notes = add_tokens(tokenizer, [end, "<new>", "<new>"])
    assert notes == [
        f"model.add_tokens: {end} already is token {tokenizer.eos_token_id}",
        f"new tokens: <new> {size}",
    ]
    assert growth is not None
    assert (growth.num_tokens, growth.new_ids) == (size, (size,))
    assert add_tokens(tokenizer, [end])[0] is None
    assert add_tokens(tokenizer, []) == (None, [])

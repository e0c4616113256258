"""What is said of the data before the first step, and what is refused before the model is read."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, GPT2Config

from megatrain.cli.demo import byte_tokenizer
from megatrain.cli.verbs import look_at_data
from megatrain.disk.hf import model as hf
from megatrain.errors import DataError
from megatrain.run.trainer import Trainer
from testkit.runs import Setting, config_of


@pytest.fixture(autouse=True)
def _one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})


def _rows(path: Path, lengths: list[int]) -> str:
    rows = [{"prompt": f"{number}", "completion": "x" * n} for number, n in enumerate(lengths)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _lines(world: Path, run: Path, **changes: Any) -> list[str]:
    with Trainer(config_of(world, run, Setting(), **changes), dry_run=True) as trainer:
        *notes, samples = trainer.notes
        lines = trainer.startup_lines(verbose=False)
    assert samples.startswith("samples: ")
    (data,) = (line for line in lines if line.startswith("data: "))
    return [data, *notes]


def test_a_run_says_what_its_data_holds(world: Path, tmp_path: Path) -> None:
    path = _rows(tmp_path / "a.jsonl", [5] * 90 + [900] * 10)
    lines = _lines(world, tmp_path / "run", data={"train": path}, train={"steps": 2})
    epoch, *card = lines
    assert epoch.startswith(f"data: {path}, 100 rows, 10 dropped; an epoch: 81 rows in ")
    assert epoch.endswith(" steps; 9 rows to evaluate on")
    card = card[card.index(f"{path}: detected: prompt / completion") :]
    assert card[1].startswith("  100 rows read, 90 kept, 10 dropped, 90 documents")
    assert "of them trained; lengths 5% " in card[2]
    assert card[3].startswith("  dropped: 10 x longer than max_length: a.jsonl:91 (")


def test_shares_of_a_mixture_are_said(world: Path, tmp_path: Path) -> None:
    first = _rows(tmp_path / "a.jsonl", [5] * 40)
    second = _rows(tmp_path / "b.jsonl", [5] * 10)
    train = [first, {"path": second, "weight": 2.5}]
    changes = {"data": {"train": train, "eval": None}, "eval": {"samples": 0}}
    rows = {"batch_tokens": None, "batch_rows": 8}
    lines = _lines(world, tmp_path / "run", train=rows, **changes)
    assert f"{first} 40 rows x 1, {second} 10 rows x 2.5: 65 rows an epoch" in lines
    assert lines[0] == "data: 2 sources, 50 rows; an epoch: 65 rows in 9 steps"


def _refuse_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: Any, **settings: Any) -> Any:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(hf.ModelFolder, "load", load)


def test_losing_most_rows_is_refused_before_the_model_is_read(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse_to_load(monkeypatch)
    path = _rows(tmp_path / "a.jsonl", [5] * 5 + [900] * 95)
    with pytest.raises(DataError, match=r"95 of 100 rows .*data\.max_dropped allows 20 %"):
        _lines(world, tmp_path / "run", data={"train": path})


def test_bad_rows_are_refused_by_their_key(world: Path, tmp_path: Path) -> None:
    path = Path(_rows(tmp_path / "a.jsonl", [5] * 50))
    path.write_text(path.read_text() + "broken\n")
    with pytest.raises(DataError, match=r"1 of 51 rows .*data\.max_bad allows 1 %"):
        _lines(world, tmp_path / "run", data={"train": str(path)})
    changes = {"train": str(path), "max_bad": 0.02}
    assert "51 rows, 1 bad; " in _lines(world, tmp_path / "run", data=changes)[0]


def test_rows_beyond_learned_positions_are_refused_before_the_model_is_read(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse_to_load(monkeypatch)
    config = GPT2Config(
        vocab_size=len(byte_tokenizer()), n_embd=32, n_layer=2, n_head=2, n_positions=32,
        bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "gpt2")
    byte_tokenizer().save_pretrained(tmp_path / "gpt2")
    path = _rows(tmp_path / "a.jsonl", [5] * 20 + [40])
    changes = {"model": {"name_or_path": str(tmp_path / "gpt2")}, "data": {"train": path}}
    with pytest.raises(DataError, match=r"1 of 21 documents are longer than the 32 positions"):
        _lines(world, tmp_path / "run", **changes)


@pytest.mark.parametrize(("lengths", "refused"), [([5] * 20, False), ([5] * 5 + [900] * 95, True)])
def test_looking_at_data_says_what_train_would_do(
    world: Path, tmp_path: Path, capsys: Any, lengths: list[int], refused: bool
) -> None:
    path = _rows(tmp_path / "a.jsonl", lengths)
    refusal = pytest.raises(DataError, match=r"data\.max_dropped allows 20 %")
    with refusal if refused else nullcontext():
        look_at_data(Path(path), world / "model-0.0", 64, 1)
    assert f"{len(lengths)} rows read" in capsys.readouterr().out

"""An exported model is the model that was judged: the same logits, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain.batch import MicroBatch
from megatrain.cli.demo import write_demo
from megatrain.cli.exporting import export_model
from megatrain.config import load_config
from megatrain.disk.hf.model import load_model
from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError, RunFolderError
from megatrain.memory.kinds import TensorKind
from megatrain.run.run_model import chosen_model
from megatrain.run.trainer import Trainer

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ROWS = ([5, 60, 70, 80, 9], [33, 34], [100] * 17)


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> Path:
    """A run of two steps."""
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    small = ["train.batch_tokens=512", "train.micro_batch_tokens=256", "eval.samples=0"]
    path = write_demo(tmp_path / "demo", num_steps=2)
    with Trainer(load_config(path, [*small, f"model.dtype={dtype}"])) as trainer:
        trainer.train()
        trainer.save_model(trainer.folder.path / "model")
    return trainer.folder.path


def streamed(run: Path, dtype: str) -> list[Tensor]:
    """The logits behind each row, by the engine that `megatrain eval` uses."""
    assert dtype in ("bf16", "fp32")
    folder = chosen_model(run).folder
    home = load_model(folder, dtype=dtype, kinds=(TensorKind.HI,))  # type: ignore[arg-type]
    with Engine(home.decoder, home.store) as engine:
        return [engine.next_token_logits([_micro(row)])[0][0] for row in ROWS]


def exported(folder: Path, dtype: str, *, flip: bool = False) -> list[Tensor]:
    """The same by transformers; `flip` changes the lowest bit of one weight."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval()
    if flip:
        whole = torch.int16 if dtype == "bf16" else torch.int32
        weight = model.lm_head.weight.data[0].view(whole)
        weight[0] ^= 1 << 4  # the lowest may drown in the sum's rounding
    with torch.no_grad():
        return [model(_micro(row).input_ids, logits_to_keep=1).logits[0, 0].float() for row in ROWS]


def _micro(row: list[int]) -> MicroBatch:
    ids = torch.tensor([row])
    return MicroBatch(input_ids=ids, labels=ids)


def test_an_export_has_the_logits_of_the_run(run: Path, tmp_path: Path, dtype: str) -> None:
    said = export_model(run, tmp_path / "out")
    assert said.endswith(f"of step 2 in {tmp_path / 'out'}, {dtype}; from_pretrained loads it")
    ours = streamed(run, dtype)
    for row, (mine, theirs) in enumerate(zip(ours, exported(tmp_path / "out", dtype), strict=True)):
        assert torch.equal(mine, theirs), row
    nudged = exported(tmp_path / "out", dtype, flip=True)
    assert not all(map(torch.equal, ours, nudged)), "one bit of one weight must be noticed"
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def trained(tmp_path: Path, *changes: str) -> tuple[Path, dict[str, Tensor]]:
    """A run of three steps, and its masters."""
    small = ["train.batch_tokens=512", "train.micro_batch_tokens=256", "eval.samples=0"]
    small.append("model.dtype=bf16")
    path = write_demo(tmp_path / "demo", num_steps=3)
    with Trainer(load_config(path, [*small, *changes])) as trainer:
        trainer.train()
        trainer.save_model(trainer.folder.path / "model")
        masters = {p.name: trainer.home.store.master(p.name) for p in trainer.home.decoder.params}
    return trainer.folder.path, masters


def weights_of(folder: Path) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype is torch.float32, "config.json says what the files have"
    return dict(model.named_parameters())


@pytest.mark.few(1)
@pytest.mark.parametrize("changes", [(), ("model.frozen=model.embed_tokens.*",)])
def test_fp32_is_every_bit_of_the_masters(
    tmp_path: Path, changes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    run, masters = trained(tmp_path, *changes)
    said = export_model(run, tmp_path / "out", dtype="fp32")
    assert "of step 3 in" in said
    assert said.endswith("fp32; from_pretrained loads it")
    found = weights_of(tmp_path / "out")
    assert found.keys() == masters.keys()
    assert [name for name in masters if not torch.equal(found[name], masters[name])] == []
    rounded = [m for m in masters.values() if torch.equal(m.bfloat16().float(), m)]
    assert len(rounded) < len(masters) / 2, "bf16 would not have been enough"
    export_model(run / "last", tmp_path / "last", dtype="fp32")
    assert torch.equal(weights_of(tmp_path / "last")["lm_head.weight"], found["lm_head.weight"])


def test_a_folder_of_bf16_has_no_masters_and_is_widened(tmp_path: Path) -> None:
    write_demo(tmp_path / "demo", num_steps=1)
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "demo" / "model")
    made.bfloat16().save_pretrained(tmp_path / "model")
    said = export_model(tmp_path / "model", tmp_path / "out", dtype="fp32")
    assert "converted from bf16, as the folder has no masters, in" in said
    for name, weight in weights_of(tmp_path / "out").items():
        assert torch.equal(weight, made.get_parameter(name).float())


def test_masters_that_are_gone_are_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    run, _ = trained(tmp_path)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(RunFolderError, match="no checkpoint of the run has the masters of step 3"):
        export_model(run, tmp_path / "out", dtype="fp32")
    assert export_model(run, tmp_path / "out", dtype="bf16").endswith(
        "bf16; from_pretrained loads it"
    )


def test_a_folder_with_something_in_it_is_not_written_to(tmp_path: Path) -> None:
    write_demo(tmp_path / "demo", num_steps=2)
    for target in (tmp_path / "demo", tmp_path / "demo" / "rows.jsonl"):
        with pytest.raises(ConfigError, match="exists and is not empty"):
            export_model(tmp_path / "demo" / "model", target)
    assert "params in" in export_model(tmp_path / "demo" / "model", tmp_path / "new" / "out")

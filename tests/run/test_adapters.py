"""Runs that train adapters: saved without their base, resumed, exported, merged, continued."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatrain.cli.exporting import export_model
from megatrain.cli.verbs import evaluate_model, sample_from
from megatrain.disk.checkpoint.retention import finished
from megatrain.disk.hf.model import load_model
from megatrain.errors import CheckpointMismatch, ConfigError, Interrupted
from megatrain.model_files import ADAPTER_NAME, SINGLE_NAME
from megatrain.run.folder import FOLDER
from megatrain.run.run_model import tokenizer_folder
from megatrain.run.trainer import Trainer
from testkit.runs import Setting, State, config_of, differences, run, state_of

pytestmark = pytest.mark.usefixtures("cache_in_world")

LORA: dict[str, Any] = {"rank": 4, "alpha": 6, "dropout": 0.1, "targets": ["q_proj", "*.mlp.*"]}
SETTING = Setting(dtype="bf16", save_every=2, keep=9, eval_every=None)
MODULE = "model.layers.1.mlp.up_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A run with adapters that was never stopped."""

    path: Path
    state: State
    masters: dict[str, Tensor]
    """Of the adapters."""

    def saved(self, step: int) -> Path:
        (found,) = (path for path in finished(self.path / FOLDER) if f"-{step:08}-" in path.name)
        return found


@pytest.fixture(scope="module")
def ended(world: Path, cache_in_world: None) -> Ended:
    path = world / "adapted"
    with Trainer(config_of(world, path, SETTING, lora=LORA)) as trainer:
        trainer.train()
        trainer.save_model(path / "model")
        store, params = trainer.home.store, trainer.home.decoder.params
        masters = {p.name: store.master(p.name).clone() for p in params if p.is_adapter}
        return Ended(path=path, state=state_of(trainer), masters=masters)


def copied(ended: Ended, path: Path, *, until: int) -> Path:
    """A run folder as a death after step `until` leaves it."""
    shutil.copytree(ended.path, path, symlinks=True)
    for checkpoint in finished(path / FOLDER):
        if int(checkpoint.name.split("-")[1]) > until:
            shutil.rmtree(checkpoint)
    return path


def adapters_in(folder: Path) -> dict[str, Tensor]:
    names = load_file(folder / ADAPTER_NAME)
    return {
        n.removeprefix("base_model.model.").removesuffix(".weight"): t for n, t in names.items()
    }


@pytest.mark.merge
def test_a_resumed_run_ends_in_the_bits_of_one_that_was_not(
    world: Path, tmp_path: Path, ended: Ended
) -> None:
    config = config_of(world, tmp_path / "stopped", SETTING, lora=LORA)
    with pytest.raises(Interrupted):
        run(config, stop=3)
    again = run(config, resume=True)
    assert differences(world, again, tmp_path / "stopped", (ended.state, ended.path)) == []


def test_a_checkpoint_has_adapters_and_their_states_alone(ended: Ended) -> None:
    checkpoint = ended.saved(4)
    names = {
        name
        for path in checkpoint.rglob("*.safetensors")
        for name in load_file(path)
    }  # fmt: skip
    assert names
    assert all("lora_" in name for name in names), names
    assert not any(path.name.startswith("model-") for path in (checkpoint / "model").iterdir())


def test_a_base_that_has_changed_is_refused(world: Path, tmp_path: Path, ended: Ended) -> None:
    path = copied(ended, tmp_path / "run", until=4)
    moved = tmp_path / "moved"
    shutil.copytree(world / "model-0.0", moved)
    config = config_of(world, path, SETTING, lora=LORA, model={"name_or_path": str(moved)})
    with Trainer(config) as trainer:  # the same model in another place
        assert trainer.state.global_step == 4
    shutil.copy(world / "model-0.1" / SINGLE_NAME, moved / SINGLE_NAME)
    weights = bytearray((moved / SINGLE_NAME).read_bytes())
    weights[-3] ^= 1
    (moved / SINGLE_NAME).write_bytes(weights)
    with pytest.raises(CheckpointMismatch, match="another model: its config or its weights differ"):
        Trainer(config)
    given = world / "model-0.0" / SINGLE_NAME  # under the name that the run knows
    before = given.read_bytes()
    try:
        given.write_bytes(weights)
        with pytest.raises(CheckpointMismatch, match="has changed since the run began"):
            Trainer(config_of(world, path, SETTING, lora=LORA))
    finally:
        given.write_bytes(before)


def test_exported_adapters_have_every_bit_of_the_masters(ended: Ended, tmp_path: Path) -> None:
    (tmp_path / "of-export").mkdir()
    said = export_model(ended.path, tmp_path / "of-export")
    assert said.endswith(f"of step 9 in {tmp_path / 'of-export'}; PEFT loads it")
    export_model(ended.saved(9), tmp_path / "of-checkpoint")
    for folder in (ended.path / "model", tmp_path / "of-export", tmp_path / "of-checkpoint"):
        found = adapters_in(folder)
        assert found.keys() == ended.masters.keys()
        assert [n for n in found if not torch.equal(found[n], ended.masters[n])] == [], folder
    rounded = [m for m in ended.masters.values() if torch.equal(m.bfloat16().float(), m)]
    assert not rounded, "bf16 would not have been enough"
    with pytest.raises(ConfigError, match="adapters are always written in fp32"):
        export_model(ended.path, tmp_path / "other", dtype="bf16")


@pytest.mark.parametrize("dtype", [None, "fp32"])
@pytest.mark.parametrize("step", [9, None])
def test_a_merged_export_is_base_plus_product(
    world: Path, ended: Ended, tmp_path: Path, dtype: Any, step: int | None
) -> None:
    source = ended.path if step is None else ended.saved(step)
    said = export_model(source, tmp_path / "merged", dtype=dtype, merge=True)
    assert said.endswith(f"in {tmp_path / 'merged'}, {dtype or 'bf16'}; from_pretrained loads it")
    merged, base = (
        load_file(tmp_path / "merged" / SINGLE_NAME),
        load_file(world / "model-0.0" / SINGLE_NAME),
    )
    assert merged.keys() == base.keys()
    for name, weight in base.items():
        expected = weight.bfloat16()
        expected = expected if dtype is None else expected.float()
        module = name.removesuffix(".weight")
        if f"{module}.lora_A" in ended.masters:
            low, wide = (ended.masters[f"{module}.lora_{x}"] for x in "AB")
            expected += (wide @ low) * 1.5
            assert not torch.equal(merged[name].float(), weight.bfloat16().float())
        assert torch.equal(merged[name], expected), name
    assert not (tmp_path / "merged" / "adapter_config.json").exists()


def test_there_is_nothing_to_merge_in_a_model(world: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no adapters\. Export it without --merge"):
        export_model(world / "model-0.0", tmp_path / "out", merge=True)


def test_a_run_a_checkpoint_and_an_export_are_judged_alike(
    world: Path, ended: Ended, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"  # as PEFT saves it: without config.json and tokenizer
    bare.mkdir()
    for name in (ADAPTER_NAME, "adapter_config.json"):
        shutil.copy(ended.path / "model" / name, bare / name)
    rows = world / "rows.jsonl"
    words = [evaluate_model(p, rows, 8) for p in (ended.path, ended.saved(9), bare)]
    base = evaluate_model(world / "model-0.0", rows, 8)
    losses = [float(text.split()[1].rstrip(",")) for text in (*words, base)]
    assert words[0] == words[1]
    # Without a run's config rows are laid out otherwise, which changes the last bits in bf16.
    assert losses[2] == pytest.approx(losses[0], abs=2e-4)
    assert losses[3] != pytest.approx(losses[0], abs=2e-3)
    assert sample_from(bare, ["1 + 2"], 4) == sample_from(ended.path, ["1 + 2"], 4)
    assert tokenizer_folder(bare) == (world / "model-0.0").resolve()
    assert tokenizer_folder(ended.path) == ended.path / "model"


def test_a_run_continues_with_the_adapters_of_a_folder(
    world: Path, ended: Ended, tmp_path: Path
) -> None:
    given = {"path": str(ended.path / "model")}
    config = config_of(world, tmp_path / "next", SETTING, lora=given, train={"steps": 2})
    with Trainer(config) as trainer:
        for name, master in ended.masters.items():
            assert torch.equal(trainer.home.store.master(name), master), name
        adapters = trainer.home.decoder.adapters
        assert adapters is not None
        assert (adapters.lora.rank, adapters.lora.alpha, adapters.lora.dropout) == (4, 6, 0)
        trainer.train()
        assert not torch.equal(
            trainer.home.store.master(f"{MODULE}.lora_B"), ended.masters[f"{MODULE}.lora_B"]
        )
    moved = config_of(world, tmp_path / "next", SETTING, lora={**given, "dropout": 0.5})
    with pytest.raises(CheckpointMismatch, match=r"lora\.dropout: 0\.0 -> 0\.5"):
        Trainer(moved)


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        ({"rank": 8}, r"lora\.rank is 8, but the adapters in .* have 4"),
        ({"alpha": 4}, r"lora\.alpha is 4.*have 6"),
        ({"rslora": True}, r"lora\.rslora is True.*have False"),
        ({"targets": ["q_proj"]}, r"lora\.targets is given and lora\.path is"),
    ],
)
def test_what_contradicts_a_folder_is_refused(
    world: Path, ended: Ended, tmp_path: Path, lora: dict[str, Any], says: str
) -> None:
    given = {"path": str(ended.path / "model"), **lora}
    with pytest.raises(ConfigError, match=says):
        Trainer(config_of(world, tmp_path / "run", SETTING, lora=given))


def test_adapters_are_not_taken_for_a_model_to_train(
    world: Path, ended: Ended, tmp_path: Path
) -> None:
    model = {"name_or_path": str(ended.path / "model")}
    with pytest.raises(ConfigError, match=r"a folder of adapters\..*set lora\.path to it"):
        Trainer(config_of(world, tmp_path / "run", SETTING, model=model))
    assert load_model(ended.path / "model").decoder.adapters is not None

"""Two real ranks, each with its own files: they train together only if nothing differs."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatrain.cli.exporting import export_model
from megatrain.config import Config
from megatrain.errors import ConfigError
from megatrain.model_files import ADAPTER_CONFIG_NAME, ADAPTER_NAME, SINGLE_NAME
from megatrain.optim.native import LIBRARY
from megatrain.ranks.ranks import Ranks
from megatrain.run import this_rank
from megatrain.run.trainer import Trainer
from testkit.rank_processes import rank_outcomes
from testkit.runs import Setting, config_of

pytestmark = pytest.mark.usefixtures("cache_in_world")

SETTING = Setting(save_every=None, eval_every=None)
RELATIVE = {
    "model": {"name_or_path": "model"},
    "data": {"train": "rows.jsonl", "eval": "judged.jsonl"},
}


@pytest.fixture(scope="module")
def home(world: Path, cache_in_world: None) -> Path:
    """The files of one host: a model, adapters for it, rows to train and to evaluate on."""
    home = world / "home"
    shutil.copytree(world / "model-0.0", home / "model")
    rows = (world / "rows.jsonl").read_text().splitlines(keepends=True)
    (home / "rows.jsonl").write_text("".join(rows[:50]))
    (home / "judged.jsonl").write_text("".join(rows[50:]))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        config = config_of(world, world / "adapted", SETTING, **RELATIVE, lora={"rank": 2})
        with Trainer(config) as trainer:
            trainer.save_model(home / "adapters")
    return home


def opened(ranks: Ranks, config: Config, homes: list[Path], package: Path, library: Path) -> str:
    """Open a run as a rank of the host with this rank's files; return its refusal, if any."""
    rank = ranks.owner.rank
    os.chdir(homes[rank])
    if rank == 1:
        vars(this_rank).update(PACKAGE=package, LIBRARY=library)
    try:
        with Trainer(config, ranks=ranks, dry_run=True):
            return "opened"
    except ConfigError as error:
        return str(error)


def results(
    world: Path,
    homes: list[Path],
    *,
    package: Path = this_rank.PACKAGE,
    library: Path = LIBRARY,
    **changes: dict[str, object],
) -> list[str]:
    config = config_of(world, world / "run", SETTING, **{**RELATIVE, **changes})
    found = rank_outcomes(2, opened, config, homes, package, library)
    assert [outcome.exit_code for outcome in found] == [0, 0], [o.trace for o in found]
    return [outcome.result for outcome in found]


def other_home(home: Path, path: Path, change: Callable[[Path], None]) -> list[Path]:
    """Return the host of rank 0, and a copy for rank 1 with one thing changed."""
    shutil.copytree(home, path)
    change(path)
    return [home, path]


def train_one_tensor(folder: Path, file: str, name: str) -> None:
    """Change a tensor as one step of training would: every element, and a little."""
    tensors = load_file(folder / file)
    (found,) = [key for key in tensors if name in key]
    tensors[found] = tensors[found] + torch.rand_like(tensors[found]) * 1e-2
    save_file(tensors, folder / file, metadata={"format": "pt"})


def test_ranks_with_the_same_files_open_the_run(world: Path, home: Path, tmp_path: Path) -> None:
    """The sibling of all refusals: two folders, equal bytes, other times and file names beside."""

    def touch(other: Path) -> None:
        (other / "model" / "notes.safetensors.bak").write_text("no reader loads it")
        os.utime(other / "model" / SINGLE_NAME, (0, 0))

    homes = other_home(home, tmp_path / "other", touch)
    assert results(world, homes, lora={"path": "adapters"}) == ["opened", "opened"]


def test_another_model_is_refused(world: Path, home: Path, tmp_path: Path) -> None:
    def change(other: Path) -> None:
        train_one_tensor(other / "model", SINGLE_NAME, "layers.0.self_attn.v_proj")

    first, second = results(world, other_home(home, tmp_path / "other", change))
    assert first == second
    said = r"\n  model\.name_or_path \(model\): \"mark \w{32}\" on rank 0; \"mark \w{32}\" on rank"
    assert re.search(said, first)
    assert first.count(" on rank ") == 2, "nothing else differs"
    assert not (world / "run").exists(), "refused before anything is written"


@pytest.mark.parametrize("what", ["weights", "alpha"])
def test_other_adapters_are_refused(world: Path, home: Path, tmp_path: Path, what: str) -> None:
    def change(other: Path) -> None:
        folder = other / "adapters"
        if what == "weights":
            train_one_tensor(folder, ADAPTER_NAME, "layers.1.mlp.up_proj.lora_A")
            return
        fields = json.loads((folder / ADAPTER_CONFIG_NAME).read_text())
        fields["lora_alpha"] += 1
        (folder / ADAPTER_CONFIG_NAME).write_text(json.dumps(fields))

    homes = other_home(home, tmp_path / "other", change)
    first, second = results(world, homes, lora={"path": "adapters"})
    assert first == second
    assert '\n  lora.path (adapters): "mark ' in first
    assert first.count(" on rank ") == 2


def test_other_code_is_refused(world: Path, home: Path, tmp_path: Path) -> None:
    copy = tmp_path / "megatrain"
    shutil.copytree(this_rank.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert this_rank.code_digest.__wrapped__(copy) == this_rank.code_digest(this_rank.PACKAGE)
    with (copy / "optim" / "learning_rate.py").open("a") as file:
        file.write("\n# another rate\n")
    first, second = results(world, [home, home], package=copy)
    assert first == second
    assert re.search(r'\n  code of megatrain: "\w{32}" on rank 0; "\w{32}" on rank 1\n', first)


def test_another_kernel_is_refused(world: Path, home: Path, tmp_path: Path) -> None:
    library = tmp_path / "libkernel.so"
    library.write_bytes(LIBRARY.read_bytes() + b"\0")
    first, second = results(world, [home, home], library=library)
    assert first == second
    assert '\n  kernel: "native, libkernel.so ' in first
    assert 'on rank 0; "native, libkernel.so' in first


def test_other_rows_to_evaluate_on_are_refused(world: Path, home: Path, tmp_path: Path) -> None:
    def shorten(other: Path) -> None:
        rows = (other / "judged.jsonl").read_text().splitlines(keepends=True)
        (other / "judged.jsonl").write_text("".join(rows[:-2]))

    first, second = results(world, other_home(home, tmp_path / "other", shorten))
    assert first == second
    assert '\n  data.eval (its rows): "' in first
    assert "data.train" not in first


def test_other_ends_of_texts_are_refused(world: Path, home: Path, tmp_path: Path) -> None:
    """Weights and rows are the same, but rank 1 would draw past the end of its texts."""

    def change(other: Path) -> None:
        path = other / "model" / "generation_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 5}))

    first, second = results(world, other_home(home, tmp_path / "other", change))
    assert first == second
    assert "\n  tokens that end a text: [1, 1] on rank 0; [1, 5, 1] on rank 1\n" in first
    assert first.count(" on rank ") == 2


def exported(ranks: Ranks, homes: list[Path], target: Path) -> str:
    """Export the model of this rank's host, as one of two; return the refusal, if any."""
    os.chdir(homes[ranks.owner.rank])
    try:
        return export_model(Path("model"), target, ranks=ranks)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("differs", [False, True])
def test_a_command_on_ranks_with_another_model_is_refused(
    home: Path, tmp_path: Path, differs: bool
) -> None:
    def change(other: Path) -> None:
        if differs:
            train_one_tensor(other / "model", SINGLE_NAME, "layers.0.self_attn.v_proj")

    homes = other_home(home, tmp_path / "other", change)
    first, second = (o.result for o in rank_outcomes(2, exported, homes, tmp_path / "out"))
    assert first == second
    assert (tmp_path / "out").exists() is not differs
    assert ("\n  model (model): " in first) is differs

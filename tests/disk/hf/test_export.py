"""Exports are whole at every instant, also over their own source."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain import files, load_model
from megatrain.disk.hf.model import HostModel
from megatrain.errors import DiskError
from megatrain.memory.kinds import TensorKind
from testkit.families import save_tiny
from testkit.faulty_os import faulty

SHARDED, SINGLE = 150_000, 1 << 40


@pytest.fixture
def model(tmp_path: Path) -> HostModel:
    return load_model(save_tiny(tmp_path / "source"))


def _change(model: HostModel) -> None:
    for name in model.store.layout.places:
        model.store.param(name, TensorKind.HI).mul_(2)


def _version(folder: Path) -> str:
    """Return which version of the weights a reader of `folder` gets: whole old, new, or neither."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    old = load_model(folder.parent / "source").store
    ratios = {
        name: (
            plain[name].float().abs().sum() / old.param(name, TensorKind.HI).float().abs().sum()
        ).item()
        for name in old.layout.places
    }
    if all(ratio == 1 for ratio in ratios.values()):
        return "old"
    return "new" if all(abs(ratio - 2) < 1e-6 for ratio in ratios.values()) else "mixed"


@pytest.mark.parametrize("first", [SHARDED, SINGLE])
@pytest.mark.parametrize("second", [SHARDED, SINGLE])
def test_over_an_existing_export(model: HostModel, first: int, second: int, tmp_path: Path) -> None:
    target = tmp_path / "target"
    model.export(target, shard_bytes=first)
    assert _version(target) == "old"
    _change(model)
    model.export(target, shard_bytes=second)
    assert _version(target) == "new"
    weights = [p.name for p in target.glob("*.safetensors")]
    assert (weights == ["model.safetensors"]) == (second == SINGLE)
    assert (target / "model.safetensors.index.json").exists() == (second == SHARDED)
    assert not list(target.glob(".*"))


@pytest.mark.few(1)
@pytest.mark.parametrize("first", [SHARDED, SINGLE])
@pytest.mark.parametrize("second", [SHARDED, SINGLE])
def test_a_failure_at_any_call_leaves_old_or_new(
    model: HostModel, first: int, second: int, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    model.export(target, shard_bytes=first)
    _change(model)
    seen = []
    for fail_at in range(200):
        failed = False
        with faulty(fail_at=fail_at):
            try:
                model.export(target, shard_bytes=second)
            except DiskError:
                failed = True
        if fail_at % 5 == 0 or not failed:  # reading it back takes most of the time
            seen.append(_version(target))
            assert seen[-1] in ("old", "new")
        if not failed:
            break
    assert seen[0] == "old"
    assert seen[-1] == "new"
    assert fail_at > 10


def test_a_direct_overwrite_would_be_noticed(model: HostModel, tmp_path: Path) -> None:
    target = tmp_path / "target"
    model.export(target, shard_bytes=SHARDED)
    _change(model)
    model.export(tmp_path / "other", shard_bytes=SHARDED)
    shard = sorted(target.glob("*.safetensors"))[0]
    shard.write_bytes((tmp_path / "other" / shard.name).read_bytes())
    assert _version(target) == "mixed"


def test_over_its_own_source(model: HostModel, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "README.md").write_text("mine")
    before = model.store.param("model.norm.weight", TensorKind.HI).clone()
    model.export(source)
    assert torch.equal(load_model(source).store.param("model.norm.weight", TensorKind.HI), before)
    assert (source / "README.md").read_text() == "mine"


def test_a_link_to_an_empty_folder_stays_and_the_folder_is_filled(
    model: HostModel, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    model.export(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    found = load_model(tmp_path / "there").store.param("model.norm.weight", TensorKind.HI)
    assert torch.equal(found, model.store.param("model.norm.weight", TensorKind.HI))


def test_what_travels_with_the_weights(tmp_path: Path) -> None:
    """Also when the folder it came from is gone by then."""
    save_tiny(tmp_path / "source")
    carried = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
               "merges.txt", "tokenizer.model", "chat_template.jinja"]  # fmt: skip
    left = ["optimizer.pt", "modeling_evil.py", "README.md", "training_args.bin"]
    for name in carried + left:
        (tmp_path / "source" / name).write_text(name)
    model = load_model(tmp_path / "source")
    shutil.rmtree(tmp_path / "source")
    model.export(tmp_path / "target")
    names = {path.name for path in (tmp_path / "target").iterdir()}
    assert names == {*carried, "config.json", "generation_config.json", "model.safetensors"}


def test_config_keeps_its_keys_and_says_the_dtype_written(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", "llama", torch.float32)
    fields = json.loads((source / "config.json").read_text())
    fields |= {"trained_by": "someone", "torch_dtype": "float32"}
    (source / "config.json").write_text(json.dumps(fields))
    load_model(source, dtype="bf16").export(tmp_path / "target")
    written = json.loads((tmp_path / "target" / "config.json").read_text())
    assert written["trained_by"] == "someone"
    assert written["dtype"] == "bfloat16"
    assert "torch_dtype" not in written


def test_shards_are_at_most_as_large_as_asked(model: HostModel, tmp_path: Path) -> None:
    model.export(tmp_path / "target", shard_bytes=SHARDED)
    shards = sorted((tmp_path / "target").glob("*.safetensors"))
    assert len(shards) > 1
    assert all(path.stat().st_size < SHARDED + 10_000 for path in shards)
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"


def test_without_direct_io(
    model: HostModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_O_DIRECT", 0)
    model.export(tmp_path / "target", shard_bytes=SHARDED)
    assert _version(tmp_path / "target") == "old"

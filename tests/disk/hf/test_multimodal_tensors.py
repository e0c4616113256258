"""What a joint model carries goes from folder to folder, byte for byte, and never to memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMultimodalLM

from megatrain import load_model
from megatrain.disk.checkpoint.parts import checkpoint_parts
from megatrain.disk.checkpoint.restore import restore, verify
from megatrain.disk.checkpoint.save import write_checkpoint
from megatrain.disk.hf.growth import Growth
from megatrain.disk.hf.model import HostModel
from megatrain.engine.engine import Engine
from megatrain.errors import CheckpointCorrupted, ConfigError, DiskError, WeightsMismatch
from megatrain.memory.kinds import TensorKind
from megatrain.optim.adamw import AdamW
from testkit.joint_families import save_tiny_joint
from testkit.joint_training import BATCHES, folder_bytes

FAMILY = "llava_next"
FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file; what is carried has dtypes that the model does not."""
    folder = tmp_path_factory.mktemp("joint") / "source"
    save_tiny_joint(folder, FAMILY)
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    for number, name in enumerate(sorted(name for name in tensors if "vision" in name)):
        tensors[name] = tensors[name].to((torch.float32, torch.float16, torch.bfloat16)[number % 3])
    tensors["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(5)[None]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for name in FILES:
        (folder / name).write_text(json.dumps({"of": name}))
    return folder


@pytest.fixture
def source(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "source"))


def test_exports_have_its_names_dtypes_and_bytes(source: Path, tmp_path: Path) -> None:
    model = load_model(source)
    for number, (shard_bytes, masters) in enumerate([(60_000, False), (1 << 40, True)]):
        export = tmp_path / f"export{number}"
        model.export(export, shard_bytes=shard_bytes, masters=masters)
        found, expected = folder_bytes(export), folder_bytes(source)
        assert found.keys() == expected.keys()
        beside = {tensor.name for tensor in model.beside}
        assert len({expected[name][0] for name in beside}) == 4
        assert {n: found[n] for n in beside} == {n: expected[n] for n in beside}
        for name in FILES:
            assert (export / name).read_bytes() == (source / name).read_bytes()


def test_nothing_of_it_is_in_memory(source: Path) -> None:
    model = load_model(source)
    carried = {param.name for param in model.decoder.carried}
    assert not carried & model.store.layout.places.keys()
    assert all(param.is_meta for param in model.decoder.model.parameters())
    assert all(tensor.values.is_meta for tensor in model.beside)


def test_an_export_over_the_source_leaves_a_model_that_exports_again(
    source: Path, tmp_path: Path
) -> None:
    before = folder_bytes(source)
    model = load_model(source)
    model.export(source, shard_bytes=60_000)
    assert folder_bytes(source).keys() == before.keys()
    model.export(source)
    model.export(tmp_path / "other")
    beside = {tensor.name for tensor in model.beside}
    for folder in (source, tmp_path / "other"):
        found = folder_bytes(folder)
        assert {n: found[n] for n in beside} == {n: before[n] for n in beside}


def test_a_source_that_lost_a_tensor_is_said(source: Path, tmp_path: Path) -> None:
    model = load_model(source)
    (source / "model.safetensors").unlink()
    save_file({"x": torch.zeros(1)}, source / "model.safetensors")
    with pytest.raises(DiskError, match="has changed: it no longer has"):
        model.export(tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_a_tower_that_lacks_a_tensor_is_refused(source: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    name = next(name for name in tensors if "vision" in name and "k_proj.weight" in name)
    del tensors[name]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightsMismatch, match="1 tensors beside the text decoder are missing"):
        load_model(source)


def _saved(model: HostModel, parent: Path) -> Path:
    with Engine(model.decoder, model.store, optimizer=AdamW(learning_rate=1e-2)) as engine:
        engine.step(BATCHES[0])
        engine.synchronize()
        snapshot = engine.snapshot()
        return write_checkpoint(parent, checkpoint_parts(model), snapshot, {})


def test_a_checkpoint_is_a_model_that_the_joint_class_loads(source: Path, tmp_path: Path) -> None:
    model = load_model(source)
    checkpoint = _saved(model, tmp_path / "checkpoints")
    manifest = verify(checkpoint)
    folder, expected = folder_bytes(checkpoint / "model"), folder_bytes(source)
    beside = {tensor.name for tensor in model.beside}
    assert {n: folder[n] for n in beside} == {n: expected[n] for n in beside}
    _, info = AutoModelForMultimodalLM.from_pretrained(
        checkpoint / "model", output_loading_info=True
    )
    assert not any(info.values())

    other = load_model(source)
    restore(checkpoint, manifest, checkpoint_parts(other))
    for param in model.decoder.params:
        assert torch.equal(
            model.store.param(param.name, TensorKind.HI),
            other.store.param(param.name, TensorKind.HI),
        )
    carried = checkpoint_parts(model).carried[0].name
    with (checkpoint / carried).open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    with pytest.raises(CheckpointCorrupted, match="do not match their hash"):
        restore(checkpoint, manifest, checkpoint_parts(other))


def test_its_vocabulary_does_not_grow(source: Path) -> None:
    growth = Growth(num_tokens=320, new_ids=(320,), files={})
    with pytest.raises(ConfigError, match=r"model\.add_tokens: the vocabulary of a joint model"):
        growth.config((source / "config.json").read_bytes())

"""What the marks of a model folder see, and what they do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatrain.disk.hf.source_mark import source_mark, tensor_mark
from megatrain.model_files import INDEX_NAME, SINGLE_NAME
from testkit.runs import write_model

ROWS, WIDTH = 200, 64
"""Of each tensor: 51 KiB in fp32, more than all samples of it together."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with twenty tensors: 1 MiB, and three samples of 64 KiB do not cover it."""
    folder = tmp_path_factory.mktemp("marked") / "model"
    write_model(folder, 0.0)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"layer.{number:02}.weight": torch.randn(ROWS, WIDTH, generator=generator)
        for number in range(20)
    }
    save_file(tensors, folder / SINGLE_NAME, metadata={"format": "pt"})
    return folder


def changed(model: Path, path: Path, name: str, change: torch.Tensor) -> Path:
    shutil.copytree(model, path)
    tensors = load_file(path / SINGLE_NAME)
    tensors[name] = tensors[name] + change
    save_file(tensors, path / SINGLE_NAME, metadata={"format": "pt"})
    return path


def test_every_tensor_that_was_trained_is_seen_where_samples_of_files_miss_some(
    model: Path, tmp_path: Path
) -> None:
    missed = []
    for number in range(20):
        name = f"layer.{number:02}.weight"
        other = changed(model, tmp_path / name, name, torch.full((ROWS, WIDTH), 1e-3))
        assert tensor_mark(other) != tensor_mark(model), name
        if source_mark(other) == source_mark(model):
            missed.append(name)
    assert len(missed) > 10, "or the test shows nothing"


def test_a_copy_in_other_shards_beside_other_files_has_the_same_mark(
    model: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(model, tmp_path / "other"))
    tensors = load_file(other / SINGLE_NAME)
    (other / SINGLE_NAME).unlink()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:7]}
    shards["model-00002-of-00002.safetensors"] = names[7:]
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, other / file, metadata={"format": "pt"})
    weight_map = {name: file for file, held in shards.items() for name in held}
    (other / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    save_file({"x": torch.zeros(3)}, other / "consolidated.safetensors")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"_name_or_path": "elsewhere"}))
    assert tensor_mark(other) == tensor_mark(model)
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 123.0}))
    assert tensor_mark(other) != tensor_mark(model)

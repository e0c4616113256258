"""The command `export` and PEFT: adapters that it would load in part are not written for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatrain.cli.exporting import export_model
from megatrain.disk.adapters import peft_targets
from megatrain.disk.hf.model import load_model
from megatrain.errors import ConfigError
from megatrain.models.adapters.lora import Lora
from testkit.families import save_tiny

SHARED = "model.layers.1.mlp.shared_experts.down_proj"


def _adapters(place: Path, *targets: str) -> Path:
    base = save_tiny(place / "base", "laguna", torch.bfloat16)
    load_model(base, lora=Lora(rank=2, alpha=2, targets=targets)).export(place / "adapters")
    return place / "adapters"


def test_what_peft_would_leave_out_is_named_and_merged_only(tmp_path: Path) -> None:
    adapters = _adapters(tmp_path)
    with pytest.raises(ConfigError, match=r"leave out the adapters of 9 of 32 modules") as told:
        export_model(adapters, tmp_path / "out")
    assert SHARED in str(told.value)
    assert "Export with --merge" in str(told.value)
    assert not (tmp_path / "out").exists()
    assert "from_pretrained loads it" in export_model(adapters, tmp_path / "merged", merge=True)


def test_what_it_loads_whole_is_written(tmp_path: Path) -> None:
    said = export_model(_adapters(tmp_path, "*attn*"), tmp_path / "out")
    assert said.endswith("PEFT loads it")


def test_without_the_table_a_part_would_be_called_loadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peft_targets, "_LOST", {})
    assert export_model(_adapters(tmp_path), tmp_path / "out").endswith("PEFT loads it")

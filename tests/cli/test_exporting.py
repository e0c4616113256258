"""The command `export` and PEFT: adapters that it would load in part are not written for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.cli.exporting import export_model
from megatrain.disk.hf.model import load_model
from megatrain.errors import ConfigError
from megatrain.models.adapters.lora import LoraConfig
from testkit.families import save_tiny

SHARED = "model.layers.1.mlp.shared_experts.down_proj"


def _adapters(place: Path, *targets: str) -> Path:
    base = save_tiny(place / "base", "laguna", torch.bfloat16)
    load_model(base, lora=LoraConfig(rank=2, alpha=2, target_modules=targets)).export(
        place / "adapters"
    )
    return place / "adapters"


def test_what_peft_would_leave_out_is_named_and_merged_only(tmp_path: Path) -> None:
    adapters = _adapters(tmp_path)
    with pytest.raises(ConfigError, match=r"leave out the adapters of 9 of 32 modules") as told:
        export_model(adapters, tmp_path / "out")
    assert SHARED in str(told.value)
    assert "Export with --merge" in str(told.value)
    assert not (tmp_path / "out").exists()
    assert "from_pretrained loads it" in export_model(adapters, tmp_path / "merged", merge=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"alphas": (("q_proj", 8.0),)}, "would scale 4 of 28 adapters by 1, as all others"),
        ({"ranks": (("*", 4),)}, "would scale 28 of 28 adapters by 1"),
        ({"ranks": (("q_proj", 4),), "alphas": (("q_proj", 4.0),)}, None),
        ({"rslora": True}, None),
    ],
)
def test_scales_that_vllm_does_not_read_are_named(
    tmp_path: Path, changes: dict[str, Any], said: str | None
) -> None:
    base = save_tiny(tmp_path / "base", "llama", torch.bfloat16)
    lora = LoraConfig(rank=2, alpha=2, **changes)
    load_model(base, lora=lora).export(tmp_path / "adapters")
    found = export_model(tmp_path / "adapters", tmp_path / "out")
    assert (found.endswith("PEFT loads it")) is (said is None)
    assert (said or "PEFT loads it") in found

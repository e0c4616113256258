"""Targets that PEFT finds adapted modules by: no name that PEFT takes for the experts of a family.

PEFT itself is the oracle in proofs/adapters/loading.py. Here the table is compared with the one of
transformers that PEFT decides by, and targets with a few lines that match as PEFT documents it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN

from megatrain.disk.adapters import peft_targets as module
from megatrain.disk.adapters.peft_targets import REWRITTEN, PeftTargets, peft_targets
from megatrain.disk.hf.model import load_model, read_model_folder
from megatrain.memory.kinds import TensorKind
from megatrain.model_files import ADAPTER_CONFIG_NAME, ADAPTER_NAME
from megatrain.models.adapters.lora import LoraConfig
from megatrain.models.build import build_decoder
from megatrain.models.decoder import Decoder
from testkit.families import FAMILIES, save_tiny, tiny_config

AFFECTED = sorted(REWRITTEN.keys() & set(FAMILIES))
WITHOUT_NAMESAKES = {"cohere2_moe", "flex_olmo", "mellum", "minimax", "minimax_m2", "mixtral",
                     "olmoe", "qwen3_moe"}  # fmt: skip
"""Families of the table that have experts and attention only."""


def _adapted(family: str, *targets: str) -> Decoder:
    return build_decoder(
        tiny_config(family), "bf16", lora=LoraConfig(rank=2, alpha=2, target_modules=targets)
    )


def _end(name: str) -> str:
    return name.rpartition(".")[2]


def _found(decoder: Decoder, targets: PeftTargets) -> list[str]:
    """Return what targets stand for after PEFT has rewritten them: a module for each match."""
    rewritten = REWRITTEN.get(decoder.config.model_type, frozenset())
    kept = [target for target in targets.modules if _end(target) not in rewritten]
    names = [name for name, _ in decoder.model.named_modules()]
    by_name = [n for n in names if any(n == t or n.endswith(f".{t}") for t in kept)]
    weights = [name for name, _ in decoder.model.named_parameters()]
    by_weight = [
        n.removesuffix(".weight")
        for n in weights
        if any(n == t or n.endswith(f".{t}") for t in targets.parameters)
    ]
    return sorted(by_name + by_weight)


def test_the_table_has_the_model_types_for_which_peft_rewrites_targets() -> None:
    kinds = {
        kind: of for kind, of in _MODEL_TO_CONVERSION_PATTERN.items() if kind in CONFIG_MAPPING
    }
    kinds["mixtral"] = "mixtral"  # PEFT adds it
    patterns = {"mixtral": module._MIXTRAL, "qwen2_moe": module._QWEN2_MOE}
    assert {kind: patterns[of] for kind, of in kinds.items() if of in patterns} == REWRITTEN


@pytest.mark.parametrize("family", AFFECTED)
def test_each_adapted_module_is_found_by_one_target(family: str) -> None:
    decoder = _adapted(family)
    assert decoder.adapters is not None
    targets = peft_targets(decoder)
    assert _found(decoder, targets) == sorted(decoder.adapters.modules)
    assert bool(targets.parameters) == (family not in WITHOUT_NAMESAKES)


@pytest.mark.parametrize("family", sorted(set(AFFECTED) - WITHOUT_NAMESAKES))
def test_names_alone_would_lose_a_part(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = _adapted(family)
    assert decoder.adapters is not None
    with monkeypatch.context() as patch:
        patch.setattr(module, "REWRITTEN", {})
        targets = peft_targets(decoder)
    assert targets.parameters == ()
    assert len(_found(decoder, targets)) < len(decoder.adapters.modules)


def test_named_targets_are_written_so_too() -> None:
    targets = peft_targets(_adapted("deepseek_v3", "shared_experts.gate_proj", "o_proj"))
    assert targets == PeftTargets(
        modules=("o_proj",),
        parameters=tuple(
            f"model.layers.{layer}.mlp.shared_experts.gate_proj.weight" for layer in (1, 2, 3)
        ),
    )


def test_other_families_have_targets_of_modules_alone() -> None:
    targets = peft_targets(_adapted("llama4_text"))
    assert targets.parameters == ()
    assert {"gate_proj", "up_proj", "down_proj"} <= set(targets.modules)


def test_an_export_with_targets_of_weights_is_read_back(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "deepseek_v3", torch.float32)
    home = load_model(base, lora=LoraConfig(rank=2, alpha=4, dropout=0.1))
    home.export(tmp_path / "out")
    config = json.loads((tmp_path / "out" / ADAPTER_CONFIG_NAME).read_text())
    assert len(config["target_parameters"]) == 12
    again = read_model_folder(tmp_path / "out").load_adapters((TensorKind.HI, TensorKind.LO))
    assert home.decoder.adapters is not None
    assert again.decoder.adapters is not None
    assert again.decoder.adapters.modules == home.decoder.adapters.modules
    again.export(tmp_path / "again")
    for name in (ADAPTER_CONFIG_NAME, ADAPTER_NAME):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()

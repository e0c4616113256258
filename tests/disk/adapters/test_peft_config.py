"""adapter_config.json: what PEFT writes is read, and every other method is refused by its name."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from megatrain.disk.adapters.peft_config import (
    MAX_ADAPTER_CONFIG_BYTES,
    PeftConfig,
    parse_peft_config,
)
from megatrain.disk.adapters.peft_targets import PeftTargets
from megatrain.errors import ModelConfigError

# As PEFT 0.21 writes it for LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]).
WRITTEN: dict[str, Any] = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None,
    "auto_mapping": None, "base_model_name_or_path": "org/model", "bias": "none",
    "corda_config": None, "ensure_weight_tying": False, "eva_config": None,
    "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "kasa_config": None, "layer_replication": None,
    "layers_pattern": None, "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 8,
    "lora_bias": False, "lora_dropout": 0.05, "lora_ga_config": None, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "monteclora_config": None,
    "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16, "r": 4,
    "rank_pattern": {}, "revision": None, "target_modules": ["q_proj"],
    "target_parameters": None, "task_type": "CAUSAL_LM", "trainable_token_indices": None,
    "use_bdlora": None, "use_dora": False, "use_qalora": False, "use_rslora": True,
    "velora_config": None,
}  # fmt: skip


def _parsed(**changes: Any) -> PeftConfig:
    return parse_peft_config(json.dumps(WRITTEN | changes).encode())


def test_what_peft_writes_is_read() -> None:
    assert _parsed() == PeftConfig(rank=4, alpha=8, dropout=0.05, rslora=True, base="org/model")
    old = {"peft_type": "LORA", "r": 8, "lora_alpha": 16}  # of the first versions
    assert parse_peft_config(json.dumps(old).encode()) == PeftConfig(rank=8, alpha=16)


def test_what_is_written_is_read_back() -> None:
    config = PeftConfig(
        rank=3, alpha=0.5, dropout=0.1, rslora=True, dora=True, saved=("lm_head",), tied=True,
        base="a/b", revision="c" * 40,
    )  # fmt: skip
    data = config.to_bytes(PeftTargets(modules=("q_proj",)))
    assert parse_peft_config(data) == config
    assert json.loads(data)["target_modules"] == ["q_proj"]
    assert json.loads(data)["target_parameters"] is None


def test_patterns_of_ranks_are_written_as_peft_matches_them_and_read_back() -> None:
    ranks = (("layers.0.mlp.up_proj", 8), ("*.mlp.*", 2), ("q_proj", 5))
    config = PeftConfig(rank=3, alpha=0.5, ranks=ranks, alphas=(("q_proj", 7.5),))
    data = config.to_bytes(PeftTargets(modules=("q_proj",)))
    assert parse_peft_config(data) == config
    written = json.loads(data)["rank_pattern"]
    assert list(written) == [r"layers\.0\.mlp\.up_proj", r".*\.mlp\..*", "q_proj"]
    names = [f"model.layers.{n}.{end}" for n in (0, 10) for end in ("mlp.up_proj", "attn.q_proj")]
    for name in names:  # as PEFT looks for them
        found = (written[key] for key in written if re.match(rf"(.*\.)?({key})$", name))
        assert next(found, 3) == config.rank_of(name)
    given = _parsed(rank_pattern={"^model.layers.0.q_proj$": 4, r".*\.gate_up_proj": 8})
    assert given.ranks == (("model.layers.0.q_proj", 4), ("*.gate_up_proj", 8))


def test_a_file_with_targets_of_weights_has_no_dropout_because_peft_refuses_it() -> None:
    config = PeftConfig(rank=3, alpha=0.5, dropout=0.1)
    data = config.to_bytes(PeftTargets(modules=("q_proj",), parameters=("mlp.gate_proj.weight",)))
    assert json.loads(data)["target_parameters"] == ["mlp.gate_proj.weight"]
    assert parse_peft_config(data) == replace(config, dropout=0.0, params=("mlp.gate_proj.weight",))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
        ({"peft_type": None}, "peft_type is None"),
        ({"peft_type": ["LORA"]}, "peft_type is a list"),
        ({"use_dora": 1}, "use_dora is 1; it must be true or false"),
        ({"use_qalora": True}, "QALoRA"),
        ({"lora_bias": True}, "biases"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_*"]}, "modules_to_save is a list that does not have names alone"),
        ({"ensure_weight_tying": "yes"}, "ensure_weight_tying is 'yes'; it must be true or false"),
        ({"rank_pattern": {"(q|k)_proj": 8}}, r"rank_pattern has the key '\(q\|k\)_proj'"),
        ({"rank_pattern": {"(a*)*b": 8}}, "of regular expressions only names are read"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern of q_proj is 0"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is a list"),
        ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern of q_proj is '8'"),
        ({"target_parameters": ["experts.*"]}, "target_parameters is a list that does not have"),
        ({"target_parameters": "mlp.experts.up"}, "target_parameters is 'mlp.experts.up' that"),
        ({"target_parameters": {"a.weight": 1}}, "target_parameters is a dict that does not have"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"init_lora_weights": ["gaussian"]}, "init_lora_weights is a list"),
        ({"use_new_method": True}, "unknown keys: use_new_method"),
        ({"r": 0}, "r is 0"),
        ({"r": True}, "r is True"),
        ({"r": 10**40}, "r is 1000"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
        ({"lora_alpha": -1}, "lora_alpha is -1"),
        ({"lora_dropout": 1}, "lora_dropout is 1"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
        ({"base_model_name_or_path": 3}, "base_model_name_or_path is 3"),
        ({"base_model_name_or_path": "a\nb"}, "characters that no name has"),
        ({"revision": "x" * 2000}, "revision is 'xxx"),
    ],
)
def test_other_methods_and_values_are_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelConfigError, match=rf"adapter_config\.json: .*{says}"):
        _parsed(**changes)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"{", b"\xff", b'{"r": 1, "r": 2}', b"[" * 10**5,
        b" " * (MAX_ADAPTER_CONFIG_BYTES + 1), b'{"r": ' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ModelConfigError, match=r"adapter_config\.json: "):
        parse_peft_config(data)


def test_no_bytes_lead_elsewhere() -> None:
    draw, text = random.Random(0), json.dumps(WRITTEN).encode()
    for _ in range(2000):
        data = bytearray(text)
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            found = parse_peft_config(bytes(data))
        except ModelConfigError:
            continue
        assert found.rank >= 1
        assert found.alpha > 0
        assert 0 <= found.dropout < 1

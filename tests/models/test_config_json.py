"""A config.json is foreign input: it becomes a configuration or a ModelConfigError, never more."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from megatrain.errors import ModelConfigError
from megatrain.models.config_json import OTHER_NAMES, as_family, parse_config
from testkit.cases import by_family
from testkit.families import FAMILIES, tiny_config


def _config(**changes: Any) -> bytes:
    return json.dumps({"model_type": "llama", "hidden_size": 64} | changes).encode()


@pytest.mark.parametrize("family", by_family(FAMILIES))
def test_what_transformers_writes_is_read_back_the_same(family: str) -> None:
    written = tiny_config(family).to_json_string()
    again = json.loads(parse_config(written.encode()).to_json_string())
    assert again | {"dtype": None} == json.loads(written) | {"dtype": None}


@pytest.mark.parametrize(
    "key",
    ["trust_remote_code", "_attn_implementation", "_attn_implementation_autoset",
     "_target_", "_anything", "quantization_config", "kernel_config", "to_dict", "from_dict",
     "base_model_tp_plan", "a key", "__class__"],
)  # fmt: skip
def test_keys_that_reach_code_are_refused(key: str) -> None:
    with pytest.raises(ModelConfigError, match=r"refused|not a plain key"):
        parse_config(_config(**{key: {"AutoModel": "evil.Model"}}))


def test_refused_keys_are_refused_at_any_depth() -> None:
    with pytest.raises(ModelConfigError, match="auto_map is refused: runs code"):
        parse_config(_config(rope_parameters={"inner": {"auto_map": {}}}))


CODE = {"AutoConfig": "configuration_own.C", "AutoModelForCausalLM": "modeling_own.M"}


def test_code_of_a_folder_is_not_in_the_config_that_is_exported() -> None:
    data, notes = as_family(_config(auto_map=CODE))
    assert json.loads(data) == json.loads(_config())
    assert notes == [
        "config.json names code in the folder (auto_map): it is not run, because transformers has "
        "llama itself, and exports do not name it"
    ]
    assert as_family(_config()) == (_config(), [])


def test_code_of_a_folder_that_is_needed_is_named_in_the_refusal() -> None:
    with pytest.raises(ModelConfigError, match=r"'own' is not .* in the folder \(auto_map\), and"):
        parse_config(_config(model_type="own", auto_map=CODE))
    with pytest.raises(ModelConfigError, match="'own' is not a causal") as refused:
        parse_config(_config(model_type="own"))
    assert "auto_map" not in str(refused.value)


@pytest.mark.parametrize(("name", "family"), OTHER_NAMES.items())
def test_a_family_is_found_by_the_other_names_that_folders_have_for_it(
    name: str, family: str
) -> None:
    assert name not in CONFIG_MAPPING  # else transformers has it, and no name is needed
    fields = json.loads(tiny_config(family).to_json_string())
    given = json.dumps(fields | {"model_type": name, "auto_map": CODE}).encode()
    assert parse_config(given).to_dict() == parse_config(json.dumps(fields).encode()).to_dict()
    data, notes = as_family(given)
    assert json.loads(data) == fields
    assert notes == [
        f"config.json calls the model {name}: it is a {family} of transformers, and exports say so"
    ]


def test_a_part_is_read_by_the_same_names() -> None:
    text = json.loads(tiny_config("deepseek_v3").to_json_string())
    other = text | {"model_type": "kimi_k2", "auto_map": CODE}
    data, _ = as_family(_config(model_type="kimi_k25", text_config=other))
    assert json.loads(data) == json.loads(_config(model_type="kimi_k25", text_config=text))


def test_harmless_unknown_keys_are_kept() -> None:
    assert parse_config(_config(trained_by="someone")).trained_by == "someone"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000; it must be from 0 to 256"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"hidden_size": "64"}, "hidden_size must be a number"),
        ({"hidden_size": True}, "hidden_size must be a number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is not a number"),
        ({"something": 10**30}, "something is 1000"),
        ({"something": "x" * 70_000}, "something is a text of 70000"),
        ({"model_type": "nonsense"}, "'nonsense' is not a causal language model"),
        ({"model_type": "bert"}, "configured as an encoder"),
        ({"model_type": "bart", "is_decoder": True}, "encoder-decoder"),
        ({"model_type": "blt"}, "has a decoder and decoder_config"),
        ({"model_type": ["llama"]}, "no model_type"),
        ({"text_config": "gelu"}, "text_config is 'gelu', but llama has no part of that name"),
        ({"decoder": {"hidden_size": 64}}, "decoder is .'hidden_size': 64., but llama"),
        ({"decoder": "a", "generator": "b"}, "as a llama: .*Multiple valid text configs"),
        ({"hidden_act": 5}, "transformers rejects it as a llama"),
    ],
)
def test_absurd_values_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelConfigError, match=reason):
        parse_config(_config(**changes))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[]", "is a list"),
        (b'{"a": 1, "a": 2}', "given twice"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a":' * 20 + b"1" + b"}" * 20, "nested deeper"),
    ],
)
def test_malformed_files_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ModelConfigError, match=reason):
        parse_config(data)


def test_infinity_as_transformers_spells_it() -> None:
    data = tiny_config("bamba").to_json_string()
    assert "Infinity" in data
    assert parse_config(data.encode()).time_step_limit[1] == float("inf")

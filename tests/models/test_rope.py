"""Scaled rotary positions: logits of transformers, and a config.json that says what was asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from megatrain.batch import MicroBatch
from megatrain.config.sections import RopeSettings
from megatrain.disk.hf.model import read_model_folder
from megatrain.errors import ConfigError
from megatrain.memory.kinds import TensorKind
from megatrain.models.config_json import parse_config
from megatrain.models.rope import line_for, num_positions, with_rope
from testkit.engines import make_engine
from testkit.families import save_tiny, tiny_config

LENGTH = 200
ORIGINAL = "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "factor": 4.0}
SIX = {"num_hidden_layers": 6}
"""In gemma3 every sixth layer sees the whole row."""
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "yarn": ("qwen2", {}, YARN, {ORIGINAL: 128}),
    "linear": ("llama", {}, {"rope_type": "linear", "factor": 2.5}, {}),
    "llama3": (
        "llama",
        {},
        {"rope_type": "llama3", "factor": 4.0},
        {ORIGINAL: 128, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "theta": ("llama", {}, {"rope_type": "default", "factor": 4.0, "rope_theta": 1e6}, {}),
    "part of a head": ("glm", {}, YARN, {ORIGINAL: 128}),
    "latent": ("deepseek_v3", {}, YARN, {ORIGINAL: 128}),
    "by kind of layer": ("gemma3_text", SIX, YARN, {ORIGINAL: 128}),
}
"""Family, its changes, what is wanted, and what transformers needs beside it."""


def _by_hand(folder: Path, wanted: dict[str, Any], beside: dict[str, Any]) -> PreTrainedConfig:
    """Return the folder's config with rope parameters as one writes them by hand."""
    config = AutoConfig.from_pretrained(folder)
    nested = config.rope_parameters.get("full_attention")
    parameters = (nested or config.rope_parameters) | wanted | beside
    if wanted["rope_type"] == "default":
        del parameters["factor"]
    if nested:
        config.rope_parameters["full_attention"] = parameters
    else:
        config.rope_parameters = parameters
    return config


def _plain(folder: Path, config: PreTrainedConfig, ids: Tensor) -> Tensor:
    """Return the logits behind the last token, which have looked at every position."""
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    with torch.no_grad():
        found = model.train()(input_ids=ids, use_cache=False, logits_to_keep=1).logits
    last: Tensor = found[:, -1]
    return last


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Of the model that trains, and of the exported folder as transformers loads it."""
    family, changes, wanted, beside = CASES[case]
    folder = save_tiny(tmp_path / "model", family, torch.float32, **changes)
    ids = torch.randint(3, 300, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    expected = _plain(folder, _by_hand(folder, wanted, beside), ids)
    home = read_model_folder(folder, dtype="fp32", rope=wanted).load((TensorKind.HI,))
    with make_engine(home.decoder, home.store, micro_batch_tokens=LENGTH) as engine:
        (found,) = engine.next_token_logits([MicroBatch(input_ids=ids, labels=ids)])
    assert torch.equal(found, expected)
    home.export(tmp_path / "out")
    exported = AutoConfig.from_pretrained(tmp_path / "out")
    assert torch.equal(_plain(tmp_path / "out", exported, ids), expected)
    unscaled = _plain(folder, AutoConfig.from_pretrained(folder), ids)
    assert not torch.equal(unscaled, expected), "scaling that is dropped would be noticed"


def _scaled(config: PreTrainedConfig, **settings: Any) -> PreTrainedConfig:
    rope = RopeSettings.model_validate(settings)
    return parse_config(with_rope(config.to_json_string().encode(), rope.parameters()))


@pytest.mark.parametrize(
    ("settings", "declares", "limit", "parameters"),
    [
        ({"type": "yarn", "factor": 4}, {}, 512, {"factor": 4.0, ORIGINAL: 128}),
        (
            {"type": "yarn", "factor": 8, ORIGINAL: 96},
            {},
            768,
            {"factor": 8.0, ORIGINAL: 96},
        ),
        ({"type": "linear", "factor": 4}, {}, 128, {"factor": 4.0, ORIGINAL: None}),
        ({"type": "default", "factor": 4, "theta": 5e5}, {}, 512, {"rope_theta": 5e5}),
        ({"type": "default", "factor": 4}, {}, 512, {"factor": None, "rope_theta": 1e4}),
        (
            {"type": "llama3", "factor": 16},
            {"rope_type": "llama3", "factor": 8.0, ORIGINAL: 8, "low_freq_factor": 2.0},
            256,
            {"factor": 16.0, ORIGINAL: 8, "low_freq_factor": 2.0, "high_freq_factor": 4.0},
        ),
        (
            {"type": "yarn", "factor": 3},
            {"rope_type": "dynamic", "factor": 2.0},
            768,
            {"factor": 3.0, ORIGINAL: 256},
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("style", ["since transformers 5", "before"])
def test_lengths_agree_in_both_styles_of_config_json(
    settings: dict[str, Any],
    declares: dict[str, Any],
    limit: int,
    parameters: dict[str, Any],
    style: str,
) -> None:
    config = tiny_config("llama")
    config.rope_parameters |= {"high_freq_factor": 4.0} | declares if declares else {}
    fields = json.loads(config.to_json_string())
    if style == "before":
        scaling = fields.pop("rope_parameters")
        fields["rope_theta"] = scaling.pop("rope_theta")
        fields["rope_scaling"] = scaling if declares else None
    rope = RopeSettings.model_validate(settings)
    written = with_rope(json.dumps(fields).encode(), rope.parameters())
    assert ("rope_parameters" in json.loads(written)) == (style == "since transformers 5")
    read = parse_config(written)
    assert read.max_position_embeddings == limit
    assert read.rope_parameters["rope_type"] == settings["type"]
    assert {key: read.rope_parameters.get(key) for key in parameters} == parameters


def test_layers_with_a_window_keep_their_frequencies() -> None:
    config = tiny_config("gemma3_text", **SIX)
    read = _scaled(config, type="linear", factor=8)
    assert read.rope_parameters["sliding_attention"] == config.rope_parameters["sliding_attention"]
    assert read.rope_parameters["full_attention"]["factor"] == 8
    assert read.max_position_embeddings == num_positions(read) == 1024


@pytest.mark.parametrize(
    ("family", "changes", "settings", "words"),
    [
        ("gpt2", {}, {}, "but this gpt2 has none that its config.json describes. Remove"),
        ("bloom", {}, {}, "but this bloom has none"),
        ("falcon", {"alibi": True}, {}, "but this falcon has none"),
        ("recurrent_gemma", {}, {}, "declares no number of positions (max_position_embeddings"),
        ("beam", {}, {}, "only layers with a sliding window have rotary positions"),
        ("phi3", {}, {}, "the family does not accept it. config.json: transformers rejects it"),
        ("cwm", {}, {}, "type is yarn, but the model was trained with llama3 and factor 16: "
         "another type changes every position that it knows. Give type llama3 and a factor above"),
        ("cwm", {}, {"type": "llama3", "factor": 8},
         "declares 65,536 positions, but the model has 131,072. Raise model.rope.factor"),
        ("llama", {}, {ORIGINAL: 256}, f"{ORIGINAL} is 256, but this llama declares 128 positions"),
        ("gpt_oss", {}, {ORIGINAL: 128, "factor": 64}, "is 128, but this gpt_oss declares 4,096."),
        ("llama", {}, {ORIGINAL: 16}, "declares 64 positions, but the model has 128"),
    ],
)  # fmt: skip
def test_what_does_not_suit_the_model_is_refused(
    family: str, changes: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        _scaled(tiny_config(family, **changes), **({"type": "yarn", "factor": 4} | settings))
    assert str(caught.value).startswith("model.rope")
    assert words in str(caught.value)


def test_a_model_that_never_looks_at_the_frequencies_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "granitemoehybrid")
    with pytest.raises(ConfigError, match=r"this model computes none, whatever its config\.json"):
        read_model_folder(tmp_path / "model", rope=YARN)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("cwm", {}), ("gpt_oss", {}), ("gemma3_text", SIX)],
)
def test_the_suggested_line_covers_the_rows(family: str, changes: dict[str, Any]) -> None:
    config = tiny_config(family, **changes)
    most = num_positions(config)
    assert most is not None
    for length in (most + 1, 3 * most, 20 * most - 1):
        line = line_for(config, length)
        assert line is not None
        reach = num_positions(_scaled(config, **yaml.safe_load(line)["model.rope"]))
        assert reach is not None
        assert length <= reach < length + most


@pytest.mark.parametrize("family", ["gpt2", "beam", "phi3", "recurrent_gemma"])
def test_where_nothing_can_be_scaled_no_line_is_suggested(family: str) -> None:
    assert line_for(tiny_config(family), 1000) is None


@pytest.mark.parametrize(
    ("scaling", "most"),
    [
        (None, 4096),
        ({"rope_type": "default", "rope_theta": 1e4}, 4096),
        ({"rope_type": "linear", "factor": 4.0}, 16384),
        ({"rope_type": "yarn", "factor": 2.0, ORIGINAL: 4096}, 8192),
        ({"rope_type": "llama3", "factor": 8.0, ORIGINAL: 512}, 4096),
        # Gemma 3 declares 131072 positions beside a factor of 8, which is in them already.
        ({"full_attention": {"factor": 2.0}, "sliding_attention": {"rope_type": "default"}}, 4096),
        ({"full_attention": {"factor": 2.0, ORIGINAL: 4096}}, 8192),
    ],
)
def test_scaled_rotary_positions_reach_further(scaling: Any, most: int) -> None:
    config = PreTrainedConfig(max_position_embeddings=4096)
    config.rope_parameters = scaling
    assert num_positions(config) == most


def test_a_model_without_positions_has_no_limit() -> None:
    assert num_positions(PreTrainedConfig()) is None

"""The adapters of a run: from its config, and what it says about them."""

from __future__ import annotations

import pytest

from megatrain.config import Config
from megatrain.errors import ConfigError
from megatrain.models.adapters.lora import LoraConfig
from megatrain.models.build import build_decoder
from megatrain.run.opening.model import adapter_notes, adapters_of
from testkit.families import tiny_config


def test_without_a_rank_there_are_none() -> None:
    assert adapters_of(Config(model="m", data="d")) == (None, None)
    assert adapter_notes(build_decoder(tiny_config("llama"), "bf16")) == []


def test_alpha_is_twice_the_rank_unless_it_is_given() -> None:
    config = Config(model="m", data="d", lora={"rank": 8}, train={"seed": 5})
    assert adapters_of(config) == (LoraConfig(rank=8, alpha=16, seed=5), None)
    given = {"rank": 8, "alpha": 4, "dropout": 0.1, "targets": "q_proj", "rslora": True}
    wanted = LoraConfig(
        rank=8, alpha=4, dropout=0.1, target_modules=("q_proj",), rslora=True, seed=42
    )
    assert adapters_of(Config(model="m", data="d", lora=given)) == (wanted, None)


@pytest.mark.parametrize(
    ("lora", "model", "message"),
    [
        ({"alpha": 4}, {}, "lora.alpha is given and lora.rank is null"),
        ({"rank": 4}, {"frozen": ["*"]}, "all params of the model are frozen"),
        ({"rank": 4}, {"add_tokens": ["<a>"]}, "the tables are frozen"),
    ],
)
def test_what_makes_no_sense_together_is_refused(
    lora: dict[str, object], model: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(model={"name_or_path": "m", **model}, data="d", lora=lora)


def test_the_note_counts_and_names_what_is_left_out() -> None:
    (note,) = adapter_notes(
        build_decoder(tiny_config("mixtral"), "bf16", lora=LoraConfig(rank=4, alpha=8))
    )
    assert note.startswith("lora: rank 4 beside 16 linear modules, 7,168 trained params")
    assert "Without an adapter: model.layers.*.mlp.experts.down_proj" in note
    assert note.endswith("lora.experts: true adapts experts, too")


def test_patterns_of_ranks_are_names_with_stars() -> None:
    given = {"rank": 8, "rank_pattern": {"*.mlp.*": 4}, "alpha_pattern": {"q_proj": 2.5}}
    lora, _ = adapters_of(Config(model="m", data="d", lora=given))
    assert lora is not None
    assert (lora.ranks, lora.alphas) == ((("*.mlp.*", 4),), (("q_proj", 2.5),))
    with pytest.raises(ConfigError, match=r"rank_pattern.*'\(q\|k\)' is not a name"):
        Config(model="m", data="d", lora={"rank": 8, "rank_pattern": {"(q|k)": 4}})


def test_adapters_that_peft_would_leave_out_are_named_before_the_first_step() -> None:
    lora = LoraConfig(rank=4, alpha=8, target_modules=("shared_experts.up_proj", "q_proj"))
    notes = adapter_notes(build_decoder(tiny_config("laguna"), "bf16", lora=lora))
    assert notes[1].startswith("lora: PEFT 0.21 does not load the adapters of 3 modules (model.")
    assert "--merge" in notes[1]
    lora = LoraConfig(rank=4, alpha=8, target_modules=("q_proj",))
    assert len(adapter_notes(build_decoder(tiny_config("laguna"), "bf16", lora=lora))) == 1

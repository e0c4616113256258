"""The decoder: blocks that share nothing, on the right side of the layers, at no cost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatrain.errors import ConfigError, MissingPackage, UnsupportedModel
from megatrain.models.build import _refuse_shared, build_decoder
from megatrain.models.probing import boundaries
from testkit.families import FAMILIES, tiny_config, tiny_model


@pytest.mark.parametrize("family", FAMILIES[::8])
def test_every_param_is_in_exactly_one_block(family: str) -> None:
    decoder = build_decoder(tiny_config(family), "bf16")
    names = [param.name for param in decoder.params]
    assert len(names) == len(set(names))
    assert set(names) == {name for name, _ in tiny_model(family, torch.bfloat16).named_parameters()}
    assert [b.role for b in decoder.blocks] == ["embedding", *["layer"] * 4, "head"]


def test_sides_follow_the_calls_not_the_order_of_declaration() -> None:
    # OPT declares its output projection and final norm before its layers.
    config = tiny_config("opt", word_embed_proj_dim=32)
    decoder = build_decoder(config, "bf16")
    before = [p.name for p in decoder.blocks[0].params]
    after = [p.name for p in decoder.blocks[-1].params]
    assert "model.decoder.project_in.weight" in before
    assert "model.decoder.project_out.weight" in after
    assert "model.decoder.final_layer_norm.weight" in after


def test_a_tied_param_belongs_to_the_embedding_and_knows_its_other_name() -> None:
    decoder = build_decoder(tiny_config("gemma"), "bf16")
    (embedding,) = decoder.blocks[0].params
    assert (embedding.name, embedding.aliases) == ("model.embed_tokens.weight", ("lm_head.weight",))
    assert [p.name for p in decoder.blocks[-1].params] == ["model.norm.weight"]


def test_what_a_model_keeps_in_fp32_stays_fp32() -> None:
    decoder = build_decoder(tiny_config("ernie4_5_moe"), "bf16")
    dtypes = {p.name: p.dtype for p in decoder.params}
    assert dtypes["model.layers.1.mlp.gate.weight"] is torch.float32
    assert dtypes["model.layers.1.self_attn.q_proj.weight"] is torch.bfloat16


def test_frozen_patterns() -> None:
    decoder = build_decoder(tiny_config("llama"), "bf16", frozen=("model.embed_tokens.*",))
    assert [p.trained for p in decoder.blocks[0].params] == [False]
    assert all(p.trained for p in decoder.params[1:])


def test_a_frozen_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.frozen: model\.embd_tokens\.\* matches no"):
        build_decoder(tiny_config("llama"), "bf16", frozen=("*norm*", "model.embd_tokens.*"))


def test_freezing_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match="matches every parameter, so nothing would be trained"):
        build_decoder(tiny_config("llama"), "bf16", frozen=("model.*", "lm_head.*"))


def test_building_costs_no_weights_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    config = tiny_config("llama", hidden_size=8192, intermediate_size=28672, vocab_size=128256)
    decoder = build_decoder(config, "bf16")
    assert sum(p.num_elements for p in decoder.params) > 4e9
    assert all(p.is_meta for p in decoder.model.parameters())
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_param_used_on_both_sides_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = boundaries._probe

    def lying_probe(*args: object) -> object:
        result = probe(*args)  # type: ignore[arg-type]
        args[4]["model.norm"] = {0, 4}  # type: ignore[index]
        return result

    monkeypatch.setattr(boundaries, "_probe", lying_probe)
    with pytest.raises(
        UnsupportedModel, match=r"model\.norm\.weight is not used on exactly one side"
    ):
        build_decoder(tiny_config("llama"), "bf16")


def test_a_config_that_cannot_be_built_says_why() -> None:
    config = tiny_config("llama", hidden_act="no_such_function")
    with pytest.raises(UnsupportedModel, match="cannot build a llama"):
        build_decoder(config, "bf16")


def test_an_attention_whose_package_is_missing_names_the_package() -> None:
    with pytest.raises(MissingPackage, match=r"model\.attn is flash_attention_2, .* flash-attn"):
        build_decoder(tiny_config("llama"), "bf16", attn="flash_attention_2")


def test_shared_layers_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="share parameters"):
        _refuse_shared([["a"], ["b"], ["a"]])
    assert isinstance(build_decoder(tiny_config("llama"), "bf16").layers, nn.ModuleList)

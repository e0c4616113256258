"""Of a joint model the text decoder is cut into blocks, and the rest is carried."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from megatrain.errors import UnsupportedModel
from megatrain.models.build import build_decoder
from megatrain.models.probing import boundaries
from megatrain.models.probing.boundaries import Reads
from testkit.cases import at_a_push
from testkit.joint_families import JOINT_FAMILIES, tiny_joint_config


@pytest.mark.parametrize("family", at_a_push(JOINT_FAMILIES, 8))
def test_every_tensor_is_in_one_block_or_carried(family: str) -> None:
    decoder = build_decoder(tiny_joint_config(family), "bf16")
    names = [param.name for param in (*decoder.params, *decoder.carried)]
    assert len(names) == len(set(names))
    state = decoder.model.state_dict(keep_vars=True)
    owned = {name for name, _ in decoder.model.named_parameters()}
    buffers = {param.name for param in decoder.carried} - owned
    assert set(names) == owned | buffers
    assert buffers <= state.keys()
    assert not buffers & decoder.persistent_buffers().keys()
    assert all(param.is_meta for param in decoder.model.parameters())


def test_a_param_of_a_module_that_is_called_may_be_carried() -> None:
    decoder = build_decoder(tiny_joint_config("llava_next"), "bf16")
    assert "model.image_newline" in {param.name for param in decoder.carried}


def test_a_tower_may_have_projections_that_are_too_large_for_a_stand_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(boundaries, "MAX_STAND_IN", 1000)
    decoder = build_decoder(tiny_joint_config("llava"), "bf16")
    assert max(param.num_elements for param in decoder.carried) > 1000


def test_arguments_that_gradients_go_back_through_are_found_for_each_layer() -> None:
    config = tiny_joint_config("gemma4")
    looked_up = build_decoder(config, "bf16").looked_up
    assert [len(paths) for paths in looked_up] == [1] * config.text_config.num_hidden_layers
    assert not any(build_decoder(tiny_joint_config("gemma3"), "bf16").looked_up)


def test_keys_and_values_that_pass_in_an_unknown_way_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(boundaries, "shared_mapping", lambda call: None)
    reason = r"its last 2 layers read keys and values of earlier layers .* not known"
    with pytest.raises(UnsupportedModel, match=reason):
        build_decoder(tiny_joint_config("gemma4"), "bf16")


@pytest.mark.merge
def test_towers_are_not_taken_for_layers() -> None:
    for family in ("phi4_multimodal", "idefics2", "kosmos-2.5"):
        decoder = build_decoder(tiny_joint_config(family), "bf16")
        assert len(decoder.layers) == decoder.text_config.num_hidden_layers


# Laws 2 and 3: which tensors functions get.

TENSORS = {name: torch.ones(2, 2) for name in ("a", "b", "c", "d")}


def test_what_functions_get_is_read() -> None:
    with Reads(TENSORS, frozenset()) as reads:
        functional.linear(torch.ones(1, 2), TENSORS["a"])
        torch.cat([torch.ones(1, 2), TENSORS["b"]])
        assert TENSORS["c"].shape == (2, 2)
        assert TENSORS["c"].dtype is torch.float32
        assert not TENSORS["c"].is_cuda
    _ = TENSORS["d"] + 1  # no longer heard
    assert reads.names == {"a", "b"}


def test_a_product_with_a_tensor_that_is_too_large_is_refused() -> None:
    with (
        pytest.raises(UnsupportedModel, match="a is outside the layers and too large"),
        Reads(TENSORS, frozenset({"a"})),
    ):
        functional.linear(torch.ones(1, 2), TENSORS["a"])

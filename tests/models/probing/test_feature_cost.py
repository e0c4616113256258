"""What features of media cost is counted without computing them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForMultimodalLM

from megatrain.media import MediaItem
from megatrain.models.build import build_decoder
from megatrain.models.decoder import Decoder
from megatrain.models.probing.feature_cost import FeatureCost, feature_cost
from megatrain.models.towers import given_features, media_given
from testkit.joint_media import MEDIA_FAMILIES, media_config, media_documents
from testkit.live_bytes import LiveBytes

pytestmark = pytest.mark.merge


def cost_of(family: str) -> tuple[Decoder, MediaItem, FeatureCost]:
    decoder = build_decoder(media_config(family), "fp32", media="all")
    item = media_documents(family, [1])[0][2][0]
    return decoder, item, feature_cost(decoder, item)


def computed_bytes(decoder: Decoder, items: Sequence[MediaItem]) -> int:
    """Return what the same model holds that computes."""
    assert decoder.towers is not None
    plain: Any = AutoModelForMultimodalLM.from_config(decoder.config, dtype=torch.float32)
    names = {param.name for param in decoder.blocks[0].params}
    params = [p.requires_grad_() for name, p in plain.named_parameters() if name in names]
    with LiveBytes() as live, media_given(plain, decoder.towers, items):
        features = given_features(plain, decoder.towers, items[0].kind)
        made = [one for one in tree_leaves(features) if isinstance(one, Tensor)]
        del features
        made = [one for one in made if one.requires_grad]
        torch.autograd.grad(made, params, [torch.ones_like(one) for one in made], allow_unused=True)
    return int(live.peak)


@pytest.mark.parametrize("family", MEDIA_FAMILIES)
def test_bytes_are_those_of_a_model_that_computes(family: str) -> None:
    decoder, item, cost = cost_of(family)
    one, two, three = (computed_bytes(decoder, [item] * count) for count in (1, 2, 3))
    assert cost.held_bytes == pytest.approx((one, two, three), rel=0.02)
    five = computed_bytes(decoder, [item] * 5)
    assert three + 2 * (three - two) == pytest.approx(five, rel=0.02), "the rest follows"


def test_a_deeper_tower_holds_the_inputs_of_its_layers_more() -> None:
    _, item, cost = cost_of("gemma3")
    config = media_config("gemma3")
    layers, patches = config.vision_config.num_hidden_layers, 16
    config.vision_config.num_hidden_layers *= 3
    deeper = feature_cost(build_decoder(config, "fp32", media="all"), item)
    inputs = 4 * patches * config.vision_config.hidden_size * 2 * layers

    def of_an_item(cost: FeatureCost) -> int:
        return cost.held_bytes[2] - cost.held_bytes[1]

    assert of_an_item(deeper) - of_an_item(cost) == pytest.approx(inputs, rel=0.1)
    assert deeper.forward_flops > 1.5 * cost.forward_flops


def test_a_skeleton_is_as_it_was() -> None:
    decoder, _, _ = cost_of("gemma3")
    wanted = {name for name, param in decoder.model.named_parameters() if param.requires_grad}
    fresh = build_decoder(media_config("gemma3"), "fp32", media="all").model
    assert wanted == {name for name, param in fresh.named_parameters() if param.requires_grad}

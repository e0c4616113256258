"""Laws of template.py: the parts in a row are the plain model, and each reads its own weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import PreTrainedModel

from megatrain.models.build import build_decoder
from megatrain.models.decoder import COMPUTE_DTYPES, Decoder
from megatrain.models.template import Template
from testkit.families import tiny_config, tiny_model

CHANGE_LOGITS = ["cohere", "gemma2", "granite", "nanochat"]
CHANGES = {"granite": {"logits_scaling": 4.0}}
FAMILIES = [
    *CHANGE_LOGITS, "bloom", "falcon_mamba", "gemma", "gpt2", "gpt_neox", "llama", "mixtral",
    "olmo2", "opt", "phi", "qwen3", "starcoder2",
]  # fmt: skip
Dtype = Literal["bf16", "fp32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A plain model with weights, and the template of its skeleton."""

    plain: PreTrainedModel
    decoder: Decoder
    template: Template

    def weights(self, block: int) -> dict[str, Tensor]:
        params = self.decoder.blocks[block].params
        return {param.name: self.plain.get_parameter(param.name).detach() for param in params}

    def head(self) -> tuple[Tensor, Tensor | None]:
        head = self.plain.get_output_embeddings()
        return head.weight.detach(), None if head.bias is None else head.bias.detach()


@functools.cache
def world_of(family: str, dtype: Dtype = "bf16") -> World:
    plain = tiny_model(family, COMPUTE_DTYPES[dtype], **CHANGES.get(family, {})).train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in plain.parameters():  # norms and biases are not all ones and zeros
            param.add_(torch.randn(param.shape, generator=generator) * 0.05)
    decoder = build_decoder(tiny_config(family, **CHANGES.get(family, {})), dtype)
    return World(plain=plain, decoder=decoder, template=Template(decoder))


def inputs_of(kind: str) -> dict[str, Tensor]:
    ids = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(2))
    inputs = {"input_ids": ids}
    if kind == "padded":
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][0, 6:] = 0
    return inputs


def in_parts(
    world: World,
    inputs: dict[str, Any],
    *,
    skip_layer: int | None = None,
    scores: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    template = world.template
    with torch.no_grad():
        hidden, calls = template.front(world.weights(0), inputs)
        for block, call in enumerate(calls, 1):
            if call.layer != skip_layer:
                hidden = template.routed_layer(world.weights(block), hidden, call)[0]
        rows = template.tail(world.weights(len(calls) + 1), hidden)
        return (scores or template.scores)(F.linear(rows, *world.head()))


def plain_logits(world: World, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = world.plain(**inputs, use_cache=False).logits
    return logits.reshape(-1, logits.shape[-1])


@pytest.mark.few(43)
@pytest.mark.parametrize("inputs", ["whole", "padded"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_in_a_row_give_the_logits_of_the_plain_model(
    family: str, dtype: Dtype, inputs: str
) -> None:
    world = world_of(family, dtype)
    expected = plain_logits(world, inputs_of(inputs))
    found = in_parts(world, inputs_of(inputs))
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("layer", [0, 3])
def test_a_layer_left_out_would_be_noticed(layer: int) -> None:
    world, inputs = world_of("llama"), inputs_of("whole")
    assert not torch.equal(in_parts(world, inputs, skip_layer=layer), plain_logits(world, inputs))


def test_scores_that_change_nothing_cost_nothing() -> None:
    logits = torch.randn(3, 320)
    assert world_of("llama", "fp32").template.scores(logits) is logits


@pytest.mark.parametrize("family", ["gpt2", "gpt_bigcode", "llama"])
def test_a_tail_takes_more_tokens_than_there_are_positions(family: str) -> None:
    world = world_of(family, "fp32")
    config = world.plain.config
    hidden = torch.randn(1, config.max_position_embeddings + 9, config.hidden_size)
    weights = world.weights(config.num_hidden_layers + 1)
    with torch.no_grad():
        rows = world.template.tail(weights, hidden)
        parts = [
            world.template.tail(weights, part) for part in torch.tensor_split(hidden, 8, dim=1)
        ]
    assert torch.equal(rows, torch.cat(parts))


@pytest.mark.parametrize("family", ["gemma2", "cohere"])
def test_gradients_go_through_scores_as_through_the_model(family: str) -> None:
    world, inputs = world_of(family, "fp32"), inputs_of("whole")
    with torch.no_grad():
        hidden, calls = world.template.front(world.weights(0), inputs)
        for block, call in enumerate(calls, 1):
            hidden = world.template.routed_layer(world.weights(block), hidden, call)[0]
        rows = world.template.tail(world.weights(len(calls) + 1), hidden)
    heard: list[Tensor] = []
    head = world.plain.get_output_embeddings()
    hook = head.register_forward_hook(lambda module, given, logits: heard.append(logits))
    try:
        logits: Tensor = world.plain(**inputs, use_cache=False).logits
    finally:
        hook.remove()
    d_logits = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    (expected,) = torch.autograd.grad(logits, heard[0], d_logits)
    projected = F.linear(rows, *world.head()).requires_grad_()
    (found,) = torch.autograd.grad(
        world.template.scores(projected), projected, d_logits.flatten(0, 1)
    )
    assert torch.equal(found, expected.flatten(0, 1))


# Law 2: no part reads a weight that it was not given.


@pytest.mark.parametrize("family", FAMILIES)
def test_a_part_does_not_depend_on_what_it_was_not_given(family: str) -> None:
    """With every stand-in poisoned, each part computes as before."""
    world, inputs = world_of(family), inputs_of("whole")
    expected = in_parts(world, inputs)
    template = Template(world.decoder)
    template._stand_ins = {
        name: torch.full_like(zero, float("nan")) for name, zero in template._stand_ins.items()
    }
    poisoned = World(plain=world.plain, decoder=world.decoder, template=template)
    assert torch.equal(in_parts(poisoned, inputs), expected)
    with torch.no_grad():  # and the poison works: the front needs its embedding
        hidden, _ = template.front({}, inputs)
    assert not hidden.isfinite().all()


@pytest.mark.parametrize("family", ["llama", "mixtral", "falcon_mamba", "gpt2"])
def test_a_layer_without_one_of_its_weights_cannot_run(family: str) -> None:
    world, inputs = world_of(family), inputs_of("whole")
    with torch.no_grad():
        hidden, calls = world.template.front(world.weights(0), inputs)
        for name in world.weights(1):
            weights = {n: w for n, w in world.weights(1).items() if n != name}
            with pytest.raises(AssertionError, match="layer 0 lacks"):
                world.template.routed_layer(weights, hidden, calls[0])[0]
        with pytest.raises(AssertionError, match="layer 1 lacks"):
            world.template.routed_layer(world.weights(1), hidden, calls[1])[0]


def test_the_skeleton_is_as_it_was_after_a_call_that_failed() -> None:
    world, inputs = world_of("llama"), inputs_of("whole")
    model = world.decoder.model
    modules = [module for _, module in model.named_modules()]
    with pytest.raises(RuntimeError):
        world.template.front({"model.embed_tokens.weight": torch.zeros(3)}, inputs)
    with pytest.raises(RuntimeError):
        world.template.tail({"model.norm.weight": torch.zeros(3)}, torch.zeros(1, 2, 64))
    assert [module for _, module in model.named_modules()] == modules
    assert all(param.is_meta for param in model.parameters())
    assert torch.equal(in_parts(world, inputs), plain_logits(world, inputs))

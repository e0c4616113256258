"""Where a layer is cut: at its one meeting of tokens, found at any size, proved or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, MixtralConfig, PreTrainedConfig

from megatrain.models.build import build_decoder
from megatrain.models.probing.stand_ins import Call
from megatrain.models.probing.tile_cuts import LARGE, ROW_LENGTHS, Samples, find_cut, sampled_call
from megatrain.models.template import Template
from testkit.cases import at_a_push
from testkit.families import FAMILIES, tiny_config
from tests.engine.flash_stand_ins import use_flash_stand_ins
from tests.models.test_family_table import printed_tiles, tiles_row


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.inside(hidden).cumsum(dim=1)
        return mixed


class Toy(nn.Module):
    """Mixes tokens in one module, and where `elsewhere` does."""

    def __init__(self, elsewhere: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mixing, self.up = Mixing(), nn.Linear(8, 8)
        self.elsewhere = elsewhere

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.elsewhere(self.up(self.mixing(hidden).tanh()))


def _samples() -> Samples:
    call = Call(layer=0, args=(), kwargs={})
    short, long = (sampled_call(torch.zeros(2, n, 8), call) for n in ROW_LENGTHS)
    return [(short, long)]


def test_a_layer_is_cut_at_the_module_where_tokens_meet() -> None:
    cut = find_cut(Toy(torch.relu), _samples())
    assert cut is not None
    assert cut.mixer == "mixing"
    assert cut.handed == {(0, 0): 1}
    assert cut.mixed == {(): 1}


@pytest.mark.parametrize(
    "elsewhere",
    [
        lambda t: t + t.roll(1, dims=1),
        lambda t: t - t.mean(dim=1, keepdim=True),
        lambda t: t * t.shape[1],
    ],
    ids=["shifted", "centered", "counted"],
)
def test_a_layer_whose_tokens_meet_elsewhere_too_is_not_cut(
    elsewhere: Callable[[Tensor], Tensor],
) -> None:
    assert find_cut(Toy(elsewhere), _samples()) is None


def test_projections_that_feed_the_residual_stream_are_computed_again() -> None:
    llama, gated = (
        Template(build_decoder(tiny_config(family), "bf16"), tiled=True).cuts[3]
        for family in ("llama", "qwen3_next")
    )
    assert llama is not None
    assert set(llama.unread) == {f"self_attn.{name}_proj" for name in "qkv"}
    assert gated is not None  # half of what its q_proj makes is a gate behind attention
    assert set(gated.unread) == {f"self_attn.{name}_proj" for name in "kv"}


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows how many elements the largest tensor has that was made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            elements = result.untyped_storage().nbytes() // result.element_size()
            self.numel = max(self.numel, elements if result.device.type == "cpu" else 0)
        return result


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(
            hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_hidden_layers=2,
            num_key_value_heads=8, vocab_size=320,
        ),
        MixtralConfig(num_hidden_layers=2, vocab_size=320),
    ],
    ids=["llama-70b", "mixtral-8x7b"],
)  # fmt: skip
def test_learning_about_a_large_layer_makes_nothing_large(config: PreTrainedConfig) -> None:
    decoder = build_decoder(config, "bf16")
    with Largest() as largest:
        template = Template(decoder, tiled=True)
    assert [cut is not None and cut.mixer is None for cut in template.cuts] == [True, True]
    weight = config.hidden_size * config.intermediate_size
    assert 0 < largest.numel <= 4 * LARGE < weight / 50  # what experts make of 28 tokens


def test_a_cut_is_found_where_the_kernels_of_flash_attention_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = use_flash_stand_ins(monkeypatch)
    decoder = build_decoder(tiny_config("llama"), "bf16", attn="flash_attention_2")
    template = Template(decoder, tiled=True)
    assert all(cut is not None and cut.mixer is None for cut in template.cuts)
    assert kernels.plain_calls == 0
    assert kernels.document_calls == []


def test_a_family_is_not_taken_for_flash_attention_by_its_name() -> None:
    """mimo_v2_flash attends by its own function, which returns weights too."""
    template = Template(build_decoder(tiny_config("mimo_v2_flash"), "bf16"), tiled=True)
    assert all(cut is not None and cut.mixed.keys() == {(0,), (1,)} for cut in template.cuts)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", at_a_push(FAMILIES, 6))
def test_families_are_cut_where_their_page_says(family: str) -> None:
    assert printed_tiles(family) == tiles_row(family)
